"""``hf-dflash convert`` and ``hf-dflash doctor``: a drafter in the formats of other engines."""

from pathlib import Path
from typing import Annotated

import typer

from .cli_errors import bad_input_is_one_line

_FORMATS = "hf-dflash, zlab, flat, speculators, modelopt, angelslim, native"
_ENGINES = "hf-dflash, transformers, trust_remote_code, vllm, sglang, speculators, llama.cpp"


def convert(
    path: Annotated[str, typer.Argument(help="Folder or Hub repository of the drafter.")],
    out: Annotated[Path, typer.Argument(help="Folder to be made. Refused if it has content.")],
    *,
    to: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help=f"Format to write, one of {_FORMATS}. hf-dflash: with its code, for this "
            "package, trust_remote_code, vLLM and SGLang; zlab: the same without code; "
            "speculators: for `vllm serve OUT` alone; native: transformers' own class; the others "
            "are of their projects.",
        ),
    ],
    source_format: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FORMAT",
            help="What PATH must be in; found out from its files if left out.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Folder or Hub repository of the target. Needed to and from speculators, which "
            "names it and carries its embeddings and head."
        ),
    ] = None,
    rope: Annotated[
        str | None,
        typer.Option(
            metavar="both|theta|parameters",
            help="Spelling of the rotary embedding: `rope_theta` and `rope_scaling`, "
            "`rope_parameters`, or both. Default: what the format's readers expect.",
        ),
    ] = None,
    draft_vocabulary: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Ascending token ids, a JSON list, that speculators' head shall cover. Default: "
            "all, or those the drafter came from speculators with.",
        ),
    ] = None,
    whole_vocabulary: Annotated[
        bool,
        typer.Option(
            "--whole-vocabulary",
            help="Accept that a reduced draft vocabulary becomes the target's whole one.",
        ),
    ] = False,
) -> None:
    """Convert a drafter to another engine's format, bit for bit.

    PATH is only read. What the new format cannot hold is an error that names the field. Example:

        hf-dflash convert my-drafter my-drafter-native --to native
    """
    with bad_input_is_one_line():
        from .convert import convert as run

        result = run(
            path,
            out,
            to=to,
            source_format=source_format,
            target=target,
            rope=rope,
            draft_vocabulary=draft_vocabulary,
            whole_vocabulary=whole_vocabulary,
        )
    typer.echo(f"{result.source_format} -> {result.format}: {out}")
    if result.left_out:
        typer.echo(f"Left out, not part of the drafter: {', '.join(result.left_out)}")


def doctor(
    path: Annotated[str, typer.Argument(help="Folder of the drafter, in any format.")],
    target: Annotated[
        str | None,
        typer.Option(help="Folder or Hub repository of its target, to check the pair as well."),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ENGINE",
            help=f"Ask this engine only, one of {_ENGINES}. It must then load the folder. May be "
            "given several times.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say for each engine whether a drafter will load there, why not, and how to serve it.

    No engine is needed: the folder is compared with what each one's code reads. Exit code 0 if it
    loads everywhere its format is meant for, 1 if something is wrong with it, 2 for bad input.

    Example:
        hf-dflash doctor my-drafter --target Qwen/Qwen3-8B --engine vllm
    """
    with bad_input_is_one_line():
        from .doctor import as_dict, examine

        examination = examine(path, target, engine)
    if json:
        from json import dumps

        typer.echo(dumps(as_dict(examination), indent=2))
    else:
        from rich.console import Console

        from .doctor_view import show

        show(examination, Console())
    raise typer.Exit(examination.exit_code)
