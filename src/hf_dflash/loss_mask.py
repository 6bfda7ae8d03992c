"""Turn chats into token ids and say which of them the target would write: the loss mask.

Training must see what serving sees. So the prompt of an answer is what ``apply_chat_template``
gives when it is asked for a generation prompt, token by token, and the answer is what follows it,
up to and with the token that ends the turn. The prompt of serving is compared with the rendered
chat, never guessed; where they differ, the turn gets a row of its own, made as it is served.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from .chats import Chat, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
# How a template's generation prompt opens the thinking: a tag at its very end.
OPENED_TAG = re.compile(r"<(\w+)>(\s*)\Z")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")

TEMPLATE_REFUSES = "the chat template refuses the chat"
TEMPLATE_REWRITES = "the chat template rewrites the answer"
NOT_APART = "the answer cannot be tokenised apart from its prompt"


class UnusableTurnError(ValueError):
    """A turn cannot be trained on as it is served; ``args`` are the kind of reason and details."""


@dataclass(frozen=True)
class EncodedRow:
    """One training row.

    Attributes:
        input_ids: (S,) token ids.
        loss_mask: (S,) 1 where the token is the target's own, up to and with the turn's end.
        document_ids: (S,) of a packed row, 1, 2, ...; None where the row is one document.
    """

    input_ids: list[int]
    loss_mask: list[int]
    document_ids: list[int] | None = None

    def has_anchor(self) -> bool:
        """Say if a block can start here: a supervised token with a supervised one after it."""
        return any(a and b for a, b in zip(self.loss_mask, self.loss_mask[1:], strict=False))


@dataclass(frozen=True)
class EncodedChat:
    """The rows of one chat, and why a turn of it gave none."""

    rows: list[EncodedRow]
    problems: list[UnusableTurnError]


@dataclass(frozen=True)
class _Rendered:
    text: str
    ids: list[int]
    spans: list[tuple[int, int]]  # the characters of each token
    tagged: list[int] | None  # by the template's generation tags, if it has any


class ChatEncoder:
    """Encodes chats for training with one tokenizer.

    Args:
        tokenizer: A fast one, with the chat template that the target is served with.
        merge_turns: Put turns into one row where it shows each of them just what serving shows.
            Templates that drop earlier reasoning, and answers with recorded tokens that the
            tokenizer would split otherwise, keep rows of their own.

    Raises:
        ValueError: If the tokenizer is slow: only a fast one tells a token's characters.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", *, merge_turns: bool = True):
        if not tokenizer.is_fast:
            raise ValueError(
                f"`tokenizer` must be a fast one, got {type(tokenizer).__name__}, which does not "
                "tell the characters of a token. Load it with AutoTokenizer."
            )
        self.tokenizer = tokenizer
        self.merge_turns = merge_turns
        self._special_ids = special_ids(tokenizer)

    def encode(self, chat: Chat) -> EncodedChat:
        """Encode a chat: a row for every assistant turn, or fewer where turns could be merged.

        Of a regenerated answer it is the last turn only, as the others have answers of their own.
        Of a plain text every token is supervised, and the end of the text.
        """
        if chat.text is not None:
            return EncodedChat([self._encode_text(chat.text)], [])
        rows: list[EncodedRow] = []
        problems = []
        first = len(chat.messages) - 1 if chat.only_last else 1  # nothing asked for a greeting
        for turn, message in enumerate(chat.messages):
            if message["role"] != "assistant" or turn < max(first, 1):
                continue
            try:
                rows.append(self._encode_turn(chat, turn))
            except UnusableTurnError as problem:
                problems.append(problem)
        return EncodedChat(_merge(rows) if self.merge_turns else rows, problems)

    def prompt_ids(self, chat: Chat) -> list[int]:
        """Tokenise ``chat`` as a server does before it lets the model answer."""
        return self._render(chat, chat.messages, for_answer=True).ids

    def _encode_text(self, text: str) -> EncodedRow:
        bos_id, eos_id = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        ids = list(self.tokenizer(text)["input_ids"])
        if eos_id is not None and ids[-1:] != [eos_id]:
            ids.append(eos_id)
        # The first token is given, never generated.
        is_given = bool(ids) and ids[0] == bos_id and len(ids) > 1
        return EncodedRow(ids, [int(not (is_given and i == 0)) for i in range(len(ids))])

    def _encode_turn(self, chat: Chat, turn: int) -> EncodedRow:
        prompt = self._render(chat, chat.messages[:turn], for_answer=True)
        if chat.answer_ids is not None and turn == len(chat.messages) - 1:
            answer, mask = chat.answer_ids, [1] * len(chat.answer_ids)
        else:
            full = self._render(chat, chat.messages[: turn + 1], for_answer=False)
            answer, tagged = self._answer(prompt, full, chat.messages[turn])
            answer = answer[: self._turn_end(answer)]
            was_cut = not chat.finished and turn == len(chat.messages) - 1
            while was_cut and answer and answer[-1] in self._special_ids:
                answer = answer[:-1]  # the template's; the target would have gone on
            mask = self._answer_mask(answer, tagged)
        return EncodedRow(prompt.ids + answer, [0] * len(prompt.ids) + mask)

    def _answer(
        self, prompt: _Rendered, full: _Rendered, message: Message
    ) -> tuple[list[int], list[int] | None]:
        """The answer's tokens as they follow the prompt's, and their generation tags."""
        n_prompt, n_prompt_chars = len(prompt.ids), len(prompt.text)
        if not full.text.startswith(prompt.text):
            rebuilt = _rebuilt_answer(prompt.text, full.text, message)
            return self._tokenise_apart(prompt, rebuilt).ids, None
        if full.ids[:n_prompt] == prompt.ids:
            return full.ids[n_prompt:], full.tagged and full.tagged[n_prompt:]
        # A merge across the border. At serving the prompt's last token stands before the answer's
        # first is made, so the two cannot merge.
        apart = self._tokenise_apart(prompt, full.text[n_prompt_chars:])
        return apart.ids, full.tagged and _tags_at(full, apart.spans, n_prompt_chars)

    def _tokenise_apart(self, prompt: _Rendered, answer: str) -> _Rendered:
        encoded = self.tokenizer(answer, add_special_tokens=False, return_offsets_mapping=True)
        ids = list(encoded["input_ids"])
        together = self.tokenizer(prompt.text + answer, add_special_tokens=False)["input_ids"]
        # Tokenizers that put a space before every text would put one between prompt and answer.
        if self.tokenizer.decode(prompt.ids + ids) != self.tokenizer.decode(together):
            raise UnusableTurnError(NOT_APART, f"{answer!r:.40}")
        return _Rendered(answer, ids, encoded["offset_mapping"], None)

    def _turn_end(self, answer: list[int]) -> int:
        """Count the answer's tokens, the one that ends the turn included, if there is one.

        What a template puts after it (a line break, a second end token) is never generated. Of
        several end tokens it is the tokenizer's own, where decoding ends, or else the first.
        """
        end = len(answer)
        while end and (answer[end - 1] in self._special_ids or self._is_blank(answer[end - 1])):
            end -= 1
        marks = [i for i in range(end, len(answer)) if answer[i] in self._special_ids]
        own = [i for i in marks if answer[i] == self.tokenizer.eos_token_id]
        return (own or marks or [end - 1])[0] + 1

    def _is_blank(self, token_id: int) -> bool:
        return not str(self.tokenizer.decode([token_id])).strip()

    def _answer_mask(self, answer: list[int], tagged: list[int] | None) -> list[int]:
        if tagged is None:
            return [1] * len(answer)
        mask = tagged[: len(answer)]
        if 1 in mask and answer[-1] in self._special_ids:
            # Many templates close the tag before the token that ends the turn.
            last = max(i for i, tag in enumerate(mask) if tag)
            mask[last:] = [1] * (len(mask) - last)
        return mask

    def _render(self, chat: Chat, messages: list[Message], *, for_answer: bool) -> _Rendered:
        template = self.tokenizer.get_chat_template(tools=chat.tools)
        has_tags = not for_answer and GENERATION_TAG.search(template) is not None
        options = {
            "tools": chat.tools,
            "add_generation_prompt": for_answer,
            **chat.template_options,
        }
        try:
            text = str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))
            encoded: Any = self.tokenizer.apply_chat_template(
                messages,
                return_dict=True,
                return_assistant_tokens_mask=has_tags,
                tokenizer_kwargs={"return_offsets_mapping": True},
                **options,
            )
        except TemplateError as error:
            raise UnusableTurnError(TEMPLATE_REFUSES, str(error)) from error
        tagged = list(encoded["assistant_masks"]) if has_tags else None
        return _Rendered(text, list(encoded["input_ids"]), encoded["offset_mapping"], tagged)


