"""The JSON file that ``hf-dflash bench`` writes: read, checked, written whole.

Reports, pictures, model cards and the Hub's metadata are made from it, and from nothing else. Its
``summary`` is for people and other programs; here it is always computed from the runs.
"""

import json
import os
import types
from collections import Counter
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .measurement_runs import (
    CycleSeconds,
    DrafterInfo,
    MadeWith,
    Method,
    Mode,
    Provenance,
    Run,
    Seconds,
    Settings,
    TargetInfo,
    Variant,
)
from .measurement_summary import (
    Acceptance,
    Difference,
    Identity,
    MethodSummary,
    PositionAcceptance,
    Quality,
    Spread,
    Summary,
    TimeShares,
    summarise,
)

__all__ = [
    "SCHEMA",
    "Acceptance",
    "CycleSeconds",
    "Difference",
    "DrafterInfo",
    "Identity",
    "MadeWith",
    "Measurement",
    "Method",
    "MethodSummary",
    "Mode",
    "PositionAcceptance",
    "Provenance",
    "Quality",
    "Run",
    "Seconds",
    "Settings",
    "Spread",
    "Summary",
    "TargetInfo",
    "TimeShares",
    "Variant",
    "check_measurement",
    "check_run",
    "from_plain",
    "read_measurement",
    "read_record",
    "spell",
    "summarise",
    "write_measurement",
    "write_whole",
]

SCHEMA = 1
T = TypeVar("T")


@dataclass(frozen=True)
class Measurement:
    """All that a benchmark measured.

    ``prompts`` holds, by data set, the user turns of each prompt: one, or several for a data set
    of conversations. ``runs[i].prompt_index`` and ``runs[i].turn`` point into it. ``token_texts``
    spells every token id of the runs (see `spell`), so that a report needs no tokenizer; it may be
    empty. ``wall_s`` is what the command took, loading and comparing included, in all its sittings
    up to the last prompt each of them finished; of several processes, the slowest one.
    ``prompt_options`` holds, by data set, what each prompt itself passes to the chat template,
    before the settings' ``template_options``; data sets whose prompts pass nothing are left out.
    """

    provenance: Provenance
    settings: Settings
    prompts: dict[str, list[list[str]]]
    runs: list[Run]
    token_texts: dict[str, str] = field(default_factory=dict)
    wall_s: float | None = None  # older files do not have it
    prompt_options: dict[str, list[dict[str, str | int | float | bool]]] = field(
        default_factory=dict
    )

    @cached_property
    def summary(self) -> Summary:
        """Every figure, computed from the runs."""
        return summarise(self.runs)

    def prompt_of(self, run: Run) -> str:
        """The user turn that a run answers."""
        return self.prompts[run.dataset][run.prompt_index][run.turn]


def spell(tokenizer: Any, runs: Iterable[Run]) -> dict[str, str]:
    """Text of every token in runs as it stands within a text, for `Measurement.token_texts`.

    Args:
        tokenizer: Of the target.
        runs: Their tokens, and the drafts that were rejected.
    """
    ids = {i for run in runs for part in (run.token_ids, *(run.rejected_ids or [])) for i in part}
    start = min(ids, default=0)  # some tokenizers drop the space of a text's first token
    before = tokenizer.decode([start])
    return {str(i): tokenizer.decode([start, i])[len(before) :] for i in sorted(ids)}


def read_measurement(path: str | Path) -> Measurement:
    """Read a file of ``hf-dflash bench``.

    Raises:
        ValueError: It is not whole, or not such a file; the message says where.
        OSError: It cannot be read.
    """
    path = Path(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} must be a JSON file of `hf-dflash bench`, and is not whole: {error}. Run "
            "the benchmark again with the same options: it keeps what it has measured."
        ) from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise ValueError(
            f"{path} must be a JSON file of `hf-dflash bench` with `schema` {SCHEMA}, got "
            f"{schema!r}. Measure again with this version."
        )
    # Figures come from the runs, whatever somebody has written beside them.
    parts = {name: part for name, part in document.items() if name not in ("schema", "summary")}
    measurement: Measurement = from_plain(Measurement, parts, str(path))
    check_measurement(measurement, str(path))
    return measurement


