"""Rounding and error told apart, with rows made by hand and with those of real decodings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from checks import mixed
from hf_dflash.near_tie import CONTENDERS, doubt, replayed_scores, shape_rounding
from pairs import scripted, tiny_target

N_NEW = 16


def test_rounding_is_measured_on_the_tokens_that_could_win() -> None:
    one_row = torch.arange(64, dtype=torch.float32) / 2  # best is 31.5: steps of 0.125 in bfloat16
    block = one_row.clone()
    block[0] += 9.0  # far below the best: of no interest
    pair = torch.tensor([63, 62])
    assert shape_rounding(one_row, block, pair, torch.bfloat16) == 0.0625
    block[63 - CONTENDERS + 1] += 0.5
    assert shape_rounding(one_row, block, pair, torch.bfloat16) == 0.5
    assert shape_rounding(one_row, one_row, pair, torch.float32) == 2.0**-20
    assert shape_rounding(one_row, block, torch.tensor([0, 1]), torch.bfloat16) == 9.0


def test_a_forbidden_token_is_far_away_and_moves_nothing() -> None:
    one_row = torch.tensor([8.0, 7.0, -torch.inf])
    found = doubt([one_row, one_row], [0, 2], torch.bfloat16)
    assert found.rounding == 2.0**-5
    assert 1e38 < found.distance < float("inf")


def test_the_distance_is_that_of_the_row_where_the_worse_token_is_farther() -> None:
    one_row, block = torch.tensor([8.0, 7.0, 6.5]), torch.tensor([7.5, 7.75, 6.5])
    assert doubt([one_row, block], [0, 1], torch.bfloat16).distance == 1.0
    assert doubt([block, one_row], [1, 0], torch.bfloat16).distance == 1.0
    assert doubt([one_row, block], [0, 2], torch.bfloat16).distance == 1.5


def plain(target: Any, ids: Tensor, **options: Any) -> Any:
    return target.generate(
        ids,
        max_new_tokens=N_NEW,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )


# In float32 the loop may multiply otherwise (`few_rows`); there every difference is an error.
@pytest.mark.parametrize(("dtype", "window"), [(torch.float16, None), (torch.bfloat16, 8)])
def test_rows_are_those_that_decoding_chose_from(dtype: torch.dtype, window: int | None) -> None:
    windows = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 2}
    target = tiny_target(**(windows if window else {})).to(dtype)
    target.generation_config.repetition_penalty = 1.1  # scores, not logits
    ids = torch.randint(1, 96, (1, 12), generator=torch.Generator().manual_seed(0))
    drafter, _ = scripted(target, ids, N_NEW, mixed, block_size=4)
    one_by_one = plain(target, ids)
    by_blocks = plain(target, ids, assistant_model=drafter.to(dtype))
    statistics = by_blocks.statistics
    assert 0 < sum(statistics.n_accepted) < sum(statistics.n_drafted)
    blocks, start = [range(12)], 12
    for n_accepted, n_drafted in zip(statistics.n_accepted, statistics.n_drafted, strict=True):
        blocks.append(range(start, start + n_drafted + 1))
        start += n_accepted + 1
    singles = [range(12), *(range(12 + i, 13 + i) for i in range(N_NEW - 1))]
    for output, forwards in ((one_by_one, singles), (by_blocks, blocks)):
        new = output.sequences[0, 12:].tolist()
        for index in range(0, N_NEW, 3):
            led_there = [rows for rows in forwards if rows.start <= 11 + index]
            scores = replayed_scores(target, ids, new[:index], led_there, do_sample=False)
            assert torch.equal(scores, output.scores[index][0])


def test_the_last_forward_must_hold_the_row() -> None:
    ids = torch.arange(5)[None]
    for forwards in ([], [range(5)]):
        with pytest.raises(ValueError, match=r"`forwards` must end with one that holds row 6, got"):
            replayed_scores(tiny_target(), ids, [1, 2], forwards)
