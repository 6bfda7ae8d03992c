"""Few rows on a CPU: the same products, put in place for the length of a call only."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from checks import prompt
from hf_dflash import few_rows
from hf_dflash.few_rows import (
    linear,
    quick_few_rows,
    rows_quicker_the_other_way,
    rows_the_other_way,
)
from pairs import random_drafter, tiny_target


@pytest.fixture
def quicker(monkeypatch):
    """Tells for which rows the other way is quicker on this CPU."""

    def say(rows):
        monkeypatch.setattr(few_rows, "rows_quicker_the_other_way", lambda _: frozenset(rows))

    say({2, 3, 4})
    return say


def by_definition(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None):
    """Each row by itself, in float64."""
    rows = [weight.double() @ row.double() for row in inputs.flatten(0, -2)]
    outputs = torch.stack(rows).unflatten(0, inputs.shape[:-1])
    return outputs if bias is None else outputs + bias.double()


@pytest.mark.parametrize(
    "shape", [(1, 24), (1, 1, 24), (1, 3, 24), (2, 2, 24), (5, 24), (1, 9, 24)]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_outputs_are_those_of_the_definition(shape, has_bias):
    torch.manual_seed(0)
    inputs, weight = torch.randn(shape), torch.randn(40, 24)
    bias = torch.randn(40) if has_bias else None
    outputs = linear(inputs, weight, bias)
    assert outputs.is_contiguous()
    torch.testing.assert_close(
        outputs.double(), by_definition(inputs, weight, bias), rtol=1e-5, atol=1e-5
    )


def replaced(model: nn.Module) -> list[str]:
    return [name for name, layer in model.named_modules() if "forward" in vars(layer)]


@pytest.mark.usefixtures("quicker")
def test_only_plain_float32_layers_are_replaced_and_all_come_back():
    class Own(nn.Linear):
        """A layer of another type, as quantisers make them."""

    model = nn.ModuleDict(
        {
            "plain": nn.Linear(4, 4),
            "own": Own(4, 4),
            "narrow": nn.Linear(4, 4, dtype=torch.bfloat16),
            "elsewhere": nn.Linear(4, 4, device="meta"),
            "hooked": nn.Linear(4, 4),
        }
    )
    hook = model["hooked"].forward = lambda inputs: inputs

    def interrupted():
        with quick_few_rows(model):
            assert replaced(model) == ["plain", "hooked"]
            assert model["hooked"].forward is hook
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        interrupted()
    assert replaced(model) == ["hooked"]


class QuantisedWeight(torch.Tensor):
    """Of a linear layer of torchao: it knows `linear`, and not the products that it is made of."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.mm:
            raise NotImplementedError("mm")
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.usefixtures("quicker")
def test_a_layer_with_a_quantised_weight_is_left_as_it_is():
    layer = nn.Linear(4, 4)
    weight = layer.weight.detach().as_subclass(QuantisedWeight)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    assert type(layer.weight) is QuantisedWeight
    model, inputs = nn.Sequential(nn.Linear(4, 4), layer), torch.randn(3, 4)
    expected = model(inputs)
    with quick_few_rows(model):
        assert ["forward" in vars(layer) for layer in model] == [True, False]
        torch.testing.assert_close(torch.Tensor(model(inputs)), torch.Tensor(expected))


@pytest.mark.usefixtures("quicker")
@pytest.mark.parametrize("way", ["forward", "call"])
def test_a_compiled_model_is_left_as_it_is(way):
    """Another forward in one of its layers would have it compiled again at every call."""
    model = nn.Sequential(nn.Linear(4, 4))
    if way == "forward":
        model.forward = torch.compile(model.forward, backend="eager")
    else:
        model.compile(backend="eager")
    with quick_few_rows(model):
        assert "forward" not in vars(model[0])


