"""Write the training prompts of the shipped SmolLM2 drafter: ``python smollm2_prompts.py OUT``.

Every prompt is a template with a filler. Most ask for structured text (lists, tables, JSON, code,
steps, a given text rewritten), which a small drafter learns several times faster than open chat.
The split goes by the filler: a held-out prompt has a template that was trained on, and a filler
that never was, so it measures what was learnt of the form and not what was memorised.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

SEED = 0
HELD_OUT_SHARE = 12  # one filler in twelve is never trained on
HELD_OUT_PER_KIND = 5
# Kinds that a small drafter learns slowly: trained on for breadth, with a part of their prompts.
OPEN_KINDS = ("chat", "definition", "form", "list")
N_WITH_OPEN_KINDS = 1152


@dataclass(frozen=True)
class Prompt:
    """One prompt: ``filler`` is what the split goes by, ``split`` is "train" or "held_out"."""

    id: str
    kind: str
    filler: str
    prompt: str
    split: str


def words(text: str) -> list[str]:
    """Split a semicolon-separated line of fillers."""
    return [part.strip() for part in text.split(";")]


TOPICS = words(
    "volcanoes; bicycles; tea; coffee; bridges; castles; penguins; whales; owls; horses; bees;"
    "mushrooms; roses; oak trees; rivers; deserts; islands; glaciers; clouds; storms; trains;"
    "ships; aeroplanes; submarines; rockets; satellites; telescopes; microscopes; clocks; maps;"
    "guitars; violins; drums; pianos; flutes; paintings; sculptures; poems; novels; films;"
    "bread; cheese; soups; salads; spices; chocolate; apples; potatoes; rice; pasta; swimming;"
    "running; chess; tennis; football; climbing; sailing; skiing; yoga; dancing; robots; printers;"
    "keyboards; batteries; magnets; solar panels; wind turbines; libraries; museums; schools;"
    "hospitals; markets; farms; gardens; forests; lakes; beaches; mountains; caves; harbours"
)
THINGS = words(
    "a book; a film; a song; a recipe; a city; a hotel room; a flight; a train ticket; a car;"
    "a bicycle; a laptop; a phone; a camera; a printer; a chair; a lamp; a shirt; a pair of shoes;"
    "a plant; a pet; a student; a teacher; a patient; an employee; a customer; an order; "
    "an invoice; a payment; a parcel; a meeting; a calendar event; a blog post; a comment; "
    "a photo; a playlist; a football team; a player; a museum; a painting; a weather report; "
    "a sensor; a robot; a web server; a database; a user account; a password policy; "
    "a game level; a map marker"
)
FIELDS = words(
    "id, name and price; name, size and colour; title, date and status; id, label and weight;"
    "name, year and rating; code, name and quantity; name, owner and location; id, type and score"
)
COLUMNS = words(
    "Name, Size and Colour; Name, Origin and Price; Type, Use and Example; Item, Cost and Rating;"
    "Kind, Age and Place; Name, Weight and Note; Word, Meaning and Example; Step, Tool and Time"
)
PEOPLE = words("Maria; Omar; Lena; Tom; Aisha; Jonas; Priya; Pavel; Ingrid; Carlos; Yuki; Ben")
PLACES = words(
    "in the garden; at the station; near the river; in the library; at the market; on the hill;"
    "in the kitchen; at the harbour; behind the school; in the old tower"
)


def counting() -> Iterator[tuple[str, str]]:
    """Runs of numbers, up and down, with many starts, lengths and steps."""
    templates = (
        "Count from {a} to {b}, separated by commas.",
        "Count from {a} to {b}, one number per line.",
        "Write the numbers from {a} to {b} in one line.",
        "List the numbers between {a} and {b}.",
        "Count down from {b} to {a}, separated by commas.",
    )
    ranges = [(a, a + n) for a in (2, 3, 5, 6, 8, 11, 14, 17, 21, 26, 33, 45, 50, 72, 90, 101)
              for n in (10, 15, 18, 20, 24, 30)]  # fmt: skip
    yield from ((f"{a}-{b}", t.format(a=a, b=b)) for t, (a, b) in product(templates, ranges))
    stepped = (
        "Count by {s}s from {a} to {b}.",
        "List every number from {a} to {b} in steps of {s}.",
        "Start at {a} and add {s} each time until you reach {b}. Write every number.",
    )
    runs = [(a, s, a + n * s) for a in (0, 1, 4, 10, 20, 100) for s in (2, 3, 4, 5, 10, 20, 25)
            for n in (12, 20)]  # fmt: skip
    yield from (
        (f"{a}+{s}-{b}", t.format(a=a, s=s, b=b)) for t, (a, s, b) in product(stepped, runs)
    )


def arithmetic() -> Iterator[tuple[str, str]]:
    """Tables of products and sums, and small sums step by step."""
    tables = (
        "Write the multiplication table of {n} up to {m}.",
        "Write the multiplication table of {n} from {n} x 1 to {n} x {m}, one per line.",
        "Write the first {m} multiples of {n}, one per line.",
        "Add {n} to each number from 1 to {m}. Write each sum on its own line, like 1 + {n} = ...",
        "Write the powers of {n}, from {n}^1 to {n}^{m}.",
    )
    pairs = [(n, m) for n in (2, 3, 4, 5, 6, 8, 9, 11, 12, 13, 15, 20) for m in (8, 10, 14)]
    yield from ((f"{n}x{m}", t.format(n=n, m=m)) for t, (n, m) in product(tables, pairs))
    sums = (
        "What is {a} + {b}? Work step by step.",
        "Calculate {a} x {b} step by step.",
        "Subtract {a} from {c} and show each step.",
        "A shop sells {a} boxes a day for {b} days. How many boxes is that? Show each step.",
        "{name} has {c} stickers and gives {a} to a friend. How many are left? Show the steps.",
    )
    numbers = [(a, b) for a in (12, 16, 23, 34, 45, 58, 67) for b in (3, 6, 9, 14, 25, 32)]
    for i, (t, (a, b)) in enumerate(product(sums, numbers)):
        name = PEOPLE[i % len(PEOPLE)]
        yield f"{a},{b}", t.format(a=a, b=b, c=a + 10 * b, name=name)


def table() -> Iterator[tuple[str, str]]:
    """Markdown tables over many topics and columns."""
    templates = (
        "Make a markdown table about {topic} with the columns {columns}.",
        "Write a table of {n} kinds of {topic} with the columns {columns}. Use markdown.",
        "Show {n} facts about {topic} in a markdown table with two columns.",
    )
    for i, (t, topic) in enumerate(product(templates, TOPICS)):
        for j in range(2):
            columns = COLUMNS[(i + 3 * j) % len(COLUMNS)]
            yield topic, t.format(topic=topic, columns=columns, n=3 + (i + j) % 4)


def lists() -> Iterator[tuple[str, str]]:
    """Numbered and bulleted lists."""
    templates = (
        "Write a numbered list of {n} facts about {topic}.",
        "Give me {n} bullet points about {topic}.",
        "List {n} words that have to do with {topic}, one per line.",
        "Write {n} short questions about {topic} as a numbered list.",
        "Write a checklist with {n} items for a visit or a project about {topic}.",
    )
    for i, (t, topic) in enumerate(product(templates, TOPICS)):
        yield topic, t.format(topic=topic, n=4 + i % 6)


def json_objects() -> Iterator[tuple[str, str]]:
    """JSON arrays and objects."""
    templates = (
        "Write a JSON object that describes {thing}.",
        "Write a JSON array of {n} objects. Each describes {thing} with {fields}.",
        "Give an example of {thing} as JSON with nested fields. Only output JSON.",
        "Write a JSON schema for {thing} with {fields}.",
        "Describe {thing} as JSON with the keys {fields}, and a list of {n} tags.",
    )
    for i, (t, thing) in enumerate(product(templates, THINGS)):
        yield thing, t.format(thing=thing, n=2 + i % 4, fields=FIELDS[i % len(FIELDS)])


def data_formats() -> Iterator[tuple[str, str]]:
    """CSV, YAML, XML and INI text."""
    templates = (
        "Write a CSV file with {n} rows. Each row is {thing} with {fields}.",
        "Write a YAML file that describes {thing} with {fields}.",
        "Write an XML document that describes {thing} with {fields}.",
        "Write an XML document with {n} entries, each entry being {thing}.",
        "Write {n} lines of CSV data about {topic} with a header line.",
    )
    for i, (t, thing) in enumerate(product(templates, THINGS)):
        topic = TOPICS[i % len(TOPICS)]
        filler = topic if "{topic}" in t else thing
        fields = FIELDS[(i + i // 7) % len(FIELDS)]
        yield filler, t.format(thing=thing, topic=topic, n=4 + i % 5, fields=fields)


def web() -> Iterator[tuple[str, str]]:
    """HTML fragments and CSS rules."""
    html = (
        "Write an HTML unordered list with {n} items about {topic}.",
        "Write an HTML table with {n} rows about {topic}.",
        "Write an HTML form with {n} fields for a page about {topic}.",
    )
    for i, (t, topic) in enumerate(product(html, TOPICS)):
        yield topic, t.format(topic=topic, n=3 + i % 4)
    parts = words(
        "a button; a card; a header; a footer; a sidebar; a form field; a table; a table row;"
        "a photo gallery; a menu; a badge; a tooltip; a progress bar; a quote; a code block;"
        "a price tag; an alert box; a login box; a search box; a page title; a list of links"
    )
    looks = words(
        "with rounded corners; with a blue background; with a thin grey border; with large bold"
        " text; with a soft shadow; that is centred; with wide margins; with a dark theme"
    )
    for part, look in product(parts, looks):
        yield part, f"Write CSS rules for {part} {look}."


def sql() -> Iterator[tuple[str, str]]:
    """Create, insert, select and update statements."""
    templates = (
        "Write an SQL statement that creates a table for {things} with five columns.",
        "Write SQL that inserts {n} rows into a table of {things}.",
        "Write an SQL query that selects all {things} with {condition}.",
        "Write an SQL query that counts the {things} for each {group}.",
        "Write an SQL statement that updates the {group} of one of the {things}.",
        "Create an SQL table named {things} and insert {n} example rows.",
    )
    things = words(
        "cars; films; songs; hotels; flights; tickets; students; teachers; patients; employees;"
        "invoices; payments; parcels; meetings; photos; players; teams; museums; sensors; robots;"
        "servers; recipes; animals; plants; houses; shops; courses; exams; messages; events"
    )
    conditions = words("a price below 50; a rating above 4; a name that starts with A; no owner")
    groups = words("city; year; category; status; colour; country")
    for i, (t, thing) in enumerate(product(templates, things)):
        condition, group = conditions[i % len(conditions)], groups[i % len(groups)]
        yield thing, t.format(things=thing, n=3 + i % 4, condition=condition, group=group)


def code() -> Iterator[tuple[str, str]]:
    """Small Python and JavaScript functions and classes."""
    functions = (
        "Write a Python function that {task}.",
        "Write a JavaScript function that {task}.",
        "Write a Python function that {task}, with a docstring and an example call.",
    )
    tasks = words(
        "returns the largest of three numbers; sums the digits of a number; counts the vowels of a"
        " string; reverses a string; removes duplicates from a list; computes a factorial; tests if"
        " a number is prime; converts Celsius to Fahrenheit; counts the words of a text; finds the"
        " shortest word of a list; computes the average of a list; merges two dictionaries; returns"
        " the first n Fibonacci numbers; rounds a price to two digits; tests if a year is a leap"
        " year; computes the area of a circle; sorts a list of names; flattens a list of lists;"
        " swaps two values; computes the greatest common divisor; capitalises every word; counts"
        " how often each letter occurs; converts minutes to hours and minutes; tests if two words"
        " are anagrams; draws a square of stars; finds the index of a value in a list; multiplies"
        " all numbers of a list; splits a list into two halves; repeats a word n times; builds a"
        " dictionary from two lists; filters the odd numbers of a list; computes the power of a"
        " number; parses a date like 2024-05-01; prints the multiplication table of a number"
    )
    yield from ((task, t.format(task=task)) for t, task in product(functions, tasks))
    classes = (
        "Write a Python class for {thing} with a constructor and two methods.",
        "Write a Python dataclass for {thing} with {fields}.",
        "Write a JavaScript class for {thing} with a constructor and one method.",
    )
    for i, (t, thing) in enumerate(product(classes, THINGS)):
        yield thing, t.format(thing=thing, fields=FIELDS[i % len(FIELDS)])


def given_texts() -> Iterator[tuple[str, str]]:
    """Short texts that are repeated, rewritten, upper-cased, sorted or summarised."""
    actions = words(
        "fed the birds and wrote a long letter; found a small key under a stone; painted a blue"
        " door and sang a song; lost a red umbrella and looked for it all day; sold twelve jars of"
        " honey; met an old friend and drank a cup of tea; planted three trees in the rain;"
        " repaired a bicycle with a new chain; read a book about the sea; baked two loaves of bread"
    )
    endings = words("Then it began to snow.; Everyone was happy.; Nobody knew why.; It was late.")
    templates = (
        "Repeat this text exactly: {text}",
        "Write this text in capital letters: {text}",
        "Rewrite this text in the present tense: {text}",
        "Summarise this text in one short sentence: {text}",
        "Write each word of this text on its own line: {text}",
        "Correct the spelling and repeat the text: {text}",
        "Turn this text into bullet points: {text}",
        "Replace the name in this text with Robert: {text}",
    )
    for i, (t, person, action) in enumerate(product(templates, PEOPLE, actions)):
        place, ending = PLACES[(i + i // 10) % len(PLACES)], endings[i % len(endings)]
        yield f"{person} {action}", t.format(text=f"{person} {action} {place}. {ending}")
    sorting = (
        "Sort these words alphabetically: {items}.",
        "Write these words in reverse order: {items}.",
        "Put these words into a numbered list: {items}.",
    )
    rng = random.Random(SEED)
    for _ in range(60):
        items = ", ".join(rng.sample(TOPICS, rng.randint(5, 9)))
        yield from ((items, t.format(items=items)) for t in sorting)


def forms() -> Iterator[tuple[str, str]]:
    """Letters and e-mails from a form, schedules, and lists along the alphabet."""
    subjects = words(
        "a late parcel; a broken heater; a birthday party; a job application; a lost bag; a school"
        " trip; a new appointment; a wrong bill; a summer holiday; a borrowed book; a football"
        " match; a garden party; a piano lesson; a hotel booking; a cancelled flight;"
        " a project meeting"
    )
    letters = (
        "Write a short email from {a} to {b} about {subject}.",
        "Write a formal letter. From: {a}. To: {b}. Subject: {subject}.",
        "Fill in this form for {a} about {subject}: Name, Date, Subject, Message.",
    )
    for i, (t, subject) in enumerate(product(letters, subjects)):
        for j in range(2):
            a, b = PEOPLE[(i + j) % 12], PEOPLE[(i + j + 5) % 12]
            yield subject, t.format(a=a, b=b, subject=subject)
    schedules = (
        "Write a weekly schedule for a course about {topic}, from Monday to Friday.",
        "Write a daily schedule from {h}:00 to {h2}:00 for a day about {topic}.",
        "Write a month-by-month plan from January to June for a club about {topic}.",
        "For each letter from {x} to {y}, write one word that has to do with {topic}.",
    )
    for i, (t, topic) in enumerate(product(schedules, TOPICS)):
        x = "ABCDEFGHIJKLMNOP"[i % 16]
        h = 6 + i % 5
        yield topic, t.format(topic=topic, h=h, h2=h + 6, x=x, y=chr(ord(x) + 8))


def definitions() -> Iterator[tuple[str, str]]:
    """Short definitions."""
    templates = (
        "Define the word {term} in one sentence.",
        "What does {term} mean? Give a definition and an example.",
        "Write a glossary entry for {term}.",
    )
    terms = words(
        "gravity; erosion; inflation; democracy; friction; evaporation; habitat; orbit; protein;"
        "metaphor; rhythm; budget; algorithm; variable; molecule; fossil; climate; tide; harvest;"
        "energy; voltage; profit; symmetry; ratio; satire; dialect; migration; predator; pollen;"
        "bacteria; lever; pulley; density; vaccine; parliament; treaty; archive; compass; equator"
    )
    yield from ((term, t.format(term=term)) for t, term in product(templates, terms))


def chat() -> Iterator[tuple[str, str]]:
    """Open questions, for breadth."""
    templates = (
        "Tell me something interesting about {topic}.",
        "Why do people like {topic}?",
        "How would you explain {topic} to a child?",
        "Write a short story about {topic}.",
        "What should a beginner know about {topic}?",
        "What is the history of {topic}?",
    )
    yield from ((topic, t.format(topic=topic)) for t, topic in product(templates, TOPICS))


# What makes the prompts of each kind, and how many of them can be trained on.
KINDS = {
    "counting": (counting, 240),
    "arithmetic": (arithmetic, 230),
    "table": (table, 240),
    "list": (lists, 220),
    "json": (json_objects, 190),
    "data": (data_formats, 190),
    "web": (web, 180),
    "sql": (sql, 150),
    "code": (code, 190),
    "text": (given_texts, 220),
    "form": (forms, 170),
    "definition": (definitions, 90),
    "chat": (chat, 230),
}


def digest(text: str) -> int:
    """Hash a text to a number that is the same on every machine and run."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def prompts() -> list[Prompt]:
    """Make all prompts in a shuffled order; of the open kinds only those that come early."""
    made = [p for kind, (make, quota) in KINDS.items() for p in _keep(kind, make(), quota)]
    random.Random(SEED).shuffle(made)
    trained = [p for p in made if p.split == "train"]
    dropped = {p.id for p in trained[N_WITH_OPEN_KINDS:] if p.kind in OPEN_KINDS}
    return [p for p in made if p.id not in dropped]


def _keep(kind: str, candidates: Iterable[tuple[str, str]], quota: int) -> list[Prompt]:
    """Take each split's first prompts in the order of their hash: adding a template moves few."""
    splits: dict[str, list[Prompt]] = {"train": [], "held_out": []}
    for text, filler in {text: filler for filler, text in candidates}.items():
        split = "train" if digest(f"filler {filler}") % HELD_OUT_SHARE else "held_out"
        name = f"{kind}-{digest(text):016x}"
        splits[split].append(Prompt(name, kind, filler, text, split))
    for members in splits.values():
        members.sort(key=lambda prompt: prompt.id)
    return splits["train"][:quota] + splits["held_out"][:HELD_OUT_PER_KIND]


def main() -> None:
    """Write the prompts of one split, or of both, as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--split", choices=["train", "held_out", "all"], default="all")
    options = parser.parse_args()
    chosen = [p for p in prompts() if options.split in ("all", p.split)]
    lines = [json.dumps(asdict(prompt), ensure_ascii=False) for prompt in chosen]
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
