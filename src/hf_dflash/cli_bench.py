"""``hf-dflash bench``: options in, one call."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_errors import bad_input_is_one_line

_DATASETS = (
    "What to decode; may be given several times. From the Hub: gsm8k, math500, aime25, humaneval, "
    "mbpp, livecodebench, mt-bench, alpaca. From PyPI, for machines without the Hub: gsm8k-pypi "
    "(100 rows), humaneval-pypi, mt-bench-pypi. held-out: prompts like those that the shipped "
    "SmolLM2 drafter learned from. Or a .jsonl file with "
    '{"prompt": "..."} or {"turns": ["...", "..."]} on each line, and if it differs from '
    "--template-option, chat_template_kwargs."
)


def bench(
    *,
    dataset: Annotated[list[str], typer.Option(metavar="NAME|FILE", help=_DATASETS)],
    json_file: Annotated[
        Path,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Where the result goes: every run and every figure. An interrupted run goes on "
            "from what stands beside it.",
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(help="Folder or Hub repository; SmolLM2-135M-Instruct if left out."),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(help="Folder or Hub repository; the shipped SmolLM2 drafter if left out."),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="float32|bfloat16|float16",
            help="In float32 a token that differs from plain decoding is an error, exit code 1; in "
            "the others unless it is a near tie, which rounding decides.",
        ),
    ] = "float32",
    n_prompts: Annotated[
        int, typer.Option(metavar="N", help="Most prompts of each data set, drawn by the seed.")
    ] = 8,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", help="Most tokens to decode for a prompt, at least 2.")
    ] = 96,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="0 is greedy. 1 is the papers' other setting.")
    ] = 0.0,
    block_size: Annotated[
        list[int] | None,
        typer.Option(
            metavar="B",
            help="Tokens of a block, the anchor included; may be given several times. The "
            "drafter's own if left out.",
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option(metavar="N", help="Times each prompt is decoded with each method.")
    ] = 1,
    seed: Annotated[int, typer.Option(help="Of the draw of prompts and of sampling.")] = 0,
    lookup: Annotated[
        int,
        typer.Option(metavar="K", help="Drafts of the prompt look-up baseline; 0 leaves it out."),
    ] = 10,
    stock: Annotated[
        bool, typer.Option(help="Measure transformers' own block loop with the drafter, too.")
    ] = True,
    assistant: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="A small model of the same vocabulary, measured as assistant: folder or Hub "
            "repository.",
        ),
    ] = None,
    plain_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="float32|bfloat16|float16",
            help="Decode plainly in this dtype, too, and tell the speed-up over the faster of both "
            "plain decodings. Takes room for the target twice.",
        ),
    ] = None,
    template_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Of the chat template, such as enable_thinking=false, for prompts that do not say "
            "themselves; may be given several times.",
        ),
    ] = None,
    stop_at_eos: Annotated[
        bool, typer.Option(help="No: every run makes exactly --max-new-tokens tokens.")
    ] = True,
    run_code: Annotated[
        bool,
        typer.Option(
            "--run-code",
            help="Judge answers of HumanEval and MBPP by running the programs that the target "
            "wrote, on this machine, which is as safe as they are.",
        ),
    ] = False,
    metrics: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder with exact_match/exact_match.py and code_eval/code_eval.py of the "
            "package `evaluate`, for machines without the Hub, from which they come otherwise.",
        ),
    ] = None,
) -> None:
    """Measure a drafter: speed-up, acceptance length, and whether the output is unchanged.

    Decodes every prompt plainly, with the drafter, and with the baselines in turns, in one run, and
    compares what they make. The time it takes is prompts x methods x new tokens / speed; it is told
    after the warm-up. Example: `hf-dflash bench --dataset gsm8k-pypi --dataset held-out
    --json bench.json`. With several processes: `accelerate launch -m hf_dflash.cli bench ...`.
    """
    with bad_input_is_one_line():
        from .benchmark_command import BenchOptions, run_bench

        status = run_bench(
            BenchOptions(
                datasets=dataset,
                json_file=json_file,
                target=target,
                drafter=drafter,
                dtype=dtype,
                n_prompts=n_prompts,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                block_sizes=block_size or [],
                repeats=repeats,
                seed=seed,
                n_lookup_tokens=lookup,
                stock=stock,
                assistant=assistant,
                plain_dtype=plain_dtype,
                template_options=_template_options(template_option or []),
                stops_at_eos=stop_at_eos,
                runs_code=run_code,
                metrics=metrics,
            )
        )
    if status:
        raise typer.Exit(status)


def _template_options(assignments: list[str]) -> dict[str, Any]:
    """Values are JSON where they can be read as it, else text."""
    from .prompt_encoding import check_option_kinds

    options: dict[str, Any] = {}
    for assignment in assignments:
        name, separator, value = assignment.partition("=")
        if not (name and separator):
            raise ValueError(f"`template_option` must be NAME=VALUE, got {assignment!r}.")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    check_option_kinds(options, "`template_option`")
    return options
