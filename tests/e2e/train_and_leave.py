"""Run `hf-dflash` as one of several processes, and see that it leaves them in an orderly way."""

from __future__ import annotations

import sys

import torch

from hf_dflash.cli import app
from threads_of_torch import refuse_threads_of_gloo


def run_and_leave() -> None:
    """Run the command line's command; neither the group of processes nor its threads may stay."""
    failed = app(standalone_mode=False)
    if not failed:
        assert not torch.distributed.is_initialized()
        refuse_threads_of_gloo()
    sys.exit(failed)


if __name__ == "__main__":
    run_and_leave()
