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


def test_a_launcher_that_starts_one_process_in_place_of_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`accelerate launch --cpu --num_processes 2` does, and says nothing."""
    launcher = pytest.importorskip("accelerate.commands.launch")
    script = ["-m", "hf_dflash.cli", "bench"]
    for name in ("WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for options in (["--num_processes", "1"], ["--num_processes", "2"]):
        words = ["--cpu", "--num_machines", "1", "--mixed_precision", "no", *options, *script]
        arguments = launcher.launch_command_parser().parse_args(words)
        arguments, *_ = launcher._validate_launch_command(arguments)
        _, environment = launcher.prepare_simple_launcher_cmd_env(arguments)
        with monkeypatch.context() as started:
            for name, value in environment.items():
                started.setenv(name, value)
            if options[1] == "1":
                assert Ranks().n_ranks == 1
            else:
                with pytest.raises(RuntimeError, match=r"knows of no other: .*--multi_gpu and"):
                    Ranks()
