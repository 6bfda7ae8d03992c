"""Time a verification of S rows in float32 on the CPU: torch's linear layers against ours.

    python benchmarks/few_rows.py --json benchmarks/results/few_rows.json

Both ways run the same model on the same cache by turns in one process; the ratio is the median over
rounds of the paired ratios. The limit is the time of one row: the weights are read once either way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from hf_dflash.few_rows import quick_few_rows, rows_the_other_way
from hf_dflash.outputs_dflash import CACHE_NAME
from hf_dflash.smollm2 import target_folder
from made_with import made_with


def main() -> None:
    """Run it and print a line a number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="folder or Hub name; SmolLM2-135M-Instruct if left out")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 8])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    name = options.target or str(target_folder())
    target = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    figures = measure(target, options)
    report = {
        **made_with(target.device),
        "other_way": rows_the_other_way(target),  # elsewhere ours is torch's
        "rows": figures,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


@torch.no_grad()  # as `generate` is
def measure(target: Any, options: argparse.Namespace) -> list[dict[str, float]]:
    """Milliseconds of both ways and their ratio, for each number of rows."""
    torch.manual_seed(0)
    vocab_size = target.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocab_size, (1, options.prompt_tokens + max(options.rows)))
    cache = DynamicCache(config=target.config)
    target(ids[:, : options.prompt_tokens], **{CACHE_NAME: cache})

    def forward_ms(n_rows: int, way: Any) -> float:
        with way:
            start = time.perf_counter()
            target(ids[:, -n_rows:], **{CACHE_NAME: cache}, logits_to_keep=n_rows)
            spent = time.perf_counter() - start
        cache.crop(-n_rows)
        return 1e3 * spent

    figures = []
    for n_rows in options.rows:
        forward_ms(n_rows, nullcontext()), forward_ms(n_rows, quick_few_rows(target))
        pairs = [
            (forward_ms(n_rows, nullcontext()), forward_ms(n_rows, quick_few_rows(target)))
            for _ in range(options.rounds)
        ]
        theirs, ours = (statistics.median(times) for times in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        figures.append({"rows": n_rows, "torch_ms": theirs, "ours_ms": ours, "speed_up": ratio})
        print(f"{n_rows} rows: torch {theirs:.1f} ms, ours {ours:.1f} ms, {ratio:.2f}x", flush=True)
    return figures


if __name__ == "__main__":
    main()
