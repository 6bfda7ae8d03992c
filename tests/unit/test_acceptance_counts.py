from __future__ import annotations

import random

import pytest

from hf_dflash.acceptance_counts import count_acceptance


@pytest.mark.parametrize("seed", range(3))
def test_the_figures_are_what_their_definitions_say(seed: int) -> None:
    rng = random.Random(seed)
    drafted = [[rng.randint(0, 7) for _ in range(rng.randint(1, 9))] for _ in range(5)]
    accepted = [[rng.randint(0, n) for n in cycles] for cycles in drafted]
    found = count_acceptance(accepted, drafted)
    assert found is not None
    lengths = [[n + 1 for n in cycles] for cycles in accepted]
    cycles = [c for a, d in zip(accepted, drafted, strict=True) for c in zip(a, d, strict=True)]
    shares = []
    for slot in range(1, max(d for _, d in cycles) + 1):
        tried = [a >= slot for a, d in cycles if d >= slot]
        shares.append(sum(tried) / len(tried))
    assert found.macro == pytest.approx(sum(sum(n) / len(n) for n in lengths) / len(lengths))
    assert found.micro == pytest.approx(sum(map(sum, lengths)) / len(cycles))
    assert found.expected == pytest.approx(1 + sum(shares))
    assert found.accepted == pytest.approx(sum(a for a, _ in cycles) / sum(d for _, d in cycles))
    assert (found.n_outputs, found.n_cycles) == (5, len(cycles))
    assert found.histogram == [sum(a == n for a, _ in cycles) for n in range(len(shares) + 1)]
    assert found.by_slot == pytest.approx(shares)


def test_outputs_without_a_cycle_do_not_count() -> None:
    assert count_acceptance([], []) is None
    assert count_acceptance([[], []], [[], []]) is None
    found = count_acceptance([[3, 1], []], [[3, 3], []])
    assert found is not None
    assert (found.macro, found.n_outputs) == (3.0, 1)


def test_cycles_without_a_draft_are_plain_decoding() -> None:
    found = count_acceptance([[0, 0]], [[0, 0]])
    assert found is not None
    assert (found.macro, found.micro, found.expected, found.accepted) == (1.0, 1.0, 1.0, 0.0)
    assert (found.histogram, found.by_slot) == ([2], [])
