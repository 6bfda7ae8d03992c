"""Does `hf-dflash bench` say what a stopwatch says?

    hf-dflash bench --dataset held-out --dataset gsm8k-pypi --dataset humaneval-pypi --json b.json
    python benchmarks/bench_agrees.py b.json

decodes the prompts of that result again, plainly and with the drafter by turns, and takes the time
of each bare `generate()` call: no hooks, no streamer, none of the benchmark's code. Exit status 1:
the speed-ups differ by more than 5 %. Only on a machine that does nothing else does that say
anything about the benchmark.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dflash import DFlashDraftModel
from hf_dflash.smollm2 import demo_drafter_folder, target_folder

#: The project's promise: largest difference between both speed-ups.
LIMIT = 0.05


def main() -> int:
    """Time all prompts, print both speed-ups."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("result", type=Path, help="JSON file of `hf-dflash bench`, greedy")
    parser.add_argument("--target", help="folder or Hub name; SmolLM2-135M-Instruct if left out")
    parser.add_argument("--drafter", help="folder or Hub name; the shipped one if left out")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    document = json.loads(options.result.read_text("utf-8"))
    settings, dtype = document["settings"], document["provenance"]["dtype"]
    target, tokenizer, drafter = load(options.target, options.drafter, dtype)
    by_prompt, totals = [], [0.0, 0.0]
    prompts = [turns[0] for of_set in document["prompts"].values() for turns in of_set]
    for n, prompt in enumerate(prompts, start=1):
        inputs = encode(tokenizer, prompt, settings["template_options"]).to(target.device)
        if n == 1:
            for assistant in (None, drafter):
                seconds(target, inputs, assistant, 16)
        ratios = []
        for repeat in range(options.repeats):
            pair = [(0, None), (1, drafter)]
            took = {
                i: seconds(target, inputs, assistant, settings["max_new_tokens"])
                for i, assistant in (pair if (n + repeat) % 2 else reversed(pair))
            }
            ratios.append(took[0] / took[1])
            totals = [totals[0] + took[0], totals[1] + took[1]]
        by_prompt.append(statistics.median(ratios))
        print(f"{n}/{len(prompts)} {by_prompt[-1]:.3f}", flush=True)
    return judge(document, statistics.median(by_prompt), totals[0] / totals[1])


def judge(document: dict[str, Any], median: float, total: float) -> int:
    """Print the differences; 1 if one is too large."""
    runs = [run for run in document["runs"] if run["turn"] == 0]
    plain, drafted = (
        {
            (run["dataset"], run["prompt_index"], run["repeat"]): sum(run["seconds"].values())
            for run in runs
            if run["method"] == method and run["block_size"] in (None, own_block_size(document))
        }
        for method in ("plain", "dflash")
    )
    by_prompt: dict[Any, list[float]] = {}
    for key, took in drafted.items():
        by_prompt.setdefault(key[:2], []).append(plain[key] / took)
    bench_median = statistics.median(statistics.median(ratios) for ratios in by_prompt.values())
    bench_total = sum(plain.values()) / sum(drafted.values())
    status = 0
    for name, ours, by_hand in (
        ("median over prompts", bench_median, median),
        ("all seconds", bench_total, total),
    ):
        difference = abs(ours / by_hand - 1)
        print(f"{name}: bench {ours:.3f}, by hand {by_hand:.3f}, difference {difference:.1%}")
        status |= difference > LIMIT
    return int(status)


def own_block_size(document: dict[str, Any]) -> int:
    """The drafter's; other block sizes are not timed by hand."""
    return int(document["provenance"]["drafter"]["block_size"])


def load(target_name: str | None, drafter_name: str | None, dtype: str) -> tuple[Any, Any, Any]:
    """Target, tokenizer and drafter, as the benchmark loads them."""
    target_name = target_name or str(target_folder(notify=print))
    drafter_name = drafter_name or str(demo_drafter_folder())
    device = "cuda" if torch.cuda.is_available() else "cpu"
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
