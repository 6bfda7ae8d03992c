"""Pack training rows of many lengths into rows of one length: pure, and the same everywhere.

N packed rows, S their length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .loss_mask import EncodedRow

# The document of the padding: no document.
PADDING = -1


@dataclass(frozen=True)
class PackedRows:
    """Rows of one length that hold whole documents one after the other; a trainer's data set.

    Attributes:
        input_ids: (N, S) int64, padded at the end.
        loss_mask: (N, S) int64, 0 on padding.
        position_ids: (N, S) int64, from 0 in each document; 0 on padding.
        document_ids: (N, S) int64, 0, 1, ... in each row; ``PADDING`` (-1) on padding.
        members: Which of the given rows each packed row holds, in order.
    """

    input_ids: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    document_ids: Tensor
    members: list[list[int]]

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, index: int) -> "dict[str, Tensor | int]":
        return {
            "input_ids": self.input_ids[index],
            "loss_mask": self.loss_mask[index],
            "position_ids": self.position_ids[index],
            "document_ids": self.document_ids[index],
            "row_id": range(len(self))[index],
        }


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put items into as few bins of ``capacity`` as this rule finds.

    The longest item goes first, each into the first bin with room; among equals, the earlier
    first. At most 11/9 of the fewest possible bins, and one.

    >>> first_fit_decreasing([3, 6, 4, 5], capacity=9)
    [[1, 0], [3, 2]]

    Args:
        lengths: Of the items, each in 1..``capacity``.
        capacity: What fits into a bin.

    Returns:
        The indices of the items in each bin.

    Raises:
        ValueError: If an item is empty or does not fit into a bin.
    """
    bad = next((i for i, n in enumerate(lengths) if not 1 <= n <= capacity), None)
    if bad is not None:
        raise ValueError(
            f"`lengths` must lie in 1..{capacity}, got {lengths[bad]} at {bad}. Cut the rows with "
            "`max_length`, or pack into longer ones."
        )
    bins: list[list[int]] = []
    room = _RoomTree(len(lengths), capacity)
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        chosen = room.take_first(lengths[item])
        if chosen == len(bins):
            bins.append([])
        bins[chosen].append(item)
    return bins


def pack_rows(rows: "Sequence[EncodedRow]", length: int, pad_id: int) -> PackedRows:
    """Pack rows into rows of ``length`` tokens.

    Raises:
        ValueError: If a row is empty or longer than ``length``.
    """
    members = first_fit_decreasing([len(row.input_ids) for row in rows], length)
    shape = (len(members), length)
    packed = PackedRows(
        input_ids=torch.full(shape, pad_id),
        loss_mask=torch.zeros(shape, dtype=torch.long),
        position_ids=torch.zeros(shape, dtype=torch.long),
        document_ids=torch.full(shape, PADDING),
        members=members,
    )
    for i, group in enumerate(members):
        start = 0
        for document, member in enumerate(group):
            row = rows[member]
            end = start + len(row.input_ids)
            packed.input_ids[i, start:end] = torch.tensor(row.input_ids)
            packed.loss_mask[i, start:end] = torch.tensor(row.loss_mask)
            packed.position_ids[i, start:end] = torch.arange(end - start)
            packed.document_ids[i, start:end] = document
            start = end
    return packed


class _RoomTree:
    """The room of each bin, with the most room of every stretch of bins above it.

    It finds the first bin with room in log(n) steps: a plain search through a hundred thousand
    bins for each of as many items would take hours.
    """

    def __init__(self, n_bins: int, capacity: int):
        self.n_leaves = 1 << max(0, n_bins - 1).bit_length()
        self.most = [capacity] * (2 * self.n_leaves)

    def take_first(self, amount: int) -> int:
        """Take ``amount`` from the first bin that has it, and say which."""
        node = 1
        while node < self.n_leaves:
            node = 2 * node + (self.most[2 * node] < amount)
        chosen = node - self.n_leaves
        self.most[node] -= amount
        while node := node // 2:
            self.most[node] = max(self.most[2 * node], self.most[2 * node + 1])
        return chosen
