"""Linear layers over the few rows of a block, in float32 on a CPU.

On some CPUs the library behind `torch.nn.functional.linear` takes much longer for 2 to 8 rows than
for one, though reading the weights is most of the work and they are the same. With the operands
exchanged, W Xᵀ in place of X Wᵀ, it does not: `benchmarks/few_rows.py` compares the two. A forward
of one row, as in plain decoding, is left to torch, even where several rows take less time than one.
Of how many rows that is the quicker way depends on the CPU, so each number is timed, once in a
process.

Letters: S rows, I and O a layer's input and output sizes.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import MethodType
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

#: Blocks of these sizes may be multiplied the other way round. Above, what is quicker depends on
#: the shape of each layer's weight too.
FEW_ROWS = range(2, 9)
# Several threads may decode with one target: its layers are replaced as long as one of them does,
# and multiply the other way for those threads only that do.
_users: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # calls that replaced a layer
_thread, _lock = threading.local(), threading.Lock()


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, the other way round.

    Args:
        inputs: (..., I) float32 on a CPU; the leading sizes make S rows.
        weight: (O, I).
        bias: (O,).

    Returns:
        (..., O), contiguous. It differs from torch's by rounding only.
    """
    is_one_batch = inputs.dim() == 3 and len(inputs) == 1  # as in decoding: spared two views
    rows = inputs if is_one_batch else inputs.reshape(1, -1, inputs.shape[-1])
    outputs = torch.bmm(weight[None], rows.mT).mT.contiguous()
    if bias is not None:
        outputs += bias
    return outputs if is_one_batch else outputs.view(*inputs.shape[:-1], -1)


@lru_cache
def rows_quicker_the_other_way(n_threads: int) -> frozenset[int]:  # noqa: ARG001  # a key
    """For which of `FEW_ROWS` `linear` beats torch's by a tenth, with 64 MiB of weights.

    Takes about half a second, once for each number of threads.
    """
    weight = torch.ones(16384, 1024)

    def seconds(multiply: Callable[[Tensor, Tensor], Tensor], inputs: Tensor) -> float:
        start = time.perf_counter()
        multiply(inputs, weight)
        return time.perf_counter() - start

    def is_quicker(n_rows: int) -> bool:
        inputs = torch.ones(n_rows, 1024)
        rounds = [
            (seconds(linear, inputs), seconds(nn.functional.linear, inputs)) for _ in range(4)
        ]
        ours, torchs = (min(times[1:]) for times in zip(*rounds, strict=True))
        return ours < 0.9 * torchs

    return frozenset(filter(is_quicker, FEW_ROWS))


@contextmanager
def quick_few_rows(*models: nn.Module) -> Iterator[None]:
    """Let the models' linear layers use `linear` while this lasts, where it is the quicker way.

    Layers on other devices, of other types or with quantised weights, and all whose forward
    somebody else has replaced (hooks of accelerate, `torch.compile`) are left as they are.
    """

    def forward(layer: nn.Linear, inputs: Tensor) -> Tensor:
        is_quick = math.prod(inputs.shape[:-1]) in few and getattr(_thread, "n_inside", 0) > 0
        return (linear if is_quick else nn.functional.linear)(inputs, layer.weight, layer.bias)

    with _lock:  # the search, too: it tells our own replacements by `_users`
        layers, few = _layers_and_rows(models)
        for layer in layers:
            layer.forward = MethodType(forward, layer)
            _users[layer] = _users.get(layer, 0) + 1
    _thread.n_inside = getattr(_thread, "n_inside", 0) + 1
    try:
        yield
    finally:
        _thread.n_inside -= 1
        with _lock:
            for layer in layers:
                _users[layer] -= 1
                if _users[layer] == 0:
                    del _users[layer]
                    vars(layer).pop("forward", None)


def rows_the_other_way(*models: nn.Module) -> list[int]:
    """Of how many rows `quick_few_rows` has these models multiply the other way; none if empty."""
    return sorted(_layers_and_rows(models)[1])


def _layers_and_rows(models: Iterable[nn.Module]) -> tuple[list[nn.Module], frozenset[int]]:
    """The layers to replace, and for how many rows; nothing is timed where there are no layers."""
    own = [model for model in models if not _is_replaced(model)]
    layers = [layer for model in own for layer in model.modules() if _is_plain(layer)]
    few = rows_quicker_the_other_way(torch.get_num_threads()) if layers else frozenset()
    return (layers if few else []), few


def _is_plain(layer: nn.Module) -> bool:
    return (
        type(layer) is nn.Linear
        and type(layer.weight) is nn.Parameter  # a quantised one is a class of torchao's
        and not _is_replaced(layer)
        and layer.weight.device.type == "cpu"
        and layer.weight.dtype == torch.float32
    )


def _is_replaced(module: nn.Module) -> bool:
    is_others = "forward" in vars(module) and module not in _users
    return is_others or module._compiled_call_impl is not None
