"""Does `hf-dflash bench` say what a stopwatch says?

    hf-dflash bench --dataset held-out --dataset gsm8k-pypi --dataset humaneval-pypi --json b.json
    python benchmarks/bench_agrees.py b.json

decodes the prompts of that result again, plainly and with the drafter by turns, and takes the time
of each bare `generate()` call: no hooks, no streamer, none of the benchmark's code. Exit status 1:
the speed-ups differ by more than 5 %. Only on a machine that does nothing else does that say
anything about the benchmark, and only if it is as it was then. `--again` lets the benchmark
decode every prompt again, too, by turns with the stopwatch, and compares these runs in place of the
file's.

`--block-size` times other blocks than the drafter's own, of those that the result holds. `--json`
writes what was found.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dflash import DFlashDraftModel
from hf_dflash.benchmark import WARM_UP_TOKENS, Benchmark, Models
from hf_dflash.benchmark_data import BenchmarkPrompt
from hf_dflash.benchmark_quality import Judge
from hf_dflash.measurement import Run, Settings, write_whole
from hf_dflash.smollm2 import demo_drafter_folder, target_folder
from made_with import made_with, usual_device

#: The project's promise: largest difference between both speed-ups.
LIMIT = 0.05
#: What the record tells of the result that was compared.
BENCH_FACTS = ("command", "commit", "date", "dtype", "device", "versions")


def main() -> int:
    """Time all prompts, print and write both speed-ups for each block size."""
    options = arguments()
    document = json.loads(options.result.read_text("utf-8"))
    sizes = options.block_size or [own_block_size(document)]
    for size in sizes:
        bench_seconds(document, "dflash", size)  # refused before minutes of work
    timed, runs = time_prompts(document, options, sizes)
    if options.again:
        document["runs"] = [asdict(run) for run in runs]
    found = [judge(document, size, *by_hand) for size, by_hand in timed.items()]
    agrees = all(of_size["agrees"] for of_size in found)
    if options.json is not None:
        provenance = document["provenance"]
        record = {
            **made_with(usual_device()),
            "limit": LIMIT,
            "repeats": options.repeats,
            "again": options.again,
            "n_prompts": sum(map(len, document["prompts"].values())),
            "bench": {name: provenance[name] for name in BENCH_FACTS},
            "agrees": agrees,
            "block_sizes": found,
        }
        write_whole(options.json, json.dumps(record, indent=1) + "\n")
    return int(not agrees)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("result", type=Path, help="JSON file of `hf-dflash bench`, greedy")
    parser.add_argument("--target", help="folder or Hub name; SmolLM2-135M-Instruct if left out")
    parser.add_argument("--drafter", help="folder or Hub name; the shipped one if left out")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--block-size",
        type=int,
        nargs="+",
        metavar="B",
        help="block sizes to time, of those in the result; the drafter's own if left out",
    )
    parser.add_argument(
        "--again", action="store_true", help="compare with runs of the benchmark made beside"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write what was found")
    return parser.parse_args()


def time_prompts(
    document: dict[str, Any], options: argparse.Namespace, sizes: list[int]
) -> tuple[dict[int, tuple[float, float]], list[Run]]:
    """Speed-ups by block size: median over prompts, and of all seconds; and the runs made again."""
    settings, dtype = document["settings"], document["provenance"]["dtype"]
    target, tokenizer, drafter = load(options.target, options.drafter, dtype)
    ways: list[int | None] = [None, *sizes]  # None: plainly
    by_prompt: dict[int, list[float]] = {size: [] for size in sizes}
    totals: dict[int | None, float] = dict.fromkeys(ways, 0.0)
    prompts, runs = prompts_of(document), []
    benchmark = benchmark_of(settings, Models(target, tokenizer, drafter), sizes)
    for n, (prompt, template_options) in enumerate(prompts):
        one = BenchmarkPrompt((prompt,), template_options=template_options)
        inputs = encode(tokenizer, prompt, template_options).to(target.device)
        if n == 0:
            if options.again:
                benchmark.warm_up(one)
            time_round(target, drafter, inputs, ways, WARM_UP_TOKENS)
        rounds = []
        for repeat in range(options.repeats):
            first = (n + repeat) % len(ways)
            hand_begins = (n + repeat) % 2 == 1
            if options.again and not hand_begins:
                runs += run_again(benchmark, n, repeat, one)
            turns = ways[first:] + ways[:first]
            rounds.append(time_round(target, drafter, inputs, turns, settings["max_new_tokens"]))
            if options.again and hand_begins:
                runs += run_again(benchmark, n, repeat, one)
        for way in ways:
            totals[way] += sum(took[way] for took in rounds)
        for size, medians in by_prompt.items():
            medians.append(statistics.median(took[None] / took[size] for took in rounds))
        shown = " ".join(f"{medians[-1]:.3f}" for medians in by_prompt.values())
        print(f"{n + 1}/{len(prompts)} {shown}", flush=True)
    timed = {
        size: (statistics.median(medians), totals[None] / totals[size])
        for size, medians in by_prompt.items()
    }
    return timed, runs


def time_round(
    target: Any, drafter: Any, inputs: Any, ways: list[int | None], n_tokens: int
) -> dict[int | None, float]:
    """Seconds of a call in each way, in that order."""
    took = {}
    for way in ways:
        with drafting(drafter, way) as assistant:
            took[way] = seconds(target, inputs, assistant, n_tokens)
    return took


def run_again(benchmark: Benchmark, n: int, repeat: int, prompt: BenchmarkPrompt) -> list[Run]:
    """The benchmark's runs of prompt ``n``, for the ``repeat``-th time."""
    return [replace(run, repeat=repeat) for run in benchmark.run_prompt("again", n, prompt)]


