"""The commands that train: `prepare` and `train`."""

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_errors import bad_input_is_one_line, own_errors_are_one_line

#: `train` reads its own arguments: those of two dataclasses, more than a hundred.
TRAIN_CONTEXT = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}
ANSWERS, TAPS = "Answers by the target", "Cached taps"
#: Options of `prepare` that are read with another one only, and those that another one replaces.
READ_WITH = {
    "regenerate": ("answers", "server", "batch_size", "max_new_tokens", "temperature", "seed"),
    "server": ("model", "api_key", "n_threads", "timeout"),
    "cache_taps": ("taps_dtype", "drafter", "architecture", "num_taps", "target_layer_id"),
}
REPLACED_BY = {
    "server": ("batch_size",),
    "drafter": ("architecture", "num_taps", "target_layer_id"),
}


def _number(help_text: str, panel: str | None = None, metavar: str = "N") -> Any:
    return typer.Option(metavar=metavar, help=help_text, rich_help_panel=panel)


def prepare(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            help="Chats: a .jsonl, .jsonl.gz or .parquet file, or the name of a Hub dataset."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Rows to write: a .jsonl or .jsonl.gz file.")],
    *,
    target: Annotated[str, typer.Option(help="Folder or Hub repository of the target.")],
    target_dtype: Annotated[
        str,
        typer.Option(
            metavar="auto|float32|bfloat16|float16",
            help="Where the target itself is run; auto: as it was saved.",
        ),
    ] = "auto",
    split: Annotated[str, typer.Option(help="Of a Hub dataset.")] = "train",
    config: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of a Hub dataset that has several.")
    ] = None,
    max_length: Annotated[int | None, _number("Cut rows there, in tokens (papers: 3072).")] = None,
    pack: Annotated[int | None, _number("Pack rows into rows of at most N tokens.")] = None,
    separate_turns: Annotated[
        bool,
        typer.Option(
            "--separate-turns", help="A row for each assistant turn, also where one would do."
        ),
    ] = False,
    thinking: Annotated[
        bool | None,
        typer.Option(
            "--thinking/--no-thinking",
            help="The chat template's enable_thinking, for chats that do not say.",
        ),
    ] = None,
    template_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="Another of its options, the value as JSON; several times."
        ),
    ] = None,
    show: Annotated[int, _number("Show the first N rows, supervised tokens in green.")] = 0,
    regenerate: Annotated[
        bool,
        typer.Option(
            "--regenerate",
            help="Let the target answer every turn anew: that is what a drafter should learn.",
            rich_help_panel=ANSWERS,
        ),
    ] = False,
    answers: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Where answers are kept, to go on from; beside OUT if left out.",
            rich_help_panel=ANSWERS,
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Ask an OpenAI-compatible server, such as http://localhost:8000/v1.",
            rich_help_panel=ANSWERS,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="The target's name there; as --target if left out.", rich_help_panel=ANSWERS
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="OPENAI_API_KEY", help="Of that server.", rich_help_panel=ANSWERS),
    ] = None,
    n_threads: Annotated[int, _number("Requests at once, on a server.", ANSWERS)] = 16,
    timeout: Annotated[
        float, _number("Most seconds a server may take for an answer.", ANSWERS, "X")
    ] = 600.0,
    batch_size: Annotated[int, _number("Prompts at once, without a server.", ANSWERS)] = 32,
    max_new_tokens: Annotated[int, _number("Where an answer is cut, in tokens.", ANSWERS)] = 2048,
    temperature: Annotated[float, _number("Of the answers; 0: greedy.", ANSWERS, "X")] = 0.0,
    seed: Annotated[int, _number("Of drawn answers.", ANSWERS)] = 0,
    cache_taps: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Run the target over the rows once and keep what drafters read. The size is "
            "shown first; on a disk too small nothing is written.",
            rich_help_panel=TAPS,
        ),
    ] = None,
    taps_dtype: Annotated[
        str,
        typer.Option(
            metavar="bfloat16|float16|float32|float8", help="Of the files.", rich_help_panel=TAPS
        ),
    ] = "bfloat16",
    drafter: Annotated[
        str | None,
        typer.Option(
            help="The drafter that will read them; a new one's if left out.", rich_help_panel=TAPS
        ),
    ] = None,
    architecture: Annotated[
        str, typer.Option(metavar="dflash|dflare", help="Of a new one.", rich_help_panel=TAPS)
    ] = "dflash",
    num_taps: Annotated[int | None, _number("Of a new one; 5, dflare: 9.", TAPS)] = None,
    target_layer_id: Annotated[
        list[int] | None, _number("A layer it taps, 0-based; several times.", TAPS)
    ] = None,
) -> None:
    """Make training rows of chats: token ids, and which of them the target would write itself.

    Example: `hf-dflash prepare prompts.jsonl rows.jsonl --target my-model --regenerate --show 2`

    What cannot be used is counted by its reason. Stopped on the way, `--regenerate` and
    `--cache-taps` go on where they were.
    """
    with bad_input_is_one_line(), _shown_log():
        from .preparing import Encoding, Regeneration, TapsOptions
        from .preparing import prepare as run

        options = _template_options(thinking, template_option or [])
        _check_each_is_read(_given(context), Path(source).is_file())
        run(
            source,
            out,
            target,
            split=split,
            config=config,
            encoding=Encoding(max_length, not separate_turns, pack, options),
            regeneration=Regeneration(
                answers or out.with_name(out.name.removesuffix(".gz") + ".answers.jsonl"),
                server=server,
                model=model,
                api_key=api_key,
                n_threads=n_threads,
                timeout=timeout,
                batch_size=batch_size,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                seed=seed,
                dtype=target_dtype,
            )
            if regenerate
            else None,
            taps=TapsOptions(
                cache_taps,
                taps_dtype,
                target_dtype=target_dtype,
                drafter=drafter,
                architecture=architecture,
                num_taps=num_taps,
                target_layer_ids=target_layer_id,
            )
            if cache_taps is not None
            else None,
            n_shown=show,
        )


