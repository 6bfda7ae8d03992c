"""Streamers get every token once and in order, and learn when it is over."""

import threading

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

from checks import assert_drafts_mattered, assert_equal_to_plain, mixed, prompt
from pairs import ScriptedDrafter, tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def tokenizer():
    model = Tokenizer(models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    model.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=model)


class Recorder(BaseStreamer):
    """Writes down what it gets."""

    def __init__(self):
        self.calls = []

    def put(self, value):
        assert value.device.type == "cpu"
        self.calls.append((tuple(value.shape), value.flatten().tolist()))

    def end(self):
        self.calls.append("end")


class CycleRecorder(Recorder):
    """Asks for whole cycles."""

    def __init__(self):
        super().__init__()
        self.cycles = []

    def put_cycle(self, token_ids, n_accepted):
        assert token_ids.dim() == 1
        assert token_ids.device.type == "cpu"
        self.cycles.append((token_ids.tolist(), n_accepted))


def record_both(target, make=Recorder, **kwargs):
    recorders = []

    def fresh():
        recorders.append(make())
        return {"streamer": recorders[-1]}

    call = {"max_new_tokens": 30, **kwargs}
    return assert_equal_to_plain(target, prompt(5), fresh=fresh, **call), recorders


def test_each_token_once_as_in_plain_decoding(target):
    _, (plain, drafted) = record_both(target)
    assert drafted.calls == plain.calls
    assert drafted.calls[0] == ((1, 5), prompt(5)[0].tolist())
    assert [shape for shape, _ in drafted.calls[1:-1]] == [(1,)] * 30
    assert drafted.calls.count("end") == 1


def test_nothing_after_a_stop(target):
    ids = target.generate(prompt(5), max_new_tokens=30)[0].tolist()
    end_token = next(t for i, t in enumerate(ids) if i > 17 and t not in ids[5:i])
    _, (plain, drafted) = record_both(target, eos_token_id=end_token, pad_token_id=0)
    assert drafted.calls == plain.calls
    assert drafted.calls[-2] == ((1,), [end_token])


def test_token_by_token_choice_streams_the_same(target):
    """With processors tokens are chosen one by one inside a cycle."""
    _, (plain, drafted) = record_both(target, repetition_penalty=1.3)
    assert drafted.calls == plain.calls


def test_whole_cycles(target):
    output, (_, drafted) = record_both(target, CycleRecorder)
    assert drafted.calls == [((1, 5), prompt(5)[0].tolist()), "end"]
    (first, n_accepted), *cycles = drafted.cycles
    assert (len(first), n_accepted) == (1, 0)
    assert [n for _, n in cycles] == output.statistics.n_accepted
    assert all(len(ids) == n + 1 for ids, n in cycles)
    assert [i for ids, _ in drafted.cycles for i in ids] == output.sequences[0, 5:].tolist()


def test_text_streamer_prints_the_same(target, tokenizer, capsys):
    texts = []

    def fresh():
        texts.append(capsys.readouterr().out)
        return {"streamer": TextStreamer(tokenizer, skip_prompt=True)}

    assert_equal_to_plain(target, prompt(5), fresh=fresh, max_new_tokens=30)
    texts.append(capsys.readouterr().out)
    before, plain, drafted = texts
    assert before == ""
    assert plain == drafted
    assert plain.count("w") == 30


def test_text_iterator_streamer_in_a_thread(target, tokenizer):
    ids = target.generate(prompt(5), max_new_tokens=30)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    drafter = ScriptedDrafter(target, ids[0].tolist(), mixed)
    outputs = []

    def decode():
        outputs.append(
            target.generate(
                prompt(5),
                max_new_tokens=30,
                assistant_model=drafter,
                streamer=streamer,
                return_dict_in_generate=True,
            )
        )

    thread = threading.Thread(target=decode)
    thread.start()
    text = "".join(streamer)  # ends only because `end` is called
    thread.join()
    assert text == tokenizer.decode(ids[0, 5:])
    assert_drafts_mattered(outputs, 5)


def test_two_threads_decode_with_one_target(target):
    """Each thread taps its own forwards: the drafter's context is that of its own prompt."""
    prompts = [prompt(6, seed=1), prompt(11, seed=2)]
    scripts = [target.generate(ids, max_new_tokens=30) for ids in prompts]
    drafters = [ScriptedDrafter(target, ids[0].tolist(), mixed) for ids in scripts]
    gate = threading.Barrier(2)
    contexts, outputs = [[], []], [None, None]
    for drafter, rows in zip(drafters, contexts, strict=True):
        drafter.register_forward_pre_hook(
            lambda _m, _a, kwargs, rows=rows: rows.append(
                kwargs["context_hidden_states"].flatten().tolist()
            ),
            with_kwargs=True,
        )

    def decode(i):
        gate.wait(timeout=60)
        outputs[i] = target.generate(
            prompts[i],
            max_new_tokens=30,
            assistant_model=drafters[i],
            return_dict_in_generate=True,
        )

    threads = [threading.Thread(target=decode, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        assert torch.equal(outputs[i].sequences, scripts[i])
        assert_drafts_mattered([outputs[i]], prompts[i].shape[1])
        together, contexts[i][:] = list(contexts[i]), []
        drafters[i].n_calls = 0
        target.generate(prompts[i], max_new_tokens=30, assistant_model=drafters[i])
        assert together == contexts[i]
    assert not any(m._forward_hooks for m in target.modules())
