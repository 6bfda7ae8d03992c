"""Tiny tokenizers and chat templates that hold every hazard of a loss mask."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIALS = ["<pad>", "<|im_start|>", "<|im_end|>", "<|header|>", "<|eot|>", "</s>"]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As training templates have them: the tag closes before the token that ends the turn.
TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The tag takes in what no model generates: the line break after the turn's end.
TAGGED_WIDE = TAGGED.replace(
    "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}",
    "{{ m.content + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}",
)
LLAMA3 = (
    "{% for m in messages %}"
    "{{ '<|header|>' + m.role + '<|header|>\n\n' + m.content | trim + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|header|>assistant<|header|>\n\n' }}{% endif %}"
)
# Of earlier answers only what follows the reasoning is shown.
DROPS_REASONING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}"
    "{% endif %}{% endif %}"
)
# The prompt opens the thinking; the rendered chat shows none at all.
OPENS_THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ m.content.split('</think>')[-1] | trim }}{{ '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# No special token at all, and nothing between the colon and the answer: merges cross the border.
BARE = (
    "{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
BARE_TAGGED = (
    "{% for m in messages %}{{ m.role + ':' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{{ '</s>' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
STRICT_ROLES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LETTERS = "abcdefghijklmnopqrst"
# What ends a prompt stands before what starts an answer more often than before or after anything
# else, so these merge first: "assistant" + ":yes", never "assistant:" + "yes".
CORPUS = [
    sign + word
    for sign in (":", "\n", "\n\n", " ", ">")
    for word in ("Hello", "yes", "the answer", "1 + 1", "assistant", "user", "think")
] * 20 + ["think\n\n"] * 9


@cache
def byte_tokenizer(*, split_words: bool = True, vocab_size: int = 360) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer.

    Args:
        split_words: As GPT-2 does; otherwise merges join letters, blanks and signs at will.
        vocab_size: All 256 bytes, the special tokens and the merges.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split_words)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _fast(backend)


@cache
def spaced_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that puts a space before every text, as sentencepiece does."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=100, special_tokens=SPECIALS, show_progress=False)
    # A letter in front, or the space would part the sign from the word.
    backend.train_from_iterator([letter + text for letter in LETTERS for text in CORPUS], trainer)
    return _fast(backend)


def with_template(tokenizer: Any, template: str) -> Any:
    """The tokenizer with another chat template; tokenizers are shared, so it is a copy."""
    copied = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, **tokenizer.special_tokens_map
    )
    copied.chat_template = template
    return copied


def _fast(backend: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<pad>"
    )
