from __future__ import annotations

import sys

import pytest

from hf_dflash.ranks import Ranks


def test_alone_it_does_everything_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    ranks = Ranks()
    assert (ranks.rank, ranks.n_ranks) == (0, 1)
    assert all(ranks.owns(i) for i in range(3))
    assert ranks.gather([1, 2]) == [1, 2]
    assert ranks.device in ("cpu", "cuda")
    ranks.leave()


def test_several_need_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(RuntimeError, match=r"Several processes need `accelerate`: pip install"):
        Ranks()
