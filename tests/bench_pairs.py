"""Pairs to run the benchmark with: some drafts are accepted and some are not, without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chat_tokenizers import CHATML, byte_tokenizer, with_template
from hf_dflash.benchmark import Models
from pairs import random_drafter, tiny_target

VOCAB_SIZE = 360
#: All that the target ever writes, apart from token 0.
WRITTEN = (70, 80, 90)
BLOCK = 4


def target_of_few_tokens(seed: int = 1) -> Any:
    """A random target whose head knows three tokens; every other one has the logit 0.

    A drafter with small random weights proposes one token again and again, which this target does
    write in runs, if the seed is good.
    """
    target = tiny_target(seed, vocab_size=VOCAB_SIZE)
    rows = [i for i in range(VOCAB_SIZE) if i not in WRITTEN]
    target.lm_head.weight.data[rows] = 0.0
    return target


def chat_tokenizer() -> Any:
    """Knows a chat template."""
    return with_template(byte_tokenizer(vocab_size=VOCAB_SIZE), CHATML)


def bench_models(**overrides: Any) -> Models:
    """All that decodes, in memory."""
    target = target_of_few_tokens()
    return Models(
        **{
            "target": target,
            "tokenizer": chat_tokenizer(),
            "drafter": random_drafter(target, BLOCK),
            "assistant": target_of_few_tokens(seed=3),
            **overrides,
        }
    )


def saved_models(folder: Path) -> dict[str, str]:
    """The same on disk: folders by the command's options."""
    models = bench_models()
    paths = {name: str(folder / name) for name in ("target", "drafter", "assistant")}
    for name, path in paths.items():
        getattr(models, name).save_pretrained(path)
    models.tokenizer.save_pretrained(paths["target"])
    return paths
