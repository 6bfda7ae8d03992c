"""Linear layers over the few rows of a block, in float32 on a CPU.

On some CPUs the library behind `torch.nn.functional.linear` takes much longer for 2 to 5 rows than
for one, though reading the weights is most of the work and they are the same. With the operands
exchanged, W Xᵀ in place of X Wᵀ, it does not: `benchmarks/few_rows.py` compares the two. Plain
decoding, one row a forward, gains nothing from this. Which way is the quicker one depends on the
CPU, so it is timed, once in a process.

Letters: S rows, I and O a layer's input and output sizes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import MethodType

import torch
from torch import Tensor, nn

#: Blocks of these sizes are multiplied the other way round. From 6 rows on neither way is always
#: the quicker one.
FEW_ROWS = range(2, 6)


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, the other way round for `FEW_ROWS` rows.

    Args:
        inputs: (..., I) float32 on a CPU; the leading sizes make S rows.
        weight: (O, I).
        bias: (O,).

    Returns:
        (..., O), contiguous. It differs from torch's by rounding only.
    """
    n_rows = math.prod(inputs.shape[:-1])
    if n_rows not in FEW_ROWS:
        return nn.functional.linear(inputs, weight, bias)
    outputs = torch.mm(weight, inputs.reshape(n_rows, -1).t()).t().contiguous()
    if bias is not None:
        outputs += bias
    return outputs.view(*inputs.shape[:-1], -1)


@lru_cache
def other_way_is_quicker(n_threads: int) -> bool:  # noqa: ARG001  # another number, another answer
    """Whether `linear` beats torch's on this CPU by a tenth, with 4 rows and 64 MiB of weights.

    Takes about a tenth of a second, once for each number of threads.
    """
    inputs, weight = torch.ones(4, 1024), torch.ones(16384, 1024)

    def seconds(multiply: Callable[[Tensor, Tensor], Tensor]) -> float:
        start = time.perf_counter()
        multiply(inputs, weight)
        return time.perf_counter() - start

    rounds = [(seconds(linear), seconds(nn.functional.linear)) for _ in range(4)]
    ours, torchs = (min(times[1:]) for times in zip(*rounds, strict=True))
    return ours < 0.9 * torchs


@contextmanager
def quick_few_rows(*models: nn.Module) -> Iterator[None]:
    """Let the models' linear layers use `linear` while this lasts, where it is the quicker way.

    Layers on other devices, of other types, and all whose forward somebody else has replaced
    (hooks of accelerate, `torch.compile`) are left as they are.
    """
    layers = _layers_to_replace(models)
    try:
        for layer in layers:
            layer.forward = MethodType(_forward, layer)
        yield
    finally:
        for layer in layers:  # of two calls at once, the first one to end takes it off
            vars(layer).pop("forward", None)


def rows_the_other_way(*models: nn.Module) -> list[int]:
    """Of how many rows `quick_few_rows` has these models multiply the other way; none if empty."""
    return list(FEW_ROWS) if _layers_to_replace(models) else []


def _layers_to_replace(models: Iterable[nn.Module]) -> list[nn.Module]:
    own = [model for model in models if not _is_replaced(model)]
    layers = [layer for model in own for layer in model.modules() if _is_plain(layer)]
    return layers if layers and other_way_is_quicker(torch.get_num_threads()) else []


def _is_plain(layer: nn.Module) -> bool:
    return (
        type(layer) is nn.Linear
        and not _is_replaced(layer)
        and layer.weight.device.type == "cpu"
        and layer.weight.dtype == torch.float32
    )


def _is_replaced(module: nn.Module) -> bool:
    return "forward" in vars(module) or module._compiled_call_impl is not None


def _forward(layer: nn.Linear, inputs: Tensor) -> Tensor:
    return linear(inputs, layer.weight, layer.bias)