def benchmark_of(settings: dict[str, Any], models: Models, sizes: list[int]) -> Benchmark:
    """The benchmark as it measured, with the methods alone that are timed by hand."""
    limited = Settings(
        max_new_tokens=settings["max_new_tokens"],
        temperature=0.0,
        n_prompts={},
        repeats=1,
        template_options=settings["template_options"],
        methods=["plain", "dflash"],
        block_sizes=sizes,
    )
    return Benchmark(models, limited, seed=0, judge=Judge([]))


def prompts_of(document: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """First turn of each prompt, and its options for the chat template."""
    every = document["settings"]["template_options"]
    own = document.get("prompt_options", {})  # older files do not have it
    return [
        (turns[0], {**every, **options})
        for name, of_set in document["prompts"].items()
        for turns, options in zip(of_set, own.get(name) or [{}] * len(of_set), strict=True)
    ]


def judge(document: dict[str, Any], size: int, median: float, total: float) -> dict[str, Any]:
    """Print how far the benchmark's speed-ups lie from those by hand; what is written of it."""
    plain = bench_seconds(document, "plain", None)
    drafted = bench_seconds(document, "dflash", size)
    by_prompt: dict[Any, list[float]] = {}
    for key, took in drafted.items():
        by_prompt.setdefault(key[:2], []).append(plain[key] / took)
    bench_median = statistics.median(statistics.median(ratios) for ratios in by_prompt.values())
    bench_total = sum(plain.values()) / sum(drafted.values())
    found: dict[str, Any] = {"block_size": size, "agrees": True}
    for name, ours, by_hand in (
        ("median over prompts", bench_median, median),
        ("all seconds", bench_total, total),
    ):
        difference = abs(ours / by_hand - 1)
        print(
            f"block {size}, {name}: bench {ours:.3f}, by hand {by_hand:.3f}, difference "
            f"{difference:.1%}"
        )
        found[name] = {"bench": ours, "by_hand": by_hand, "difference": difference}
        found["agrees"] &= difference <= LIMIT
    return found


def bench_seconds(
    document: dict[str, Any], method: str, block_size: int | None
) -> dict[tuple[str, int, int], float]:
    """Seconds of the first turns' calls, by data set, prompt and repeat.

    Raises:
        SystemExit: The benchmark measured no such calls.
    """
    found = {
        (run["dataset"], run["prompt_index"], run["repeat"]): sum(run["seconds"].values())
        for run in document["runs"]
        if (run["turn"], run["method"], run["block_size"]) == (0, method, block_size)
    }
    if not found:
        measured = sorted({run["block_size"] for run in document["runs"] if run["block_size"]})
        raise SystemExit(
            f"`block-size` must be one that the result holds, {measured}, got {block_size}."
        )
    return found


def own_block_size(document: dict[str, Any]) -> int:
    """The drafter's."""
    return int(document["provenance"]["drafter"]["block_size"])


@contextmanager
def drafting(drafter: Any, size: int | None) -> Iterator[Any]:
    """What to pass as the assistant: a drafter of blocks of ``size``, or None to decode plainly.

    Its own block size is drafted by its own policy, another one whole.
    """
    config, policy = drafter.config, drafter.generation_config
    kept = config.block_size, policy.num_assistant_tokens
    if size not in (None, config.block_size):
        config.block_size, policy.num_assistant_tokens = size, None
    try:
        yield None if size is None else drafter
    finally:
        config.block_size, policy.num_assistant_tokens = kept


def load(target_name: str | None, drafter_name: str | None, dtype: str) -> tuple[Any, Any, Any]:
    """Target, tokenizer and drafter, as the benchmark loads them."""
    target_name = target_name or str(target_folder(notify=print))
    drafter_name = drafter_name or str(demo_drafter_folder())
    device = usual_device()
    options = {"dtype": getattr(torch, dtype)}
    target = AutoModelForCausalLM.from_pretrained(target_name, **options).to(device).eval()
    drafter = DFlashDraftModel.from_pretrained(drafter_name, **options).to(device).eval()
    return target, AutoTokenizer.from_pretrained(target_name), drafter


def encode(tokenizer: Any, prompt: str, template_options: dict[str, Any]) -> Any:
    """One user message."""
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
        **template_options,
    )


def seconds(target: Any, inputs: Any, assistant: Any, max_new_tokens: int) -> float:
    """Wall clock of one call."""
    wait()
    start = time.perf_counter()
    target.generate(
        **inputs, assistant_model=assistant, max_new_tokens=max_new_tokens, do_sample=False
    )
    wait()
    return time.perf_counter() - start


def wait() -> None:
    """Let the device finish."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
