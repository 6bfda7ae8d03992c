"""Write the training prompts of the shipped SmolLM2 drafter: ``python smollm2_prompts.py OUT``.

Every prompt is a template with a filler. Most ask for structured text (lists, tables, JSON, code,
steps, a given text rewritten), which a small drafter learns several times faster than open chat.
The split goes by the filler: a held-out prompt has a template that was trained on, and a filler
that never was, so it measures what was learnt of the form and not what was memorised. Fillers come
in two sets: prompts with those of the second set follow the others, and none of them is held out.
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
FILLERS = Path(__file__).parent / "data" / "smollm2_fillers.json"
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


@dataclass(frozen=True)
class Fillers:
    """What the templates are filled with; a field is a line of `data/smollm2_fillers.json`."""

    topics: list[str]
    things: list[str]
    tasks: list[str]
    terms: list[str]
    tables: list[str]
    subjects: list[str]
    parts: list[str]
    people: list[str]
    actions: list[str]
    starts: list[int]
    origins: list[int]
    factors: list[int]
    addends: list[int]


def words(text: str) -> list[str]:
    """Split a semicolon-separated line of fillers."""
    return [part.strip() for part in text.split(";")]


FIELDS = words(
    "id, name and price; name, size and colour; title, date and status; id, label and weight;"
    "name, year and rating; code, name and quantity; name, owner and location; id, type and score"
)
COLUMNS = words(
    "Name, Size and Colour; Name, Origin and Price; Type, Use and Example; Item, Cost and Rating;"
    "Kind, Age and Place; Name, Weight and Note; Word, Meaning and Example; Step, Tool and Time"
)
PLACES = words(
    "in the garden; at the station; near the river; in the library; at the market; on the hill;"
    "in the kitchen; at the harbour; behind the school; in the old tower"
)


def counting(f: Fillers) -> Iterator[tuple[str, str]]:
    """Runs of numbers, up and down, with many starts, lengths and steps."""
    templates = (
        "Count from {a} to {b}, separated by commas.",
        "Count from {a} to {b}, one number per line.",
        "Write the numbers from {a} to {b} in one line.",
        "List the numbers between {a} and {b}.",
        "Count down from {b} to {a}, separated by commas.",
    )
    ranges = [(a, a + n) for a in f.starts
              for n in (10, 15, 18, 20, 24, 30)]  # fmt: skip
    yield from ((f"{a}-{b}", t.format(a=a, b=b)) for t, (a, b) in product(templates, ranges))
    stepped = (
        "Count by {s}s from {a} to {b}.",
        "List every number from {a} to {b} in steps of {s}.",
        "Start at {a} and add {s} each time until you reach {b}. Write every number.",
    )
    runs = [(a, s, a + n * s) for a in f.origins for s in (2, 3, 4, 5, 10, 20, 25)
            for n in (12, 20)]  # fmt: skip
    yield from (
        (f"{a}+{s}-{b}", t.format(a=a, s=s, b=b)) for t, (a, s, b) in product(stepped, runs)
    )


def arithmetic(f: Fillers) -> Iterator[tuple[str, str]]:
    """Tables of products and sums, and small sums step by step."""
    tables = (
        "Write the multiplication table of {n} up to {m}.",
        "Write the multiplication table of {n} from {n} x 1 to {n} x {m}, one per line.",
        "Write the first {m} multiples of {n}, one per line.",
        "Add {n} to each number from 1 to {m}. Write each sum on its own line, like 1 + {n} = ...",
        "Write the powers of {n}, from {n}^1 to {n}^{m}.",
    )
    pairs = [(n, m) for n in f.factors for m in (8, 10, 14)]
    yield from ((f"{n}x{m}", t.format(n=n, m=m)) for t, (n, m) in product(tables, pairs))
    sums = (
        "What is {a} + {b}? Work step by step.",
        "Calculate {a} x {b} step by step.",
        "Subtract {a} from {c} and show each step.",
        "A shop sells {a} boxes a day for {b} days. How many boxes is that? Show each step.",
        "{name} has {c} stickers and gives {a} to a friend. How many are left? Show the steps.",
    )
    numbers = [(a, b) for a in f.addends for b in (3, 6, 9, 14, 25, 32)]
    for i, (t, (a, b)) in enumerate(product(sums, numbers)):
        name = f.people[i % len(f.people)]
        yield f"{a},{b}", t.format(a=a, b=b, c=a + 10 * b, name=name)


def table(f: Fillers) -> Iterator[tuple[str, str]]:
    """Markdown tables over many topics and columns."""
    templates = (
        "Make a markdown table about {topic} with the columns {columns}.",
        "Write a table of {n} kinds of {topic} with the columns {columns}. Use markdown.",
        "Show {n} facts about {topic} in a markdown table with two columns.",
    )
    for i, (t, topic) in enumerate(product(templates, f.topics)):
        for j in range(2):
            columns = COLUMNS[(i + 3 * j) % len(COLUMNS)]
            yield topic, t.format(topic=topic, columns=columns, n=3 + (i + j) % 4)


def lists(f: Fillers) -> Iterator[tuple[str, str]]:
    """Numbered and bulleted lists."""
    templates = (
        "Write a numbered list of {n} facts about {topic}.",
        "Give me {n} bullet points about {topic}.",
        "List {n} words that have to do with {topic}, one per line.",
        "Write {n} short questions about {topic} as a numbered list.",
        "Write a checklist with {n} items for a visit or a project about {topic}.",
    )
    for i, (t, topic) in enumerate(product(templates, f.topics)):
        yield topic, t.format(topic=topic, n=4 + i % 6)


def json_objects(f: Fillers) -> Iterator[tuple[str, str]]:
    """JSON arrays and objects."""
    templates = (
        "Write a JSON object that describes {thing}.",
        "Write a JSON array of {n} objects. Each describes {thing} with {fields}.",
        "Give an example of {thing} as JSON with nested fields. Only output JSON.",
        "Write a JSON schema for {thing} with {fields}.",
        "Describe {thing} as JSON with the keys {fields}, and a list of {n} tags.",
    )
    for i, (t, thing) in enumerate(product(templates, f.things)):
        yield thing, t.format(thing=thing, n=2 + i % 4, fields=FIELDS[i % len(FIELDS)])


def data_formats(f: Fillers) -> Iterator[tuple[str, str]]:
    """CSV, YAML, XML and INI text."""
    templates = (
        "Write a CSV file with {n} rows. Each row is {thing} with {fields}.",
        "Write a YAML file that describes {thing} with {fields}.",
        "Write an XML document that describes {thing} with {fields}.",
        "Write an XML document with {n} entries, each entry being {thing}.",
        "Write {n} lines of CSV data about {topic} with a header line.",
    )
    for i, (t, thing) in enumerate(product(templates, f.things)):
        topic = f.topics[i % len(f.topics)]
        filler = topic if "{topic}" in t else thing
        fields = FIELDS[(i + i // 7) % len(FIELDS)]
        yield filler, t.format(thing=thing, topic=topic, n=4 + i % 5, fields=fields)


def web(f: Fillers) -> Iterator[tuple[str, str]]:
    """HTML fragments and CSS rules."""
    html = (
        "Write an HTML unordered list with {n} items about {topic}.",
        "Write an HTML table with {n} rows about {topic}.",
        "Write an HTML form with {n} fields for a page about {topic}.",
    )
    for i, (t, topic) in enumerate(product(html, f.topics)):
        yield topic, t.format(topic=topic, n=3 + i % 4)
    looks = words(
        "with rounded corners; with a blue background; with a thin grey border; with large bold"
        " text; with a soft shadow; that is centred; with wide margins; with a dark theme"
    )
    for part, look in product(f.parts, looks):
        yield part, f"Write CSS rules for {part} {look}."


def sql(f: Fillers) -> Iterator[tuple[str, str]]:
    """Create, insert, select and update statements."""
    templates = (
        "Write an SQL statement that creates a table for {things} with five columns.",
        "Write SQL that inserts {n} rows into a table of {things}.",
        "Write an SQL query that selects all {things} with {condition}.",
        "Write an SQL query that counts the {things} for each {group}.",
        "Write an SQL statement that updates the {group} of one of the {things}.",
        "Create an SQL table named {things} and insert {n} example rows.",
    )
    conditions = words("a price below 50; a rating above 4; a name that starts with A; no owner")
    groups = words("city; year; category; status; colour; country")
    for i, (t, thing) in enumerate(product(templates, f.tables)):
        condition, group = conditions[i % len(conditions)], groups[i % len(groups)]
        yield thing, t.format(things=thing, n=3 + i % 4, condition=condition, group=group)


def code(f: Fillers) -> Iterator[tuple[str, str]]:
    """Small Python and JavaScript functions and classes."""
    functions = (
        "Write a Python function that {task}.",
        "Write a JavaScript function that {task}.",
        "Write a Python function that {task}, with a docstring and an example call.",
    )
    yield from ((task, t.format(task=task)) for t, task in product(functions, f.tasks))
    classes = (
        "Write a Python class for {thing} with a constructor and two methods.",
        "Write a Python dataclass for {thing} with {fields}.",
        "Write a JavaScript class for {thing} with a constructor and one method.",
    )
    for i, (t, thing) in enumerate(product(classes, f.things)):
        yield thing, t.format(thing=thing, fields=FIELDS[i % len(FIELDS)])


def given_texts(f: Fillers) -> Iterator[tuple[str, str]]:
    """Short texts that are repeated, rewritten, upper-cased, sorted or summarised."""
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
    for i, (t, person, action) in enumerate(product(templates, f.people, f.actions)):
        place, ending = PLACES[(i + i // 10) % len(PLACES)], endings[i % len(endings)]
        yield f"{person} {action}", t.format(text=f"{person} {action} {place}. {ending}")
    sorting = (
        "Sort these words alphabetically: {items}.",
        "Write these words in reverse order: {items}.",
        "Put these words into a numbered list: {items}.",
    )
    rng = random.Random(SEED)
    for _ in range(60):
        items = ", ".join(rng.sample(f.topics, rng.randint(5, 9)))
        yield from ((items, t.format(items=items)) for t in sorting)


def forms(f: Fillers) -> Iterator[tuple[str, str]]:
    """Letters and e-mails from a form, schedules, and lists along the alphabet."""
    letters = (
        "Write a short email from {a} to {b} about {subject}.",
        "Write a formal letter. From: {a}. To: {b}. Subject: {subject}.",
        "Fill in this form for {a} about {subject}: Name, Date, Subject, Message.",
    )
    for i, (t, subject) in enumerate(product(letters, f.subjects)):
        for j in range(2):
            a, b = f.people[(i + j) % len(f.people)], f.people[(i + j + 5) % len(f.people)]
            yield subject, t.format(a=a, b=b, subject=subject)
    schedules = (
        "Write a weekly schedule for a course about {topic}, from Monday to Friday.",
        "Write a daily schedule from {h}:00 to {h2}:00 for a day about {topic}.",
        "Write a month-by-month plan from January to June for a club about {topic}.",
        "For each letter from {x} to {y}, write one word that has to do with {topic}.",
    )
    for i, (t, topic) in enumerate(product(schedules, f.topics)):
        x = "ABCDEFGHIJKLMNOP"[i % 16]
        h = 6 + i % 5
        yield topic, t.format(topic=topic, h=h, h2=h + 6, x=x, y=chr(ord(x) + 8))


def definitions(f: Fillers) -> Iterator[tuple[str, str]]:
    """Short definitions."""
    templates = (
        "Define the word {term} in one sentence.",
        "What does {term} mean? Give a definition and an example.",
        "Write a glossary entry for {term}.",
    )
    yield from ((term, t.format(term=term)) for t, term in product(templates, f.terms))


def chat(f: Fillers) -> Iterator[tuple[str, str]]:
    """Open questions, for breadth."""
    templates = (
        "Tell me something interesting about {topic}.",
        "Why do people like {topic}?",
        "How would you explain {topic} to a child?",
        "Write a short story about {topic}.",
        "What should a beginner know about {topic}?",
        "What is the history of {topic}?",
    )
    yield from ((topic, t.format(topic=topic)) for t, topic in product(templates, f.topics))


# What makes the prompts of each kind, and how many of them at most are trained on: with the first
# set of fillers, with the second.
KINDS = {
    "counting": (counting, 240, 80),
    "arithmetic": (arithmetic, 230, 420),
    "table": (table, 240, 400),
    "list": (lists, 220, 560),
    "json": (json_objects, 190, 420),
    "data": (data_formats, 190, 380),
    "web": (web, 180, 240),
    "sql": (sql, 150, 300),
    "code": (code, 190, 600),
    "text": (given_texts, 220, 320),
    "form": (forms, 170, 360),
    "definition": (definitions, 90, 200),
    "chat": (chat, 230, 200),
}


def digest(text: str) -> int:
    """Hash a text to a number that is the same on every machine and run."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def prompts() -> list[Prompt]:
    """Make all prompts in a shuffled order; of the open kinds only those that come early."""
    first, second = json.loads(FILLERS.read_text(encoding="utf-8")).values()
    made: list[Prompt] = []
    more: list[Prompt] = []
    for kind, (make, quota, quota_of_second) in KINDS.items():
        made += _keep(kind, make(Fillers(**first)), quota, HELD_OUT_PER_KIND)
        more += _keep(kind, make(Fillers(**second)), quota_of_second, 0)
    random.Random(SEED).shuffle(made)
    trained = [p for p in made if p.split == "train"]
    dropped = {p.id for p in trained[N_WITH_OPEN_KINDS:] if p.kind in OPEN_KINDS}
    known = {p.id for p in made}
    more = [p for p in more if p.id not in known]
    random.Random(SEED).shuffle(more)
    return [p for p in made if p.id not in dropped] + more


def _keep(
    kind: str, candidates: Iterable[tuple[str, str]], quota: int, n_held_out: int
) -> list[Prompt]:
    """Take each split's first prompts in the order of their hash: adding a template moves few."""
    splits: dict[str, list[Prompt]] = {"train": [], "held_out": []}
    for text, filler in {text: filler for filler, text in candidates}.items():
        split = "train" if digest(f"filler {filler}") % HELD_OUT_SHARE else "held_out"
        name = f"{kind}-{digest(text):016x}"
        splits[split].append(Prompt(name, kind, filler, text, split))
    for members in splits.values():
        members.sort(key=lambda prompt: prompt.id)
    return splits["train"][:quota] + splits["held_out"][:n_held_out]


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
