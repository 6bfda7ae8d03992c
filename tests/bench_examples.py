"""A measurement as a real one looks: several data sets, methods and block sizes, words as tokens.

Acceptance is drawn, seconds follow from it by a cost for each forward, so figures hang together.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from hf_dflash.measurement import (
    CycleSeconds,
    DrafterInfo,
    Measurement,
    Run,
    Seconds,
    Settings,
    TargetInfo,
)
from measurements import provenance

# fmt: off
WORDS = (
    " the", " of", " a", " to", " numbers", " is", " table", " with", " list", " each", ",", ".",
    "\n", ":", " one", " two", " even", " 2", " 4", " 6", " 8", " apples", " price", " total",
    " first", " then", " add", " result", " answer", " so", " name", " city", " <b>", " &",
)
# fmt: on
#: How likely each draft is accepted, by data set: structured, in between, open.
DATASETS = {"tables": 0.86, "arithmetic": 0.7, "chat": 0.25}
PROMPTS = {
    "tables": "Make a table of ten fruits with their colours and prices.",
    "arithmetic": "Anna has 12 apples and buys 30 more. How many has she now? Think step by step.",
    "chat": "Explain how a rainbow forms, so that a child of ten understands it.",
}
PLAIN_S, VERIFY_S, DRAFT_S = 0.040, 0.055, 0.012


def example_measurement(
    n_prompts: int = 4, n_tokens: int = 90, differing: bool = False, **overrides: Any
) -> Measurement:
    """Plain decoding, the drafter with blocks of 16 and 8, and prompt look-up."""
    rng = random.Random(0)
    runs: list[Run] = []
    for dataset, chance in DATASETS.items():
        for index in range(n_prompts):
            runs += _prompt_runs(rng, dataset, index, chance, n_tokens)
    if differing:
        runs = [_differing(run) if _is_first_chat(run) else run for run in runs]
    names = list(DATASETS)
    info = DrafterInfo("smollm2-135m-instruct-dflash", "ab" * 32, "dflash", 16, 3, 12_345_678)
    return Measurement(
        provenance(
            device="cpu: Intel(R) Xeon(R) Processor @ 2.60GHz (AVX512)",
            threads=2,
            command="hf-dflash bench --target HuggingFaceTB/SmolLM2-135M-Instruct --drafter "
            "model_cards/smollm2-135m-instruct-dflash --block-size 16 --block-size 8",
            target=TargetInfo("HuggingFaceTB/SmolLM2-135M-Instruct", "12fd25f77366fa6b"),
            drafter=info,
        ),
        Settings(n_tokens, 0.0, dict.fromkeys(names, n_prompts), 1),
        {name: [[f"{PROMPTS[name]} ({i + 1})"] for i in range(n_prompts)] for name in names},
        runs,
        {str(i): word for i, word in enumerate(WORDS)},
        **overrides,
    )


def _prompt_runs(
    rng: random.Random, dataset: str, index: int, chance: float, n_tokens: int
) -> list[Run]:
    ids = [rng.randrange(len(WORDS)) for _ in range(n_tokens)]
    common: dict[str, Any] = {
        "dataset": dataset,
        "prompt_index": index,
        "language": "en",
        "thinking": False,
        "turn": 0,
        "mode": "chain",
        "repeat": 0,
        "n_prompt_tokens": 20,
        "token_ids": ids,
        "correct": rng.random() < 0.6 if dataset == "arithmetic" else None,
    }
    plain_s = Seconds(0.1, 0.0, PLAIN_S * (n_tokens - 1))
    runs = [Run(**common, method="plain", block_size=None, seconds=plain_s)]
    for method, block, share in (
        ("dflash", 16, chance),
        ("dflash", 8, chance),
        ("prompt_lookup", None, chance / 3),
    ):
        accepted, drafted = _cycles(rng, share, (block or 11) - 1, n_tokens)
        draft_s = DRAFT_S if method == "dflash" else 0.0005
        times = CycleSeconds(draft_s * len(accepted), VERIFY_S * len(accepted))
        runs.append(
            Run(
                **common,
                method=method,
                block_size=block,
                seconds=Seconds(0.1, draft_s, 1.03 * (times.draft + times.verify)),
                n_accepted=accepted,
                n_drafted=drafted,
                identical=True,
                cycle_seconds=times,
                rejected_ids=[
                    [rng.randrange(len(WORDS)) for _ in range(d - a)]
                    for a, d in zip(accepted, drafted, strict=True)
                ],
            )
        )
    return runs


def _cycles(
    rng: random.Random, chance: float, n_drafts: int, n_tokens: int
) -> tuple[list[int], list[int]]:
    accepted: list[int] = []
    left = n_tokens - 1
    while left > 0:
        n = 0
        while n < min(n_drafts, left) and rng.random() < chance:
            n += 1
        accepted.append(n)
        left -= n + 1
    return accepted, [n_drafts] * len(accepted)


def _is_first_chat(run: Run) -> bool:
    return run.dataset == "chat" and run.prompt_index == 0 and run.method == "dflash"


def _differing(run: Run) -> Run:
    ids = [*run.token_ids[:-3], 1, 1, 1]
    place = next(i for i, (a, b) in enumerate(zip(run.token_ids, ids, strict=True)) if a != b)
    return replace(run, token_ids=ids, identical=False, first_difference=place, top2_gap=0.125)
