"""Answer every turn of a chat, with the target's own earlier answers before it."""

import json
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from .chats import Chat, Message
from .regenerate import RegenerationReport, prompt_id

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _OpenChat:
    """A chat on the way: what was said so far, and which of the given messages are used."""

    given: Chat
    said: list[Message]
    n_used: int

    def prompt(self) -> Chat:
        """All that stands before the next answer."""
        messages = self.said + self.given.messages[self.n_used : self._next_end()]
        chat = self.given
        return Chat(
            messages, None, chat.tools, chat.template_options, chat.labels, source=chat.source
        )

    def goes_on(self) -> bool:
        """Whether anything is left to be answered."""
        return self._next_end() is not None

    def answered(self, answer: Message) -> "_OpenChat":
        """Go on behind an answer."""
        end = self._next_end()
        n_used = len(self.given.messages) if end is None else end + 1
        following = self.given.messages[n_used : n_used + 1]
        if following and following[0]["role"] == "tool" and end is not None:
            answer = self.given.messages[end]  # results belong to the call that was made
        return replace(self, said=[*self.prompt().messages, answer], n_used=n_used)

    def _next_end(self) -> int | None:
        """Where the next answer stands; at the end of a chat that waits for one."""
        messages = self.given.messages
        for i in range(max(self.n_used, 1), len(messages)):
            if messages[i]["role"] == "assistant":
                return i
        is_left = self.n_used < len(messages)
        return len(messages) if is_left and messages[-1]["role"] != "assistant" else None


def regenerate_turns(
    chats: Iterable[Chat],
    path: Path,
    template_options: dict[str, Any],
    answer: Callable[[list[Chat]], RegenerationReport],
    special_ids: Collection[int] = (),
) -> RegenerationReport:
    """Answer chats turn by turn, all of them at once.

    So each answer stands behind what the target itself has said, as when it is served; but a call
    whose results follow is kept before them. A chat ends where its prompt is left out, where a
    limit has cut its answer, or where special tokens stand inside it (channels, calls): its text
    has lost them, so the next prompt would not be that of serving. It counts as left out.

    Args:
        chats: What the assistant says in them is answered anew.
        path: Where ``answer`` appends its answers.
        template_options: Of chats that have none of their own.
        answer: Answers prompts.
        special_ids: The target's tokens that are not in the text of an answer.

    Raises:
        ValueError: If a chat is a plain text, which has no turn to answer.
    """
    waiting = [_OpenChat(_with_turns(chat), [], 0) for chat in chats]
    waiting = [chat for chat in waiting if chat.goes_on()]
    reports = [RegenerationReport(0, 0)]
    lossy: list[str] = []
    while waiting:
        prompts = [chat.prompt() for chat in waiting]
        reports.append(answer(prompts))
        answers = _finished_answers(path)
        following = []
        for chat, prompt in zip(waiting, prompts, strict=True):
            options = {**template_options, **prompt.template_options}
            made = answers.get(prompt_id(replace(prompt, template_options=options)))
            if made is None:
                continue
            said = made["messages"][-1]
            later = chat.answered(said)
            if not later.goes_on():
                continue
            if later.said[-1] is said and _has_inside(made.get("answer_ids") or [], special_ids):
                lossy.append(prompt.source)
            else:
                following.append(later)
        waiting = following
    if lossy:
        logger.warning(
            "Ended %d chats before their last turn: special tokens inside an answer, which its "
            "text has lost; first %s.",
            len(lossy),
            lossy[0],
        )
    return RegenerationReport(
        n_answered=sum(report.n_answered for report in reports),
        n_found=sum(report.n_found for report in reports),
        n_left_out=sum(report.n_left_out for report in reports) + len(lossy),
    )


def _with_turns(chat: Chat) -> Chat:
    if chat.text is not None:
        raise ValueError(
            f"{chat.source}: a plain text has no turn to answer. Give chats or prompts."
        )
    return chat


def _finished_answers(path: Path) -> dict[str, dict[str, Any]]:
    """The records of answers that were not cut, by the ids of their prompts."""
    with path.open(encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    return {record["id"]: record for record in records if record["finished"]}


def _has_inside(ids: list[int], special_ids: Collection[int]) -> bool:
    """Whether a special token stands before a plain one; those at the end only end the turn."""
    is_special = [token in special_ids for token in ids]
    return any(a and not b for a, b in pairwise(is_special))
