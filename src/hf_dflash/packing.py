"""Pack short training rows into long ones, so that batches hold little padding."""

from collections.abc import Callable, Iterator, Sequence

from .loss_mask import EncodedRow


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


def pack_rows(rows: Sequence[EncodedRow], length: int) -> list[EncodedRow]:
    """Pack rows into rows of at most ``length`` tokens, each its own document there.

    >>> pack_rows([EncodedRow([5], [1]), EncodedRow([6, 7], [0, 1])], length=3)[0].document_ids
    [1, 1, 2]

    Raises:
        ValueError: If a row is empty or longer than ``length``.
    """
    lengths = [len(row.input_ids) for row in rows]
    return list(packed_rows(rows.__getitem__, lengths, length))


def packed_rows(
    read: Callable[[int], EncodedRow], lengths: Sequence[int], length: int
) -> Iterator[EncodedRow]:
    """Pack rows that are read one by one.

    Args:
        read: Gives a row by its number.
        lengths: Of all rows, in tokens.
        length: Tokens to pack into.

    Raises:
        ValueError: If a row is empty or longer than ``length``.
    """
    for members in first_fit_decreasing(lengths, length):
        yield _joined([read(i) for i in members])


def _joined(rows: Sequence[EncodedRow]) -> EncodedRow:
    return EncodedRow(
        [token for row in rows for token in row.input_ids],
        [value for row in rows for value in row.loss_mask],
        # From 1: a collator's 0 is padding.
        [number for number, row in enumerate(rows, start=1) for _ in row.input_ids],
    )


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
