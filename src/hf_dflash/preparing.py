"""From chats to the rows that a drafter is trained on: what `hf-dflash prepare` does."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .chats import Chat, read_chats
from .configuration_dflash import DFlashConfig
from .data import coloured
from .loading import load_model, load_tokenizer
from .loss_mask import EncodedRow, special_ids
from .provenance import published_name
from .regenerate import RegenerationReport, digest, regenerate_answers
from .regenerate_server import regenerate_answers_from_server
from .regenerate_turns import regenerate_turns
from .row_file import open_rows
from .row_writing import WrittenRows, write_rows
from .taps_cache import DTYPES, write_taps
from .training_log import write_data_record

ROW_SUFFIXES = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class Encoding:
    """How chats become rows."""

    max_length: int | None = None
    merge_turns: bool = True
    pack_length: int | None = None
    template_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Regeneration:
    """How the target answers; by itself here, or through a server."""

    answers: Path
    server: str | None = None
    model: str | None = None
    api_key: str | None = None
    n_threads: int = 16
    timeout: float = 600.0
    batch_size: int = 32
    max_new_tokens: int = 2048
    temperature: float = 0.0
    seed: int = 0
    dtype: str = "auto"


@dataclass(frozen=True)
class TapsOptions:
    """Which hidden states are cached: those that a drafter reads, trained or yet to be made."""

    folder: Path
    dtype: str = "bfloat16"
    target_dtype: str = "auto"
    drafter: str | None = None
    architecture: str = "dflash"
    num_taps: int | None = None
    target_layer_ids: list[int] | None = None


def prepare(
    source: str,
    out: Path,
    target: str,
    *,
    split: str = "train",
    config: str | None = None,
    encoding: Encoding,
    regeneration: Regeneration | None = None,
    taps: TapsOptions | None = None,
    n_shown: int = 0,
) -> None:
    """Make training rows of chats and write them to ``out``, with what else was asked for.

    Args:
        source: Chats, see `hf_dflash.chats.read_chats`.
        out: Rows, one a line.
        target: Folder or repository of the target.
        split: Of a dataset on the Hub.
        config: Of a dataset on the Hub that has several.
        encoding: How chats become rows.
        regeneration: How the target answers first; `None`: the chats' own answers are kept.
        taps: The cache to write; `None`: none.
        n_shown: Rows to show, coloured by the loss mask.

    Raises:
        ValueError: An option is out of range, or no chat gives a row.
        RuntimeError: The server does not answer, or the disk is too small for the cache.
    """
    _check(out, taps, n_shown)
    console = Console()
    tokenizer = load_tokenizer(target)
    given = Path(source).name if Path(source).is_file() else published_name(source)
    if regeneration is not None:
        chats = read_chats(source, split=split, config=config)
        report = _regenerate(chats, target, tokenizer, regeneration, encoding.template_options)
        _show_regeneration(console, report, regeneration.answers)
        if not report.n_answered + report.n_found:
            raise ValueError(_nothing_answered(source, report, regeneration))
        source, config = str(regeneration.answers), None
    chats = read_chats(source, split=split, config=config)
    written = _encode(tokenizer, chats, encoding, out)
    write_data_record(out, {"chats": given, **_about(written, encoding, regeneration, tokenizer)})
    console.print(_table(written))
    console.print(f"Rows: {out}", markup=False, highlight=False, soft_wrap=True)
    rows: Any = open_rows(out) if n_shown or taps is not None else None
    for i in range(min(n_shown, written.n_rows)):
        console.rule()
        console.print(coloured(tokenizer, EncodedRow(**rows[i])))
    if taps is not None:
        _cache_taps(rows, target, tokenizer, taps)


def _about(
    written: WrittenRows, encoding: Encoding, regeneration: Regeneration | None, tokenizer: Any
) -> dict[str, Any]:
    """What a model card tells of the data: a drafter fits the template it was trained for."""
    thinking = encoding.template_options.get("enable_thinking")
    answers = "as the chats have them"
    if regeneration is not None:
        answers = f"the target's own, temperature {regeneration.temperature:g}"
    return {
        "answers": answers,
        "rows": written.n_rows,
        "tokens": written.report.n_tokens,
        "supervised tokens": written.report.n_supervised,
        "chat template (digest)": digest(tokenizer.chat_template),
        "thinking": "as each chat says" if thinking is None else ("on" if thinking else "off"),
    }


def _check(out: Path, taps: TapsOptions | None, n_shown: int) -> None:
    if not out.name.endswith(ROW_SUFFIXES) or not out.absolute().parent.is_dir():
        raise ValueError(
            f"`out` must be a {' or '.join(ROW_SUFFIXES)} file in an existing folder, got {out}."
        )
    if n_shown < 0:
        raise ValueError(f"`show` must be at least 0, got {n_shown}.")
    if taps is not None and taps.dtype not in DTYPES:
        raise ValueError(f"`taps_dtype` must be one of {', '.join(DTYPES)}, got {taps.dtype!r}.")


def _regenerate(
    chats: Iterable[Chat], target: str, tokenizer: Any, how: Regeneration, options: dict[str, Any]
) -> RegenerationReport:
    common: dict[str, Any] = {
        "max_new_tokens": how.max_new_tokens,
        "temperature": how.temperature,
        "seed": how.seed,
        "template_options": options,
    }
    local = how.server is None
    model: Any = load_model(target, how.dtype, _device_map()) if local else None

    def answer(prompts: list[Chat]) -> RegenerationReport:
        if how.server is None:
            return regenerate_answers(
                model, tokenizer, prompts, how.answers, batch_size=how.batch_size, **common
            )
        return regenerate_answers_from_server(
            how.server,
            how.model or target,
            prompts,
            how.answers,
            n_threads=how.n_threads,
            timeout=how.timeout,
            api_key=how.api_key,
            **common,
        )

    return regenerate_turns(chats, how.answers, options, answer, special_ids(tokenizer))


def _encode(tokenizer: Any, chats: Iterable[Chat], encoding: Encoding, out: Path) -> WrittenRows:
    options = encoding.template_options
    filled = (
        replace(chat, template_options={**options, **chat.template_options}) for chat in chats
    )
    return write_rows(
        tokenizer,
        filled,
        out,
        max_length=encoding.max_length,
        merge_turns=encoding.merge_turns,
        pack_length=encoding.pack_length,
    )


def _cache_taps(rows: Any, target: str, tokenizer: Any, taps: TapsOptions) -> None:
    model = load_model(target, taps.target_dtype, _device_map())
    config = _config(model, tokenizer, taps)
    write_taps(model, config, rows, taps.folder, dtype=taps.dtype)


def _config(model: Any, tokenizer: Any, taps: TapsOptions) -> DFlashConfig:
    if taps.drafter is not None:
        published: DFlashConfig = DFlashConfig.from_pretrained(taps.drafter)
        return published
    ids = taps.target_layer_ids
    given: dict[str, Any] = {} if ids is None else {"target_layer_ids": ids}
    return DFlashConfig.for_target(
        model.config,
        architecture=taps.architecture,
        num_taps=taps.num_taps,
        tokenizer=tokenizer,
        **given,
    )


def _device_map() -> str | None:
    return "auto" if torch.cuda.is_available() else None


def _show_regeneration(console: Console, report: RegenerationReport, path: Path) -> None:
    console.print(
        f"Answers: {report.n_answered} made now, {report.n_found} found, {report.n_left_out} "
        f"prompts left out; kept in {path}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _nothing_answered(source: str, report: RegenerationReport, how: Regeneration) -> str:
    if not report.n_left_out:
        return f"`source` {source} must hold a turn to answer, got none. Is the file empty?"
    return (
        f"`source` {source} must hold a prompt that can be answered, but all {report.n_left_out} "
        f"were left out; the log above says why. If they are too long, lower `max_new_tokens` "
        f"({how.max_new_tokens})."
    )


def _table(written: WrittenRows) -> Table:
    report = written.report
    share = report.n_supervised / max(report.n_tokens, 1)
    table = Table("what", "how many", title="Prepared rows")
    table.columns[1].justify = "right"
    for what, count in (
        ("chats", f"{report.n_chats:,}"),
        ("rows", f"{written.n_rows:,}"),
        ("tokens", f"{report.n_tokens:,}"),
        ("supervised tokens", f"{report.n_supervised:,} ({share:.0%})"),
        ("rows cut at --max-length", f"{report.n_truncated:,}"),
        *((f"skipped: {reason}", f"{count:,}") for reason, count in report.skipped.items()),
    ):
        table.add_row(what, count)
    return table
