"""Run `hf-dflash bench` as one of several processes, all of which are killed on the way.

The first two arguments: how many prompts each process measures before it is killed ("2,0"; empty
for to the end), and a file that gets a line for each prompt that was measured: rank and prompt.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from accelerate import PartialState

from hf_dflash.benchmark import Benchmark
from hf_dflash.cli import app


def die_after(numbers: str, log: Path) -> None:
    """Kill each process when it is to measure one prompt more than its number."""
    run_prompt, rank = Benchmark.run_prompt, int(os.environ["RANK"])
    n_left = int(numbers.split(",")[rank]) if numbers else -1

    def counted(benchmark: Benchmark, dataset: str, index: int, prompt: Any) -> Any:
        nonlocal n_left
        if n_left == 0:
            PartialState().wait_for_everyone()  # the others have measured theirs, too
            os.kill(os.getpid(), signal.SIGKILL)
        n_left -= 1
        runs = run_prompt(benchmark, dataset, index, prompt)
        with log.open("a") as file:
            file.write(f"{rank} {index}\n")
        return runs

    Benchmark.run_prompt = counted  # type: ignore[method-assign]


if __name__ == "__main__":
    die_after(sys.argv[1], Path(sys.argv[2]))
    sys.exit(app(sys.argv[3:], standalone_mode=False))
