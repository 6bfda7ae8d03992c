"""The tests of the small functions pass for right programs only."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "small_functions.jsonl"
RIGHT = """
add(a, b): a + b
subtract(a, b): a - b
multiply(a, b): a * b
divide(a, b): a / b
square(x): x * x
cube(x): x ** 3
double(x): 2 * x
is_even(n): n % 2 == 0
is_odd(n): n % 2 == 1
is_positive(x): x > 0
absolute(x): abs(x)
largest(numbers): max(numbers)
smallest(numbers): min(numbers)
sum_list(numbers): sum(numbers)
average(numbers): sum(numbers) / len(numbers)
count_items(items): len(items)
first_item(items): items[0]
last_item(items): items[-1]
reverse_string(s): s[::-1]
reverse_list(items): items[::-1]
is_palindrome(s): s == s[::-1]
to_upper(s): s.upper()
to_lower(s): s.lower()
string_length(s): len(s)
count_words(text): len(text.split())
count_vowels(s): sum(c in 'aeiou' for c in s)
factorial(n): 1 if n < 2 else n * factorial(n - 1)
power(base, exponent): base ** exponent
sort_numbers(numbers): sorted(numbers)
unique_items(items): list(set(items))
join_words(words): ' '.join(words)
repeat_string(s, n): s * n
starts_with(s, prefix): s.startswith(prefix)
contains(items, value): value in items
celsius_to_fahrenheit(c): c * 9 / 5 + 32
rectangle_area(width, height): width * height
square_list(numbers): [x * x for x in numbers]
even_numbers(numbers): [x for x in numbers if x % 2 == 0]
minutes_to_seconds(minutes): minutes * 60
is_leap_year(year): year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
"""
TASKS = [json.loads(line) for line in FILE.read_text("utf-8").splitlines()]


def judge(task: dict[str, str], body: str) -> None:
    [head] = re.findall(r"function (.+?\)) that", task["prompt"])
    scope: dict[str, Any] = {}
    exec(f"def {head}:\n    return {body}\n", scope)
    exec(task["tests"], scope)


@pytest.mark.parametrize(("task", "line"), list(zip(TASKS, RIGHT.split("\n")[1:-1], strict=True)))
def test_right_programs_pass_and_wrong_ones_do_not(task: dict[str, str], line: str) -> None:
    head, body = line.split(": ", 1)
    assert f" {head} that " in task["prompt"]
    judge(task, body)
    with pytest.raises(AssertionError):
        judge(task, "None")
