"""Linear layers over the few rows of a block, in float32 on a CPU.

The library behind `torch.nn.functional.linear` takes a block of 2 to 5 rows much slower than one
row, though the weights, which are all that has to be read, are the same. With the operands
exchanged, W Xᵀ in place of X Wᵀ, it does not: `benchmarks/few_rows.py` compares the two. Plain
decoding, one row a forward, gains nothing from this; a long prompt loses by it.

Letters: S rows, I and O a layer's input and output sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
    if inputs[..., 0].numel() not in FEW_ROWS:
        return nn.functional.linear(inputs, weight, bias)
    outputs = (weight @ inputs.flatten(0, -2).T).T.contiguous()
    if bias is not None:
        outputs += bias
    return outputs.unflatten(0, inputs.shape[:-1])


@contextmanager
def quick_few_rows(*models: nn.Module) -> Iterator[None]:
    """Let the models' linear layers use `linear` while this lasts.

    Layers on other devices, of other types, and all whose forward somebody else has replaced
    (hooks of accelerate, `torch.compile`) are left as they are.
    """
    own = [model for model in models if not _is_replaced(model)]
    layers = [layer for model in own for layer in model.modules() if _is_plain(layer)]
    try:
        for layer in layers:
            layer.forward = MethodType(_forward, layer)
        yield
    finally:
        for layer in layers:  # of two calls at once, the first one to end takes it off
            vars(layer).pop("forward", None)


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
