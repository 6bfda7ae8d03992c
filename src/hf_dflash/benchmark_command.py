"""``hf-dflash bench``: check, load, measure on every process, write, show."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from .benchmark import Benchmark, Models
from .benchmark_data import BenchmarkPrompt, dataset_name, load_prompts
from .benchmark_journal import Journal, refuse_other
from .benchmark_quality import Judge
from .benchmark_view import duration, is_error, progress, show
from .checkpoint_dflash import check_folder_exists
from .generation_dflash import refuse_target
from .loading import check_source
from .measurement import Measurement, Run, Settings, read_measurement, spell, write_measurement
from .modeling_dflash import DFlashDraftModel
from .prompt_encoding import check_template_options
from .provenance import provenance_of, published_command, published_name
from .ranks import Ranks
from .smollm2 import demo_drafter_folder, target_folder
from .target import check_pair, text_config

DTYPES = ("float32", "bfloat16", "float16")
#: Exit status when outputs differ that must not.
DIFFERENT = 1


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What the command line asks for; the defaults stand in its help."""

    datasets: list[str]
    json_file: Path
    target: str | None = None  # None: SmolLM2-135M-Instruct
    drafter: str | None = None  # None: the repository's own for it
    dtype: str = "float32"
    n_prompts: int = 8
    max_new_tokens: int = 96
    temperature: float = 0.0
    block_sizes: list[int] = field(default_factory=list)  # empty: the drafter's own
    repeats: int = 1
    seed: int = 0
    n_lookup_tokens: int = 10  # 0: no prompt look-up
    stock: bool = True
    assistant: str | None = None
    template_options: dict[str, Any] = field(default_factory=dict)
    plain_dtype: str | None = None  # decode plainly in it, too
    stops_at_eos: bool = True
    runs_code: bool = False
    metrics: Path | None = None  # None: from the Hub, or what they are made of


def run_bench(options: BenchOptions) -> int:
    """Measure, write the result, show it; the exit status.

    Raises:
        ValueError: An option is wrong, or the file holds another measurement.
        RuntimeError: Something that is needed cannot be had.
        OSError: The result cannot be written; what was measured is kept beside it.
    """
    start_s = time.perf_counter()
    _check(options)
    ranks = Ranks()
    console = Console(quiet=ranks.rank != 0)
    transformers_logging.disable_progress_bar()
    prompts = _load_prompts(options, console)
    every_prompt = [prompt for of_set in prompts.values() for prompt in of_set]
    judge = Judge(every_prompt, runs_code=options.runs_code, metrics=options.metrics)
    models = _load_models(options, ranks.device, console)
    _check_template_options(options, every_prompt, models.tokenizer)
    plan = _plan(options, prompts, models, ranks.n_ranks)
    plan = replace(plan, settings=replace(plan.settings, metrics=judge.names))
    measurement = _kept_result(options.json_file, plan)
    if measurement is None:
        benchmark = Benchmark(models, plan.settings, seed=options.seed, judge=judge)
        path = options.json_file.with_name(f"{options.json_file.name}.rank{ranks.rank}.jsonl")
        journal = Journal(path, plan, start_s=start_s)
        measurement = _measure(benchmark, prompts, journal, ranks, console)
        if ranks.rank == 0:
            _write(measurement, options.json_file, journal.path)
        ranks.gather([])  # the result is on disk: only now may the journals go
        journal.remove()
        ranks.leave()
    show(measurement, console)
    console.print(f"Every run: {options.json_file}")
    return _status(measurement) if ranks.rank == 0 else 0


def _write(measurement: Measurement, path: Path, kept: Path) -> None:
    try:
        write_measurement(measurement, path)
    except OSError as error:
        raise OSError(
            f"{path} cannot be written: {error.strerror or error}. All prompts are kept in {kept}; "
            "the same command writes it from them."
        ) from error


