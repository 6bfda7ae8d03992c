"""Several processes that share the prompts of a benchmark, as ``accelerate launch`` starts them."""

import os
from typing import Any, TypeVar

T = TypeVar("T")


class Ranks:
    """This process and the others; a process alone needs no package for it.

    Attributes:
        rank: Of this process, 0 for the one that writes.
        n_ranks: How many there are.

    Raises:
        RuntimeError: There are several, and ``accelerate`` is not installed; or there should be,
            and they do not know of one another.
    """

    def __init__(self) -> None:
        _refuse_strangers()
        self.n_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = 0
        self._state: Any = None
        if self.n_ranks > 1:
            try:
                from accelerate import PartialState  # type: ignore[import-untyped]
            except ImportError as error:
                raise RuntimeError(
                    "Several processes need `accelerate`: pip install 'hf-dflash[bench]'."
                ) from error
            # Without being told so, it takes each process of a machine without a GPU for the only.
            self._state = PartialState(cpu=not _has_accelerator())
            self.rank, self.n_ranks = self._state.process_index, self._state.num_processes

    @property
    def device(self) -> str:
        """Where this process decodes."""
        if self._state is not None:
            return str(self._state.device)
        return "cuda" if _has_accelerator() else "cpu"

    def owns(self, number: int) -> bool:
        """Whether this process takes prompt ``number`` of all."""
        return number % self.n_ranks == self.rank

    def gather(self, items: list[T]) -> list[T]:
        """The items of all processes, on each of them; waits for the slowest."""
        if self._state is None:
            return items
        from accelerate.utils import gather_object  # type: ignore[import-untyped]

        gathered: list[T] = gather_object(items)
        return gathered

    def leave(self) -> None:
        """Part from the others in order."""
        if self._state is not None:
            self._state.wait_for_everyone()
            self._state.destroy_process_group()


def _refuse_strangers() -> None:
    """Refuse what ``accelerate launch --cpu`` starts when it is asked for several processes.

    It sets an address to meet at and starts a single process, or leaves the rest to MPI.
    """
    names = os.environ.keys()
    if {"MASTER_ADDR", "ACCELERATE_DYNAMO_BACKEND"} <= names and "WORLD_SIZE" not in names:
        raise RuntimeError(
            "`accelerate launch` was to start several processes, and this one knows of no other: "
            "for CPUs it needs --multi_gpu and the variable ACCELERATE_USE_CPU=true in place of "
            "--cpu. Or use torchrun --nproc-per-node N -m hf_dflash.cli ..."
        )


def _has_accelerator() -> bool:
    import torch

    return torch.cuda.is_available() and not os.environ.get("ACCELERATE_USE_CPU")
