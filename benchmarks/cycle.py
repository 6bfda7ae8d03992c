"""Time a decode cycle: plain `generate`, transformers' own block loop, and ours, in one run.

    python benchmarks/cycle.py                            # SmolLM2 and its drafter, fp32 and bf16
    python benchmarks/cycle.py --tiny --dtype float32     # a random pair of 4 + 2 layers
    python benchmarks/cycle.py --target T --drafter D --sample  # any pair, sampling

All methods decode the same prompts by turns in one process, so the ratios hold on a noisy machine;
every figure is the median over the rounds. A cycle is one draft and one verification. "Outside" is
the time of a cycle that is spent in neither the drafter's forward (its head included) nor the
target's. The limit is a cycle that costs just the two forwards: outside = 0.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers.generation.streamers import BaseStreamer

from hf_dflash import DFlashConfig, DFlashDraftModel
from made_with import made_with, usual_device

CARD = Path(__file__).parents[1] / "model_cards" / "smollm2-135m-instruct-dflash"
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.95}
PROMPTS = (
    "Write a JSON array of five fruits with the keys name, color and price.",
    "Count from 1 to 30, one number per line.",
    "Make a Markdown table of four planets with the columns Planet, Moons, Diameter.",
    "Tell me about a walk in the woods.",
)


class Clock(BaseStreamer):
    """Times the cycles of one call, from the end of the first on.

    The first cycle is left out: transformers' loop puts the whole prompt through the drafter in
    it, ours before it.
    """

    def __init__(self) -> None:
        self.n_puts = 0
        self.n_tokens = 0
        self.start_s = self.end_s = 0.0

    @property
    def is_running(self) -> bool:
        """Whether the prompt, the first token and the first cycle are over."""
        return self.n_puts >= 3

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then tokens as they come."""
        if self.is_running:
            self.n_tokens += value.numel()
        self.n_puts += 1
        self.end_s = time.perf_counter()
        if self.n_puts == 3:
            self.start_s = self.end_s

    def put_cycle(self, token_ids: torch.Tensor, _n_accepted: int) -> None:
        """Take all tokens of a cycle."""
        self.put(token_ids)

    def end(self) -> None:
        """Nothing is left to do."""


@dataclass
class Timing:
    """One method over all prompts of one round."""

    decode_s: float = 0.0  # after the prompt's forward
    n_steps: int = 0  # forwards of the target after the prompt's
    n_tokens: int = 0  # emitted by those
    forwards_s: dict[str, float] = field(default_factory=lambda: {"draft": 0.0, "target": 0.0})

    @property
    def step_ms(self) -> float:
        """Mean time of a forward and what belongs to it."""
        return 1e3 * self.decode_s / self.n_steps

    @property
    def tokens_per_s(self) -> float:
        """After the first cycle."""
        return self.n_tokens / self.decode_s

    @property
    def outside_ms(self) -> float:
        """Of a step, in neither model."""
        return self.step_ms - 1e3 * sum(self.forwards_s.values()) / self.n_steps


def main() -> None:
    """Run what the command line asks for and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="folder or Hub name; SmolLM2-135M-Instruct if left out")
    parser.add_argument("--drafter", default=str(CARD), help="folder or Hub name")
    parser.add_argument("--tiny", action="store_true", help="a random pair instead")
    parser.add_argument("--vocab-size", type=int, default=49152, help="of the tiny pair")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "both"], default="both")
    parser.add_argument("--sample", action="store_true", help=f"sample with {SAMPLING}")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    dtypes = ["float32", "bfloat16"] if options.dtype == "both" else [options.dtype]
    report: dict[str, Any] = {**made_with(usual_device()), "results": []}
    print(report["device"], report["threads"], "threads", report["versions"])
    for dtype in dtypes:
        target, drafter, prompts = load_pair(options, getattr(torch, dtype))
        figures = measure(target, drafter, prompts, options)
        report["results"].append({"dtype": dtype, **figures})
        show(dtype, figures, drafter)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def load_pair(options: Any, dtype: torch.dtype) -> tuple[Any, Any, list[torch.Tensor]]:
    """The target, its drafter and tokenised prompts."""
    device = usual_device()
    if options.tiny:
        target, drafter = tiny_pair(options.vocab_size, dtype)
        prompts = [torch.randint(1, options.vocab_size, (1, 16)) for _ in range(4)]
        return target.to(device), drafter.to(device), [p.to(device) for p in prompts]
    if options.target is None:
        from hf_dflash.smollm2 import load_target

        target, tokenizer = load_target(dtype)
    else:
        target = AutoModelForCausalLM.from_pretrained(options.target, dtype=dtype).eval()
        tokenizer = AutoTokenizer.from_pretrained(options.target)
    drafter = DFlashDraftModel.from_pretrained(options.drafter, dtype=dtype).eval()
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt"
        )["input_ids"].to(device)
        for text in PROMPTS
    ]
    return target.to(device), drafter.to(device), prompts


def tiny_pair(vocab_size: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """A random target of 4 layers and a random drafter of 2: nearly every draft is rejected."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        eos_token_id=None,
    )
    target = Qwen3ForCausalLM(config).to(dtype).eval()
    draft = DFlashConfig.for_target(
        config, num_draft_layers=2, num_taps=2, block_size=16, mask_token_id=vocab_size - 1
    )
    return target, DFlashDraftModel(draft).to(dtype).eval()


