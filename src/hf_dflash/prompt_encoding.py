"""Token ids of a conversation, as a target that is to answer it gets them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def encode_prompt(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], **template_options: Any
) -> Tensor:
    """A conversation up to where the target is to answer; ids (1, S), on the host.

    Without a chat template it is the texts with an empty line between them.

    Args:
        tokenizer: The target's.
        messages: Each with ``role`` and ``content``.
        **template_options: For the chat template.

    Raises:
        ValueError: The tokenizer makes no token of it.
    """
    if getattr(tokenizer, "chat_template", None):
        encoded = tokenizer.apply_chat_template(
            list(messages),
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
            **template_options,
        )
    else:
        text = "\n\n".join(message["content"] for message in messages)
        encoded = tokenizer(text, return_tensors="pt")
    ids: Tensor = encoded["input_ids"]
    if ids.numel() == 0:
        name = getattr(tokenizer, "name_or_path", "")
        raise ValueError(
            f"The tokenizer {type(tokenizer).__name__} of {name or 'the target'} must make at "
            f"least one token of a prompt, got none for {messages[-1]['content'][:60]!r}. Check "
            "the tokenizer's files in that folder or repository."
        )
    return ids
