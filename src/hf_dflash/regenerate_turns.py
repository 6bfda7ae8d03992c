"""Answer every turn of a chat, with the target's own earlier answers before it."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .chats import Chat, Message
from .regenerate import RegenerationReport, prompt_id


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
) -> RegenerationReport:
    """Answer chats turn by turn, all of them at once.

    So each answer stands behind what the target itself has said, as when it is served; but a call
    whose results follow is kept before them. A chat ends where its prompt is left out, or where a
    limit has cut its answer.

    Args:
        chats: What the assistant says in them is answered anew.
        path: Where ``answer`` appends its answers.
        template_options: Of chats that have none of their own.
        answer: Answers prompts.

    Raises:
        ValueError: If a chat is a plain text, which has no turn to answer.
    """
    waiting = [_OpenChat(_with_turns(chat), [], 0) for chat in chats]
    waiting = [chat for chat in waiting if chat.goes_on()]
    reports = [RegenerationReport(0, 0)]
    while waiting:
        prompts = [chat.prompt() for chat in waiting]
        reports.append(answer(prompts))
        answers = _finished_answers(path)
        following = []
        for chat, prompt in zip(waiting, prompts, strict=True):
            options = {**template_options, **prompt.template_options}
            made = answers.get(prompt_id(replace(prompt, template_options=options)))
            if made is not None:
                following.append(chat.answered(made))
        waiting = [chat for chat in following if chat.goes_on()]
    return RegenerationReport(
        n_answered=sum(report.n_answered for report in reports),
        n_found=sum(report.n_found for report in reports),
        n_left_out=sum(report.n_left_out for report in reports),
    )


def _with_turns(chat: Chat) -> Chat:
    if chat.text is not None:
        raise ValueError(
            f"{chat.source}: a plain text has no turn to answer. Give chats or prompts."
        )
    return chat


def _finished_answers(path: Path) -> dict[str, Message]:
    """The answers that were not cut, by the ids of their prompts."""
    with path.open(encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    return {record["id"]: record["messages"][-1] for record in records if record["finished"]}
