"""A tiny target with its tokenizer in a folder, and chats for it: what the commands take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from chat_tokenizers import CHATML, byte_tokenizer, with_template
from pairs import tiny_target

WORDS = ("yes", "the answer", "Hello", "1 + 1", "think", "user", "no", "one two three")


def save_target(
    folder: Path, *, template: str = CHATML, has_spare_row: bool = True, **config: Any
) -> Any:
    """Save a random target and its tokenizer, which end a turn with <|im_end|>.

    Args:
        folder: Where to.
        template: Of chats.
        has_spare_row: Whether the embedding has a row that no token uses.
        **config: Other fields of the target's config.
    """
    tokenizer = with_template(byte_tokenizer(), template)
    n_tokens = len(tokenizer)
    end_id = tokenizer.eos_token_id
    target = tiny_target(vocab_size=n_tokens + has_spare_row, eos_token_id=end_id, **config)
    if has_spare_row:  # so that the target never writes it
        target.lm_head.weight.data[-1] = 0.0
    target.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return target


def save_chats(path: Path, n_chats: int = 8, extra: Sequence[dict[str, Any]] = ()) -> Path:
    """Write chats of different lengths, and records given as they are."""
    generator = torch.Generator().manual_seed(len(path.name))
    records = list(extra)
    for _ in range(n_chats):
        picks = torch.randint(len(WORDS), (9,), generator=generator).tolist()
        words = [WORDS[i] for i in picks]
        records.append(
            {"prompt": " ".join(words[:2]), "response": " ".join(words[2 : 3 + picks[0]])}
        )
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