def _measure(
    benchmark: Benchmark,
    prompts: dict[str, list[BenchmarkPrompt]],
    journal: Journal,
    ranks: Ranks,
    console: Console,
) -> Measurement:
    """Measure this process's prompts that are not in its journal yet, then join all."""
    places = [(name, i) for name, of_set in prompts.items() for i in range(len(of_set))]
    own = [place for number, place in enumerate(places) if ranks.owns(number)]
    todo = [place for place in own if place not in journal.done]
    if todo:
        console.print("Warming up")
        turn_s = benchmark.warm_up(prompts[todo[0][0]][todo[0][1]])
        n_turns = sum(len(prompts[name][i].turns) for name, i in todo)
        longest = duration(turn_s * n_turns * benchmark.settings.repeats)
        console.print(f"About {longest} to go, less where outputs end early")
    try:
        with progress(console, len(own), len(own) - len(todo)) as advance:
            for name, i in todo:
                journal.append(benchmark.run_prompt(name, i, prompts[name][i]))
                advance(name)
    except BaseException:
        console.print(
            f"Stopped. {len(journal.done)} of {len(own)} prompts are kept in {journal.path}; the "
            "same command goes on from there."
        )
        raise
    # One list of its runs, and the seconds that they took, a process.
    parts = ranks.gather([([journal.done[place] for place in own], journal.wall_s)])
    runs = _in_order([run for part, _ in parts for of_one in part for run in of_one], places)
    texts = spell(benchmark.models.tokenizer, runs)
    wall_s = max(seconds for _, seconds in parts)
    first, *others = ranks.gather(journal.few_rows)
    same = first if all(other == first for other in others) else None
    # As it began: one that had measured nothing yet begins anew with each sitting.
    plan = min(ranks.gather([journal.plan]), key=lambda plan: plan.provenance.date)
    provenance = replace(plan.provenance, few_rows=same)
    return replace(plan, provenance=provenance, runs=runs, token_texts=texts, wall_s=wall_s)


def _in_order(runs: Sequence[Run], places: Sequence[tuple[str, int]]) -> list[Run]:
    rank = {place: number for number, place in enumerate(places)}
    return sorted(runs, key=lambda run: rank[run.dataset, run.prompt_index])


def _kept_result(path: Path, plan: Measurement) -> Measurement | None:
    """What an earlier run of the same command has finished."""
    if not path.exists():
        return None
    kept = read_measurement(path)
    refuse_other(kept, plan, path)
    return kept


def _status(measurement: Measurement) -> int:
    """Whether a decode loop of somebody's is wrong: 0 if none is known to be.

    In float32 any difference from plain decoding is an error, else one that is no near tie.
    """
    dtype = measurement.provenance.dtype
    wrong = {
        method.variant.label: n
        for method in measurement.summary.overall
        if method.identity is not None
        and (n := sum(is_error(d, dtype) for d in method.identity.differences))
    }
    if not wrong:
        return 0
    counts = ", ".join(f"{label} ({n})" for label, n in wrong.items())
    rule = "at near ties, where rounding decides, and nowhere else"
    if dtype == "float32":
        rule = "nowhere"
    print(
        f"FAILED: in {dtype} outputs may part from plain decoding's {rule}. Wrong ones by method: "
        f"{counts}.",
        file=sys.stderr,
    )
    return DIFFERENT


def _plan(
    options: BenchOptions, prompts: dict[str, list[BenchmarkPrompt]], models: Models, n_ranks: int
) -> Measurement:
    methods = ["plain", "dflash"]
    methods += ["stock_dflash"] if options.stock else []
    methods += ["prompt_lookup"] if options.n_lookup_tokens else []
    methods += ["assistant_model"] if options.assistant else []
    methods += [f"plain_{options.plain_dtype}"] if options.plain_dtype else []
    settings = Settings(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        n_prompts={name: len(of_set) for name, of_set in prompts.items()},
        repeats=options.repeats,
        template_options=options.template_options,
        methods=methods,
        block_sizes=options.block_sizes or [models.drafter.config.block_size],
        n_lookup_tokens=options.n_lookup_tokens or None,
        assistant_model=published_name(options.assistant) if options.assistant else None,
        stops_at_eos=options.stops_at_eos,
    )
    command = published_command("hf-dflash", sys.argv[1:])
    provenance = provenance_of(
        models.target, models.drafter, command=command, seed=options.seed, n_processes=n_ranks
    )
    texts = {name: [list(p.turns) for p in of_set] for name, of_set in prompts.items()}
    own = {name: [dict(p.template_options) for p in of_set] for name, of_set in prompts.items()}
    own = {name: of_set for name, of_set in own.items() if any(of_set)}
    return Measurement(provenance, settings, texts, [], prompt_options=own)


