"""Token ids of a conversation, as a target that is to answer it gets them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from torch import Tensor

Options = Mapping[str, str | int | float | bool]
#: Options of chat templates that switch thinking on and off.
THINKING = ("enable_thinking", "thinking")
#: Functions that transformers gives to every template, besides those of the language.
_FUNCTIONS = ("raise_exception", "strftime_now")


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


def check_option_kinds(options: Mapping[str, Any], where: str) -> None:
    """Refuse what is no value of a template option, and a text where thinking is switched.

    A template takes the text "false" for true, or for neither.

    Raises:
        ValueError: The message begins with ``where``.
    """
    for name, value in options.items():
        if name in THINKING and not isinstance(value, bool):
            raise ValueError(f"{where} {name} must be true or false, got {value!r:.60}.")
        if not isinstance(value, str | int | float | bool):
            raise ValueError(
                f"{where} {name} must be a text, a number, true or false, got {value!r:.60}."
            )
        if isinstance(value, float) and not math.isfinite(value):  # no JSON file can hold it
            raise ValueError(f"{where} {name} must be a finite number, got {value!r}.")


def check_template_options(
    tokenizer: Any,
    options: Options,
    where: str,
    *,
    text: str = "?",
    defaults: Options | None = None,
) -> None:
    """Refuse options that the target's chat template would pass over, and those that it refuses.

    Args:
        tokenizer: The target's.
        options: Those to check.
        where: What gives them, for messages.
        text: A prompt that they are for.
        defaults: Other options of that prompt.

    Raises:
        ValueError: The message begins with ``where``.
    """
    messages = [{"role": "user", "content": text}]
    try:
        read = _names_read(tokenizer)
        unread = [name for name in options if name not in read]
        if unread:
            raise ValueError(
                f"{where} must be options that the target's chat template reads, got {unread}. "
                "Mend the name, or leave it out."
            )
        encode_prompt(tokenizer, messages, **{**(defaults or {}), **options})
    except TemplateError as error:
        raise ValueError(
            f"{where} must be options that the target's chat template takes, got {dict(options)}: "
            f"{error}."
        ) from error


class _Generation(Extension):
    """The tag by which templates mark what the model wrote; transformers' own is not public."""

    tags = {"generation"}  # noqa: RUF012 - as the base declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)  # what is set within is not seen behind it


def _names_read(tokenizer: Any) -> set[str]:
    """Names that the chat template takes from outside, without those that the tokenizer sets."""
    if not getattr(tokenizer, "chat_template", None):
        return set()
    template = tokenizer.get_chat_template()
    language = Environment(extensions=[_Generation, loopcontrols])  # nothing is rendered
    try:
        names = find_undeclared_variables(language.parse(template))
    except TemplateSyntaxError:  # a tag that only the tokenizer knows: every name may be read
        names = {value for _, kind, value in language.lex(template) if kind == "name"}
    own = inspect.signature(tokenizer.apply_chat_template).parameters
    return names - {"messages", *own, *tokenizer.special_tokens_map, *language.globals, *_FUNCTIONS}