def special_ids(tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    """Tokens that stand for no text of their own: ends of turns, roles, channels."""
    added = tokenizer.added_tokens_decoder
    ids = {token_id for token_id, token in added.items() if token.special}
    return ids.union(tokenizer.all_special_ids)


def encode_chat(
    tokenizer: "PreTrainedTokenizerBase", chat: Chat, *, merge_turns: bool = True
) -> list[EncodedRow]:
    """Encode one chat; for many, make one :class:`ChatEncoder`.

    Raises:
        UnusableTurnError: If a turn cannot be trained on as it is served.
    """
    encoded = ChatEncoder(tokenizer, merge_turns=merge_turns).encode(chat)
    if encoded.problems:
        raise encoded.problems[0]
    return encoded.rows


def _merge(rows: list[EncodedRow]) -> list[EncodedRow]:
    """Join a row to the next one that starts with the very same tokens."""
    merged: list[EncodedRow] = []
    for row in rows:
        if merged and row.input_ids[: len(merged[-1].input_ids)] == merged[-1].input_ids:
            earlier = merged.pop().loss_mask
            row = EncodedRow(row.input_ids, earlier + row.loss_mask[len(earlier) :])
        merged.append(row)
    return merged


def _rebuilt_answer(prompt: str, full: str, message: Message) -> str:
    """Write the answer as the model would after ``prompt``, when the template shows it otherwise.

    Reasoning models do this: the prompt opens the thinking, which the rendered chat leaves out.
    """
    content = message.get("content")
    opened = OPENED_TAG.search(prompt)
    if not isinstance(content, str) or opened is None:
        raise UnusableTurnError(TEMPLATE_REWRITES, f"{content!r:.40}")
    name, space = opened.groups()
    reasoning = next((message[f] for f in REASONING_FIELDS if message.get(f)), None)
    if reasoning is not None:
        content = f"<{name}>\n{reasoning}\n</{name}>\n\n{content}"
    visible = content.rsplit(f"</{name}>", 1)[-1].strip()
    if not content.startswith(f"<{name}>") or not visible or visible not in full:
        raise UnusableTurnError(TEMPLATE_REWRITES, f"{content!r:.40}")
    thought = content.removeprefix(f"<{name}>")
    turn_end = full[full.rindex(visible) + len(visible) :]
    return (thought.lstrip() if space else thought).rstrip() + turn_end


def _tags_at(full: _Rendered, spans: list[tuple[int, int]], n_prompt_chars: int) -> list[int]:
    """Carry generation tags over to other tokens of the same text, by their characters."""
    tokens = zip(full.spans, full.tagged or [], strict=True)
    characters = {
        c - n_prompt_chars for (start, end), tag in tokens if tag for c in range(start, end)
    }
    return [int(any(c in characters for c in range(start, end))) for start, end in spans]
