"""Read chats."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Chat:
    """One conversation."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    labels: dict[str, Any] = field(default_factory=dict)
    answer_ids: list[int] | None = None