def _check_template_options(
    options: BenchOptions, prompts: Sequence[BenchmarkPrompt], tokenizer: Any
) -> None:
    given = options.template_options
    check_template_options(tokenizer, given, "`template_option`")
    for prompt in prompts:
        where, text = f"{prompt.source}: `chat_template_kwargs`", prompt.turns[0]
        if own := prompt.template_options:
            check_template_options(tokenizer, own, where, text=text, defaults=given)


def _load_prompts(options: BenchOptions, console: Console) -> dict[str, list[BenchmarkPrompt]]:
    return {
        dataset_name(source): load_prompts(
            source, options.n_prompts, seed=options.seed, notify=console.print
        )
        for source in options.datasets
    }


def _load_models(options: BenchOptions, device: str, console: Console) -> Models:
    # The drafter first: it is small, and most mistakes are found in its config.
    drafter_name = options.drafter or str(demo_drafter_folder())
    target_name = options.target or str(target_folder(notify=console.print))
    check_source(drafter_name, "drafter")
    check_source(target_name, "target")
    if options.assistant:
        check_source(options.assistant, "assistant")
    dtype = getattr(torch, options.dtype)
    drafter: Any = DFlashDraftModel.from_pretrained(drafter_name, dtype=dtype)
    target: Any = AutoModelForCausalLM.from_pretrained(target_name, dtype=dtype)
    refuse_target(target)
    check_pair(target, drafter.config)
    assistant: Any = None
    if options.assistant:
        assistant = AutoModelForCausalLM.from_pretrained(options.assistant, dtype=dtype)
        vocab_sizes = [text_config(model).vocab_size for model in (target, assistant)]
        if len({*vocab_sizes}) > 1:
            raise ValueError(
                f"`assistant` must have the target's vocabulary of {vocab_sizes[0]} tokens, got "
                f"{vocab_sizes[1]}. Give a smaller model of the target's family."
            )
    other: Any = None
    if options.plain_dtype:
        other_dtype = getattr(torch, options.plain_dtype)
        other = AutoModelForCausalLM.from_pretrained(target_name, dtype=other_dtype)
    for model in (target, drafter, assistant, other):
        if model is not None:
            model.to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(target_name)
    return Models(target, tokenizer, drafter, assistant, other)


def _check(options: BenchOptions) -> None:
    """Refuse, before anything is loaded, what could only fail later.

    Raises:
        ValueError: The message names the option.
    """
    names = [dataset_name(source) for source in options.datasets]
    path = options.json_file
    rules = (
        (bool(names), "`dataset` must be given at least once", names),
        (len(set(names)) == len(names), "`dataset` must not name two of the same name", names),
        (options.dtype in DTYPES, f"`dtype` must be one of {', '.join(DTYPES)}", options.dtype),
        (
            options.plain_dtype in (None, *(d for d in DTYPES if d != options.dtype)),
            f"`plain_dtype` must be one of {', '.join(DTYPES)}, and not `dtype`",
            options.plain_dtype,
        ),
        (options.n_prompts >= 1, "`n_prompts` must be at least 1", options.n_prompts),
        (
            options.max_new_tokens >= 2,
            "`max_new_tokens` must be at least 2",
            options.max_new_tokens,
        ),
        (options.temperature >= 0, "`temperature` must be 0 or more", options.temperature),
        (
            all(size >= 2 for size in options.block_sizes)
            and len(set(options.block_sizes)) == len(options.block_sizes),
            "`block_size` must be at least 2, each once",
            options.block_sizes,
        ),
        (options.repeats >= 1, "`repeats` must be at least 1", options.repeats),
        (options.n_lookup_tokens >= 0, "`lookup` must be 0 or more", options.n_lookup_tokens),
        (
            not path.is_dir() and path.absolute().parent.is_dir(),
            "`json` must be a file in an existing folder",
            str(path),
        ),
        (
            options.metrics is None or options.metrics.is_dir(),
            "`metrics` must be a folder with exact_match/exact_match.py or code_eval/code_eval.py",
            str(options.metrics),
        ),
    )
    for holds, rule, got in rules:
        if not holds:
            raise ValueError(f"{rule}, got {got!r}.")
    for name in ("target", "drafter", "assistant"):
        if getattr(options, name) is not None:
            check_folder_exists(getattr(options, name), name, {})