def read_record(kind: type[T], path: Path, told: str, *, schema: int | None = None) -> T:
    """Read a JSON file that holds one record and nothing else.

    Args:
        kind: Dataclass of the record, or a dict of simple values.
        path: The file.
        told: What the JSON is, for messages: "written by DFlashTrainer".
        schema: That the file must name; None: such files name none.

    Raises:
        ValueError: The file is not one; the message says where.
        OSError: It cannot be read.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of the JSON or of its encoding
        raise ValueError(f"{path} must be JSON {told}: {error}.") from error
    if schema is not None:
        found = document.pop("schema", None) if isinstance(document, dict) else None
        if found != schema:
            raise ValueError(f"{path} must be JSON {told} with `schema` {schema}, got {found!r}.")
    record: T = from_plain(kind, document, str(path))
    return record


def write_measurement(measurement: Measurement, path: str | Path) -> None:
    """Write the file with its summary, whole or not at all.

    Raises:
        ValueError: The measurement contradicts itself.
        OSError: It cannot be written; a file that was there before is left as it was.
    """
    check_measurement(measurement, "measurement")
    document = {
        "schema": SCHEMA,
        **asdict(measurement),
        "summary": asdict(measurement.summary),
    }
    write_whole(Path(path), json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a text file under another name, then rename it into place."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # a full disk may say so only here
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def check_measurement(measurement: Measurement, where: str) -> None:
    """Refuse what no benchmark can have measured.

    Raises:
        ValueError: The message names the field.
    """
    for i, run in enumerate(measurement.runs):
        check_run(run, f"{where}: `runs[{i}]`")
        prompts = measurement.prompts.get(run.dataset, [])
        turns = prompts[run.prompt_index] if 0 <= run.prompt_index < len(prompts) else []
        if not 0 <= run.turn < len(turns):
            raise ValueError(
                f"{where}: `runs[{i}]` must answer one of `prompts`, got turn {run.turn} of prompt "
                f"{run.prompt_index} of {run.dataset!r}."
            )
    for name, options in measurement.prompt_options.items():
        n_prompts = len(measurement.prompts.get(name, []))
        if len(options) != n_prompts:
            raise ValueError(
                f"{where}: `prompt_options` must be as many as the {n_prompts} prompts of "
                f"{name!r}, got {len(options)}."
            )
    repeated = [key for key, n in Counter(run.key for run in measurement.runs).items() if n > 1]
    if repeated:
        raise ValueError(f"{where}: `runs` must differ from one another, got {repeated[0]} twice.")


def check_run(run: Run, where: str) -> None:
    """Refuse a run that contradicts itself.

    Raises:
        ValueError: The message names the field.
    """
    seconds = asdict(run.seconds)
    n_accepted, n_drafted = run.n_accepted, run.n_drafted
    cycles = list(zip(n_accepted or [], n_drafted or [], strict=False))
    rules = (
        (bool(run.token_ids), "`token_ids` must hold a token", run.token_ids),
        (
            all(isfinite(s) and s >= 0 for s in seconds.values())
            and run.seconds.total > 0
            and (run.seconds.decode > 0 or len(run.token_ids) == 1),
            "`seconds` must not be negative, and decoding more than one token takes some",
            seconds,
        ),
        (
            len(n_accepted or []) == len(n_drafted or [])
            and (n_accepted is None) == (n_drafted is None),
            "`n_accepted` and `n_drafted` must have one number a cycle each",
            (n_accepted, n_drafted),
        ),
        (
            all(0 <= accepted <= drafted for accepted, drafted in cycles),
            "`n_accepted` must lie between 0 and `n_drafted`",
            (n_accepted, n_drafted),
        ),
        (
            run.rejected_ids is None
            or [len(ids) for ids in run.rejected_ids] == [d - a for a, d in cycles],
            "`rejected_ids` must hold, for each cycle, the drafts that were not accepted",
            run.rejected_ids,
        ),
        (
            not run.variant.is_plain or n_accepted is None,
            "`n_accepted` must be null where nothing is drafted",
            n_accepted,
        ),
        (
            (run.identical is False) == (run.first_difference is not None),
            "`first_difference` must be there exactly where `identical` is false",
            (run.identical, run.first_difference),
        ),
        (
            run.rounding is None or (run.identical is False and run.rounding >= 0),
            "`rounding` must not be negative, and be there only where `identical` is false",
            (run.identical, run.rounding),
        ),
    )
    for holds, rule, got in rules:
        if not holds:
            raise ValueError(f"{where}: {rule}, got {got}.")


def from_plain(kind: Any, value: Any, where: str) -> Any:
    """Make a value of type ``kind`` out of parsed JSON.

    Args:
        kind: A dataclass, ``list``, ``dict`` of strings, ``Literal``, union or simple type.
        value: Parsed JSON.
        where: Its place, for messages.

    Raises:
        ValueError: It has another form; the message names the place.
    """
    origin, parameters = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _dataclass_from_plain(kind, value, where)
    if origin in (Union, types.UnionType):
        return _member_from_plain(parameters, value, where)
    if origin is Literal and value in parameters:
        return value
    if origin is list and isinstance(value, list):
        return [from_plain(parameters[0], v, f"{where}[{i}]") for i, v in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {k: from_plain(parameters[1], v, f"{where}.{k}") for k, v in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    if isinstance(kind, type) and type(value) is kind:
        return value
    name = kind.__name__ if isinstance(kind, type) else kind
    raise ValueError(f"{where}: must be {name}, got {str(value)[:60]!r}.")


def _member_from_plain(members: Iterable[Any], value: Any, where: str) -> Any:
    for member in members:
        if member is type(None) and value is None:
            return None
        if member is type(value):  # before a number is widened
            return value
    others = [m for m in members if m is not type(None) and not (m is float and value is None)]
    return from_plain(others[0], value, where)


def _dataclass_from_plain(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: must be an object, got {str(value)[:60]!r}.")
    hints = get_type_hints(kind)
    required = {
        f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING
    }
    missing, unknown = required - value.keys(), value.keys() - hints.keys()
    if missing or unknown:
        raise ValueError(
            f"{where}: must have the fields of {kind.__name__}; missing {sorted(missing)}, unknown "
            f"{sorted(unknown)}. Was it written by another version?"
        )
    return kind(**{k: from_plain(hints[k], v, f"{where}.{k}") for k, v in value.items()})