@pytest.mark.usefixtures("quicker")
def test_forward_hooks_still_see_the_layer():
    model, seen = nn.Sequential(nn.Linear(4, 4)), []
    model[0].register_forward_hook(lambda _, __, output: seen.append(output.shape))
    with quick_few_rows(model):
        model(torch.randn(1, 3, 4))
    assert seen == [(1, 3, 4)]


@pytest.mark.usefixtures("quicker")
def test_decoding_uses_it_for_blocks_and_leaves_nothing_behind():
    target = tiny_target()
    drafter = random_drafter(target)
    seen = {}

    def look(_, __, output):
        seen.setdefault(output.logits.shape[1], replaced(target))

    hook = target.register_forward_hook(look)
    target.generate(prompt(9), assistant_model=drafter, num_assistant_tokens=3, max_new_tokens=12)
    hook.remove()
    assert seen[1] == []  # the prompt, of which one row of logits is kept
    assert {"lm_head", "model.layers.3.mlp.down_proj"} <= set(seen[4])
    assert replaced(target) == replaced(drafter) == []


def test_where_it_is_slower_nothing_is_replaced(quicker):
    model = nn.Sequential(nn.Linear(4, 4))
    assert rows_the_other_way(model) == [2, 3, 4]
    quicker(())
    assert rows_the_other_way(model) == []
    with quick_few_rows(model):
        assert replaced(model) == []


def test_each_number_of_rows_goes_its_quicker_way(quicker, monkeypatch):
    quicker({3, 8})
    model, seen = nn.Sequential(nn.Linear(4, 4)), []

    def spy(inputs, *rest):
        seen.append(inputs.shape[-2])
        return linear(inputs, *rest)

    monkeypatch.setattr(few_rows, "linear", spy)
    with quick_few_rows(model):
        for n_rows in range(1, 10):
            model(torch.ones(1, n_rows, 4))
    assert seen == [3, 8]


def test_without_a_layer_that_it_is_for_nothing_is_timed(monkeypatch):
    monkeypatch.setattr(few_rows, "rows_quicker_the_other_way", lambda _: pytest.fail("timed"))
    assert rows_the_other_way(nn.Linear(4, 4, dtype=torch.bfloat16)) == []


def test_the_quicker_way_is_found_by_the_clock(monkeypatch):
    """Ours and torch's by turns, each between two looks at a clock that is told what to say."""
    now, ours_s = [0.0], {2: 1.0, 3: 1.9, 4: 0.5, 5: 1.7, 6: 2.5, 7: 2.0, 8: 1.0}  # torch: 2
    steps = iter([step for n_rows in range(2, 9) for step in [0, ours_s[n_rows], 0, 2.0] * 4])

    def clock():
        now[0] += next(steps)
        return now[0]

    monkeypatch.setattr(few_rows.time, "perf_counter", clock)
    assert rows_quicker_the_other_way.__wrapped__(1) == {2, 4, 5, 8}


def test_threads_that_decode_at_once_do_not_change_each_other(quicker, monkeypatch):
    """Each multiplies the other way from its own start to its own end, and no other does."""
    quicker({3})
    model, seen = nn.Sequential(nn.Linear(4, 4)), []

    def spy(inputs, *rest):
        seen.append(threading.current_thread().name)
        return linear(inputs, *rest)

    monkeypatch.setattr(few_rows, "linear", spy)
    steps = [threading.Barrier(2) for _ in range(4)]

    def other():
        steps[0].wait(timeout=60)
        model(torch.ones(3, 4))  # not inside, though the layer is replaced
        with quick_few_rows(model):
            steps[1].wait(timeout=60)
            steps[2].wait(timeout=60)  # the first one has ended
            model(torch.ones(3, 4))
        steps[3].wait(timeout=60)

    thread = threading.Thread(target=other, name="other")
    thread.start()
    with quick_few_rows(model):
        steps[0].wait(timeout=60)
        steps[1].wait(timeout=60)
        model(torch.ones(3, 4))
    steps[2].wait(timeout=60)
    steps[3].wait(timeout=60)
    thread.join()
    assert seen == ["MainThread", "other"]
    assert replaced(model) == []