def measure(target: Any, drafter: Any, prompts: list[Any], options: Any) -> dict[str, Any]:
    """Time every method by turns; medians over the rounds."""
    settings = {**(SAMPLING if options.sample else {"do_sample": False})}
    settings |= {"max_new_tokens": options.max_new_tokens, "pad_token_id": 0, "use_cache": True}
    methods: dict[str, dict[str, Any]] = {
        "plain": {},
        "stock": {"assistant_model": drafter, "speculation_type": "dflash"},
        "ours": {"assistant_model": drafter},
    }
    rounds: dict[str, list[Timing]] = {name: [] for name in methods}
    for n in range(options.rounds + 1):
        order = itertools.islice(itertools.cycle(methods), n % 3, n % 3 + 3)
        for name in order:
            timing = time_method(target, drafter, prompts, {**settings, **methods[name]})
            if n > 0:  # the first round warms up
                rounds[name].append(timing)
    return summary(rounds)


def time_method(target: Any, drafter: Any, prompts: list[Any], settings: Any) -> Timing:
    """Decode every prompt once."""
    timing = Timing()
    for prompt in prompts:
        torch.manual_seed(0)
        clock = Clock()
        with timed_forwards(target, drafter, clock, timing):
            target.generate(prompt, streamer=clock, **settings)
        timing.decode_s += clock.end_s - clock.start_s
        timing.n_tokens += clock.n_tokens
        timing.n_steps += clock.n_puts - 3
    return timing


@contextmanager
def timed_forwards(target: Any, drafter: Any, clock: Clock, timing: Timing) -> Iterator[None]:
    """Add up the time inside the two models while the clock runs."""
    started: list[tuple[Any, float]] = []  # nested calls, as of the head inside the target

    def enter(module: Any, _args: Any) -> None:
        synchronise()
        started.append((module, time.perf_counter()))

    def leave(module: Any, _args: Any, _output: Any) -> None:
        synchronise()
        _, start_s = started.pop()
        if clock.is_running and not started:
            kind = "target" if module is target else "draft"
            timing.forwards_s[kind] += time.perf_counter() - start_s

    hooks = []
    for module in (target, drafter, target.get_output_embeddings()):
        hooks.append(module.register_forward_pre_hook(enter))
        hooks.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def synchronise() -> None:
    """Wait for the device, so that a clock tells the truth."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def summary(rounds: dict[str, list[Timing]]) -> dict[str, Any]:
    """Medians, and medians of the ratios paired within a round."""

    def median(name: str, figure: str) -> float:
        return statistics.median(getattr(t, figure) for t in rounds[name])

    def ratio(figure: str, one: str, other: str) -> float:
        pairs = zip(rounds[one], rounds[other], strict=True)
        return statistics.median(getattr(a, figure) / getattr(b, figure) for a, b in pairs)

    methods = {
        name: {
            "tokens_per_s": median(name, "tokens_per_s"),
            "step_ms": median(name, "step_ms"),
            "outside_ms": median(name, "outside_ms"),
            "outside_share": statistics.median(t.outside_ms / t.step_ms for t in timings),
            "tokens_per_step": timings[0].n_tokens / timings[0].n_steps,
            "rounds": [asdict(t) for t in timings],
        }
        for name, timings in rounds.items()
    }
    return {
        "methods": methods,
        "cycle_ours_over_stock": ratio("step_ms", "ours", "stock"),
        "speedup_over_plain": ratio("tokens_per_s", "ours", "plain"),
        "speedup_over_stock": ratio("tokens_per_s", "ours", "stock"),
    }


def show(dtype: str, figures: dict[str, Any], drafter: Any) -> None:
    """Print one table."""
    print(f"\n{dtype}, block size {drafter.config.block_size}")
    columns = (
        ("tokens/s", 10),
        ("tokens/step", 13),
        ("ms/step", 10),
        ("outside ms", 12),
        ("share", 8),
    )
    print(" " * 8 + "".join(f"{name:>{width}}" for name, width in columns))
    for name, row in figures["methods"].items():
        print(
            f"{name:8}{row['tokens_per_s']:10.1f}{row['tokens_per_step']:13.2f}"
            f"{row['step_ms']:10.2f}{row['outside_ms']:12.2f}{row['outside_share']:8.1%}"
        )
    print(
        f"a cycle of ours / of stock: {figures['cycle_ours_over_stock']:.2f}   "
        f"speed-up over plain: {figures['speedup_over_plain']:.2f}   "
        f"over stock: {figures['speedup_over_stock']:.2f}"
    )


if __name__ == "__main__":
    main()