def train(context: typer.Context) -> None:
    """Train a drafter on prepared rows; `hf-dflash train --help` lists its arguments.

    Arguments come from a YAML file, from flags, or both: `hf-dflash train run.yaml --max_steps 9`
    """
    with bad_input_is_one_line(), _shown_log():
        from .training_run import build_run, finish_run, leave_processes

        run, trainer = build_run(context.args)
    with _shown_log(), own_errors_are_one_line():
        finish_run(run, trainer)
        del trainer  # it holds the group of processes
        leave_processes()


@contextmanager
def _shown_log() -> Iterator[None]:
    """Show what the package logs: how much fits, what is skipped, where results are."""
    logger = logging.getLogger(__package__)
    handler = logging.StreamHandler()
    before = logger.level
    is_first = os.environ.get("RANK", "0") == "0"
    logger.setLevel(logging.INFO if is_first else logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _given(context: typer.Context) -> set[str]:
    """Options on the command line; a key of the environment is there for other programs, too."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, where in sources.items() if where and where.name == "COMMANDLINE"}


def _check_each_is_read(given: set[str], is_file: bool) -> None:
    for needed, names in READ_WITH.items():
        for name in names:
            if name in given and needed not in given:
                raise ValueError(
                    f"`{name}` is read with {_flag(needed)} only: give that, too, or leave "
                    f"{_flag(name)} out."
                )
    for other, names in REPLACED_BY.items():
        for name in names:
            if name in given and other in given:
                raise ValueError(
                    f"`{name}` is not read with {_flag(other)}: leave one of them out."
                )
    answers_here = "regenerate" in given and "server" not in given
    if "target_dtype" in given and not answers_here and "cache_taps" not in given:
        raise ValueError(
            "`target_dtype` is read where the target is run here: with --cache-taps, or with "
            "--regenerate and no --server. Leave --target-dtype out."
        )
    if "split" in given and is_file:
        raise ValueError(
            "`split` is for a dataset on the Hub, but `source` is a file here. Leave --split out."
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _template_options(thinking: bool | None, given: Sequence[str]) -> dict[str, Any]:
    options: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    for option in given:
        name, sign, value = option.partition("=")
        if not name or not sign:
            raise ValueError(f"`template_option` must be NAME=VALUE, got {option!r}.")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value  # a plain word
    return options
