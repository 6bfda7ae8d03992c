"""How good drafts are, from how many a cycle proposed and how many of them were kept.

The one definition of these figures. The benchmark and the trainer's evaluations call it, and the
metric of the package ``evaluate`` carries a copy of this file, so it needs the standard library
alone.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class AcceptanceCounts:
    """How many drafts were accepted. A cycle's length is its accepted drafts + 1.

    Attributes:
        macro: Mean over outputs of the mean length of the cycles of each: tau of the papers.
        micro: Mean length of all cycles.
        expected: 1 + the sum of ``by_slot``: the mean length if no cycle had drafted fewer than
            the longest one. The same as ``micro`` where all cycles draft equally many.
        accepted: Share of drafts that were accepted; 0 if none was drafted.
        n_outputs: With a cycle; others do not count.
        n_cycles: Of all outputs.
        histogram: Cycles by accepted drafts: 0, 1, ...
        by_slot: Of the cycles that drafted slot k = 1, 2, ...: the share that accepted it, and with
            it all before it.
    """

    macro: float
    micro: float
    expected: float
    accepted: float
    n_outputs: int
    n_cycles: int
    histogram: list[int]
    by_slot: list[float]


def count_acceptance(
    n_accepted: Sequence[Sequence[int]], n_drafted: Sequence[Sequence[int]]
) -> AcceptanceCounts | None:
    """Compute the figures of some outputs; None if none of them has a cycle.

    >>> found = count_acceptance([[3, 1], [0]], [[3, 3], [1]])
    >>> found.macro, round(found.micro, 3), found.histogram
    (2.0, 2.333, [1, 1, 0, 1])
    >>> [round(share, 3) for share in found.by_slot], round(found.expected, 3)
    ([0.667, 0.5, 0.5], 2.667)

    Args:
        n_accepted: For each output, the accepted drafts of each cycle.
        n_drafted: For each output, the drafts of each cycle, at least as many.
    """
    outputs = [accepted for accepted in n_accepted if len(accepted)]
    if not outputs:
        return None
    cycles = Counter(
        cycle
        for accepted, drafted in zip(n_accepted, n_drafted, strict=True)
        for cycle in zip(accepted, drafted, strict=True)
    )
    n_cycles = sum(cycles.values())
    total_accepted, total_drafted = (sum(c[i] * n for c, n in cycles.items()) for i in (0, 1))
    most = max(drafted for _, drafted in cycles)
    by_slot = [_share_of_slot(cycles, slot) for slot in range(1, most + 1)]
    return AcceptanceCounts(
        macro=float(statistics.mean(statistics.mean(accepted) + 1 for accepted in outputs)),
        micro=total_accepted / n_cycles + 1,
        expected=1 + sum(by_slot),
        accepted=total_accepted / max(total_drafted, 1),
        n_outputs=len(outputs),
        n_cycles=n_cycles,
        histogram=[sum(n for c, n in cycles.items() if c[0] == k) for k in range(most + 1)],
        by_slot=by_slot,
    )


def _share_of_slot(cycles: Counter[tuple[int, int]], slot: int) -> float:
    tried = [(accepted, n) for (accepted, drafted), n in cycles.items() if drafted >= slot]
    return sum(n for accepted, n in tried if accepted >= slot) / sum(n for _, n in tried)
