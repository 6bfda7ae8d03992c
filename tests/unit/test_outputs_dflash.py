"""Statistics and records on their own, without a model."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_dflash.outputs_dflash import (
    CACHE_NAME,
    DecodingStatistics,
    DFlashGenerateOutput,
    StepRecords,
)


def test_statistics():
    statistics = DecodingStatistics(n_accepted=[3, 0, 7], n_drafted=[7, 7, 7])
    assert statistics.n_cycles == 3
    assert statistics.acceptance_length == pytest.approx(13 / 3)


def test_statistics_without_a_cycle():
    assert DecodingStatistics().n_cycles == 0
    assert math.isnan(DecodingStatistics().acceptance_length)


def test_statistics_share_nothing():
    DecodingStatistics().n_accepted.append(1)
    assert DecodingStatistics().n_accepted == []


def test_cache_has_the_name_that_transformers_gives_it():
    assert CACHE_NAME in GenerateDecoderOnlyOutput.__dataclass_fields__
    assert CACHE_NAME in ("cache", "past_key_values")


def records(**asked):
    return StepRecords(GenerationConfig(return_dict_in_generate=True, **asked))


def test_nothing_is_recorded_unless_asked_for():
    empty = records()
    empty.add_row(torch.zeros(1, 4), torch.zeros(1, 4))
    empty.add_prompt(SimpleNamespace(attentions=None, hidden_states=None))
    empty.add_block(SimpleNamespace(attentions=None, hidden_states=None), 3, None)
    assert not empty.wants_rows
    assert empty.scores is None
    output = empty.output(torch.zeros(1, 3), None, DecodingStatistics())
    assert set(output.keys()) == {"sequences", "statistics"}


def test_nothing_is_recorded_without_a_dict():
    """As in plain decoding: criteria then get no scores."""
    config = GenerationConfig(return_dict_in_generate=False)
    config.output_scores = True
    assert StepRecords(config).scores is None
    assert not StepRecords(config).returns_dict


def test_rows():
    both = records(output_scores=True, output_logits=True)
    assert both.wants_rows
    for i in range(3):
        both.add_row(torch.full((1, 4), float(i)), torch.full((1, 4), float(-i)))
    assert [float(row[0, 0]) for row in both.scores] == [0, -1, -2]
    output = both.output(torch.zeros(1, 3), "the cache", DecodingStatistics())
    assert [float(row[0, 0]) for row in output.logits] == [0, 1, 2]
    assert output[CACHE_NAME] == "the cache"
    assert isinstance(output, DFlashGenerateOutput)


class Layer:
    """A layer's cache as far as records look at it."""

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def get_seq_length(self):
        return 0


def block(n_rows, n_keys, n_layers):
    """Attention weights that tell layer, row and key: layer * 1000 + row * 100 + key."""
    layers = torch.arange(n_layers)[:, None, None, None, None] * 1000
    rows = torch.arange(n_rows)[None, None, None, :, None] * 100
    weights = (layers + rows + torch.arange(n_keys)).expand(n_layers, 1, 2, n_rows, n_keys)
    hidden = torch.arange(n_rows, dtype=torch.float32)[None, :, None].expand(1, n_rows, 3)
    return SimpleNamespace(attentions=tuple(weights), hidden_states=(hidden, hidden + 10))


def keys(step, layer):
    """Which keys an entry shows."""
    return (step[layer][0, 0, 0] % 100).tolist()


def test_rows_of_a_block():
    """Three tokens of a block of 4 behind 6 earlier ones, seen by layers of every kind."""
    wanted = records(output_attentions=True, output_hidden_states=True)
    cache = SimpleNamespace(
        layers=[Layer(), Layer(sliding_window=4), Layer(max_cache_len=10), Layer(sliding_window=99)]
    )
    wanted.add_block(block(4, 10, 4), 3, cache)
    output = wanted.output(torch.zeros(1, 3), cache, DecodingStatistics())
    assert len(output.attentions) == len(output.hidden_states) == 3
    for row, step in enumerate(output.attentions):
        assert {w.shape[:3] for w in step} == {(1, 2, 1)}
        assert keys(step, 0) == list(range(7 + row))
        assert keys(step, 1) == list(range(7 + row))[-4:]
        assert keys(step, 2) == list(range(10))
        assert keys(step, 3) == list(range(7 + row))
        assert int(step[3][0, 0, 0, 0]) == 3000 + 100 * row
    for row, step in enumerate(output.hidden_states):
        assert [float(layer[0, 0, 0]) for layer in step] == [row, row + 10]
        assert {layer.shape for layer in step} == {(1, 1, 3)}


@pytest.mark.parametrize("placeholders", [[], [object(), object()]])
def test_layers_that_share_the_keys_of_others(placeholders):
    config = GenerationConfig(return_dict_in_generate=True, output_attentions=True)
    wanted = StepRecords(config, ["sliding", "full", "sliding", "full"])
    cache = SimpleNamespace(layers=[Layer(sliding_window=4), Layer(), *placeholders])
    wanted.add_block(block(2, 8, 4), 2, cache)
    output = wanted.output(torch.zeros(1, 3), cache, DecodingStatistics())
    for row, step in enumerate(output.attentions):
        assert [len(keys(step, i)) for i in range(4)] == [4, 7 + row, 4, 7 + row]


@pytest.mark.parametrize("weights", [(), (None, None)])
def test_attention_that_returns_no_weights(weights):
    """Plain decoding records what the model returned; so is it here."""
    wanted = records(output_attentions=True)
    cache = SimpleNamespace(layers=[Layer(), Layer()])
    outputs = SimpleNamespace(attentions=weights)
    wanted.add_prompt(outputs)
    wanted.add_block(outputs, 2, cache)
    output = wanted.output(torch.zeros(1, 3), cache, DecodingStatistics())
    assert output.attentions == (weights,) * 3


def test_a_model_that_returns_no_attentions_at_all():
    wanted = records(output_attentions=True)
    wanted.add_block(SimpleNamespace(attentions=None), 2, SimpleNamespace(layers=[Layer()]))
    output = wanted.output(torch.zeros(1, 3), None, DecodingStatistics())
    assert output.attentions == (None, None)
