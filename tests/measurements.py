"""Measurements for tests: small, whole, and with figures that can be worked out by hand."""

from __future__ import annotations

from typing import Any

from hf_dflash.measurement import (
    CycleSeconds,
    DrafterInfo,
    Measurement,
    Provenance,
    Run,
    Seconds,
    Settings,
    TargetInfo,
)


def provenance(**overrides: Any) -> Provenance:
    return Provenance(
        **{
            "command": "hf-dflash bench --target t --drafter d",
            "commit": "0" * 40,
            "date": "2026-01-02T03:04:05+00:00",
            "versions": {
                "hf_dflash": "0.1.0",
                "torch": "2.13.0",
                "transformers": "5.24.0",
                "python": "3.12.0",
            },
            "device": "cpu",
            "threads": 1,
            "dtype": "float32",
            "seed": 0,
            "target": TargetInfo("t", None),
            "drafter": DrafterInfo("d", "ab" * 32, "dflash", 8, 2, 1000),
            **overrides,
        }
    )


def run(**overrides: Any) -> Run:
    """One run of 12 tokens in 1.2 seconds: 3 cycles, the last one cut to its accepted drafts."""
    drafted = {
        "n_accepted": [7, 0, 1],
        "n_drafted": [7, 7, 1],
        "identical": True,
        "cycle_seconds": CycleSeconds(0.2, 0.5),
    }
    method = overrides.get("method", "dflash")
    is_plain = method.startswith("plain")
    return Run(
        **{
            "dataset": "gsm8k",
            "prompt_index": 0,
            "language": "en",
            "thinking": False,
            "turn": 0,
            "method": "dflash",
            "mode": "chain",
            "block_size": None if is_plain else 8,
            "repeat": 0,
            "n_prompt_tokens": 5,
            "token_ids": list(range(12)),
            "seconds": Seconds(0.1, 0.1, 1.0),
            **({} if is_plain else drafted),
            **overrides,
        }
    )


def pair_of_runs(speedup: float = 2.0, **overrides: Any) -> list[Run]:
    """Plain decoding and drafted decoding of one prompt, ``speedup`` times as fast."""
    slow = Seconds(0.1 * speedup, 0.0, 1.1 * speedup)
    return [run(method="plain", seconds=slow, **overrides), run(**overrides)]


def two_block_sizes(trained: float = 0.8, small: float = 1.6, **overrides: Any) -> list[Run]:
    """Plain decoding of one prompt, drafted decoding with the trained block of 8 and with 3."""
    seconds = (Seconds(0.0, 0.0, 1.2), Seconds(0.0, 0.0, 1.2 / trained))
    plain, drafted = (
        run(method=method, seconds=s, **overrides)
        for method, s in zip(("plain", "dflash"), seconds, strict=True)
    )
    cycles = {"n_accepted": [2, 2, 0, 2], "n_drafted": [2, 2, 2, 2]}
    of_three = run(block_size=3, seconds=Seconds(0.0, 0.0, 1.2 / small), **cycles, **overrides)
    return [plain, of_three, drafted]


def one_token_runs(**overrides: Any) -> list[Run]:
    """A pair of outputs that end with the token of the prompt's forward: nothing is decoded."""
    short: dict[str, Any] = {"token_ids": [5], "seconds": Seconds(0.1, 0.0, 0.0), **overrides}
    drafted = {"n_accepted": [], "n_drafted": [], "cycle_seconds": CycleSeconds(0.0, 0.0)}
    return [run(method="plain", **short), run(**drafted, **short)]


def measurement(runs: list[Run] | None = None, **overrides: Any) -> Measurement:
    """A measurement of some runs; three prompts of each data set, each of two turns."""
    runs = pair_of_runs() if runs is None else runs
    datasets = sorted({r.dataset for r in runs})
    prompts = {
        name: [[f"{name} {i}, turn {t}" for t in (1, 2)] for i in range(3)] for name in datasets
    }
    return Measurement(
        **{
            "provenance": provenance(),
            "settings": Settings(12, 0.0, dict.fromkeys(datasets, 3), 1),
            "prompts": prompts,
            "runs": runs,
            **overrides,
        }
    )
