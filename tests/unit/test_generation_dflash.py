"""The way into `generate`: what is refused before any work, and what stays as it was."""

import functools
import inspect
import json
import subprocess
import sys
import textwrap

import pytest
import torch
from transformers import (
    AutoModel,
    DynamicCache,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    GenerationConfig,
    GenerationMixin,
    JambaConfig,
    JambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from checks import assert_equal_to_plain, mixed, prompt
from hf_dflash import DFlashDraftModel, generation_dflash
from hf_dflash.generation_dflash import drafting_policy, install_dispatch, remove_dispatch
from hf_dflash.outputs_dflash import CACHE_NAME
from pairs import ScriptedDrafter, random_drafter, tiny_target
from refused_targets import tiny_mamba, tiny_qwen3_next

METHODS = ("_assisted_decoding", "_validate_generation_mode")


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def drafter(target):
    return random_drafter(target)


def assert_refused(target, drafter, error, match, input_ids=None, **call):
    """The call raises before any forward and leaves the target as it was."""
    before = dict(vars(target))
    forwards = []
    hooks = [
        module.register_forward_pre_hook(lambda *_: forwards.append(1))
        for module in (target, drafter)
    ]
    ids = prompt(5) if input_ids is None else input_ids
    with pytest.raises(error, match=match):
        target.generate(ids, assistant_model=drafter, **{"max_new_tokens": 6, **call})
    for hook in hooks:
        hook.remove()
    assert forwards == []
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in target.modules())
    assert vars(target) == before


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        ({"num_return_sequences": 2, "do_sample": True}, NotImplementedError, "num_return_seq"),
        ({"num_beams": 2}, NotImplementedError, "`num_beams`=2.*num_beams=1"),
        ({"num_beams": 2, "do_sample": True}, NotImplementedError, "`num_beams`=2"),
        ({"use_cache": False}, ValueError, "`use_cache` must be True"),
        ({"assistant_tokenizer": object()}, ValueError, "`assistant_tokenizer` has no meaning"),
        ({"prompt_lookup_num_tokens": 3}, ValueError, "`prompt_lookup_num_tokens` has no meaning"),
        ({"assistant_early_exit": 2}, ValueError, "`assistant_early_exit` has no meaning"),
        ({"use_mtp": True}, ValueError, "`use_mtp` has no meaning"),
        ({"dola_layers": "low"}, ValueError, "`dola_layers` has no meaning"),
        ({"target_lookbehind": 5}, ValueError, "`target_lookbehind` has no meaning"),
        ({"max_matching_ngram_size": 2}, ValueError, "`max_matching_ngram_size` has no meaning"),
        ({"assistant_ensemble_weight": 0.5}, ValueError, "`assistant_ensemble_weight` changes"),
        ({"speculation_type": "eagle"}, ValueError, "`speculation_type` must be.*got 'eagle'"),
        ({"synced_gpus": True}, NotImplementedError, "`synced_gpus`.*ZeRO-3"),
        ({"num_assistant_tokens": 0}, ValueError, r"`num_assistant_tokens` must be in 1\.\.7.*0"),
        ({"num_assistant_tokens": 8}, ValueError, r"`num_assistant_tokens` must be in 1\.\.7.*8"),
        ({"num_assistant_tokens": 2.5}, ValueError, "`num_assistant_tokens` must be"),
        ({"num_assistant_tokens": "4"}, ValueError, "`num_assistant_tokens` must be"),
        ({"assistant_confidence_threshold": 1.5}, ValueError, "`assistant_confidence_threshold`"),
        ({"assistant_confidence_threshold": -0.1}, ValueError, "`assistant_confidence_threshold`"),
        ({"assistant_confidence_threshold": float("nan")}, ValueError, "confidence_threshold`"),
        ({"num_assistant_tokens_schedule": "heuristic"}, NotImplementedError, "_schedule` must"),
        ({"unknown_option": 3}, ValueError, "unknown_option"),
    ],
)
def test_calls_that_are_refused(target, drafter, call, error, match):
    assert_refused(target, drafter, error, match, **call)


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("target_layer_ids", [2, 2], "`target_layer_ids` must be distinct"),
        ("mask_token_id", None, "`mask_token_id` is missing"),
    ],
)
def test_a_config_spoilt_after_loading_is_refused(target, field, value, match):
    drafter = random_drafter(target)
    setattr(drafter.config, field, value)
    assert_refused(target, drafter, ValueError, match)


def test_the_stock_loop_is_refused_where_it_would_ignore_the_policy(target, drafter):
    refused = {"speculation_type": "dflash", "num_assistant_tokens": 3}
    assert_refused(target, drafter, ValueError, "`speculation_type`='dflash' asks.*=3", **refused)


def test_the_stock_loop_is_refused_with_a_cache_of_an_earlier_call():
    """It would take it and emit wrong tokens; this package's own loop takes it and is right."""
    target = tiny_target()  # on which that loop leaves hooks
    stock = {
        "assistant_model": random_drafter(target),
        "speculation_type": "dflash",
        "do_sample": False,
    }
    cache = DynamicCache(config=target.config)
    ids = target.generate(prompt(5), **stock, **{CACHE_NAME: cache}, max_new_tokens=6)
    n_kept = cache.get_seq_length()
    assert n_kept > 0, "a new cache is fine"
    message = "`speculation_type`='dflash' asks.*with a cache of an earlier call. Leave `spec"
    ids = torch.cat([ids, prompt(3)], dim=1)
    with pytest.raises(NotImplementedError, match=message):
        target.generate(ids, **stock, **{CACHE_NAME: cache}, max_new_tokens=6)
    assert cache.get_seq_length() == n_kept


def test_batch_is_refused(target, drafter):
    ids = torch.cat([prompt(5), prompt(5, seed=1)])
    assert_refused(target, drafter, NotImplementedError, "batch of 2.*once a prompt", ids)


@pytest.mark.parametrize(
    ("option", "value", "error", "match"),
    [
        ("num_assistant_tokens", 9, ValueError, "`num_assistant_tokens` must be in"),
        ("assistant_confidence_threshold", 2, ValueError, "`assistant_confidence_threshold` must"),
        ("temperature", -1.0, ValueError, "`temperature` of the drafter"),
        ("num_assistant_tokens_schedule", "heuristic", NotImplementedError, "_schedule` must"),
        ("draft_tree_nodes", 16, NotImplementedError, "`draft_tree_nodes` must be 0"),
        ("top_p", 0.9, ValueError, r"\['top_p'\].*mean nothing to a drafter"),
        ("num_drafts", 3, ValueError, r"\['num_drafts'\].*mean nothing to a drafter"),
    ],
)
def test_policies_of_the_drafter_that_are_refused(target, option, value, error, match):
    drafter = random_drafter(target)
    setattr(drafter.generation_config, option, value)
    assert_refused(target, drafter, error, match)
    drafter.generation_config = GenerationConfig()
    assert torch.equal(
        target.generate(prompt(5), assistant_model=drafter, max_new_tokens=6),
        target.generate(prompt(5), max_new_tokens=6),
    )


@pytest.mark.parametrize("speculation", [None, "dflash"])
@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ({"vocab_size": 128}, "`vocab_size` is 96, this Qwen3ForCausalLM has 128"),
        ({"hidden_size": 48}, "`target_hidden_size` is 32, this Qwen3ForCausalLM has 48"),
        ({"num_hidden_layers": 6}, "`num_target_layers` is 4, this Qwen3ForCausalLM has 6"),
    ],
)
def test_drafter_of_another_target(drafter, overrides, match, speculation):
    call = {} if speculation is None else {"speculation_type": speculation}
    other = tiny_target(**overrides)
    assert_refused(other, drafter, ValueError, f"made for another target.*{match}", **call)


def test_drafter_that_does_not_say_how_deep_its_target_is():
    """Its layer ids still tell."""
    drafter = random_drafter(tiny_target(), target_layer_ids=[0, 3], num_target_layers=None)
    other = tiny_target(num_hidden_layers=3)
    assert_refused(other, drafter, ValueError, r"`target_layer_ids`.*\(0\.\.2\), got \[0, 3\]")


def test_mask_token_outside_the_embedding():
    target = tiny_target()
    drafter = random_drafter(target)
    drafter.config.mask_token_id = 96
    assert_refused(target, drafter, ValueError, r"`mask_token_id` must be in \[0, 95\], got 96")


def test_drafter_of_another_width(target):
    other = random_drafter(target)
    other.config.hidden_size = 48
    assert_refused(target, other, ValueError, "`hidden_size` 48 is not the width.*32")


def tiny_t5():
    config = T5Config(
        vocab_size=96,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config).eval()


def tiny_jamba():
    config = JambaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        use_mamba_kernels=False,
    )
    return JambaForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (tiny_t5, "encoder-decoder target.*plain generate"),
        (tiny_mamba, "MambaForCausalLM, whose recurrent state.*plain generate"),
        (tiny_jamba, "JambaForCausalLM, whose recurrent state"),
        (tiny_qwen3_next, "Qwen3NextForCausalLM, whose recurrent state"),
    ],
)
def test_targets_that_are_refused(drafter, make, match):
    assert_refused(make(), drafter, NotImplementedError, match)


def test_recurrent_target_whose_class_does_not_say_so():
    """Remote code: it shows in the cache, after the prompt and before any draft."""
    target = tiny_qwen3_next()
    plain = target.generate(prompt(5), max_new_tokens=6)
    drafter = random_drafter(target)
    target._is_stateful = False
    with pytest.raises(NotImplementedError, match=r"keeps a recurrent state.*plain generate"):
        target.generate(prompt(5), assistant_model=drafter, max_new_tokens=6)
    assert not any(m._forward_hooks for m in target.modules())
    assert torch.equal(target.generate(prompt(5), max_new_tokens=6), plain)


def test_target_of_several_residual_streams():
    """Gemma 3n: its layers return a stack of states, and no drafter reads those."""
    config = Gemma3nTextConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=0,
        vocab_size_per_layer_input=96,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 4,
    )
    target = Gemma3nForCausalLM(config).eval()
    drafter = random_drafter(target)
    with pytest.raises(NotImplementedError, match=r"width\) to be tapped, got \(2, 1, 5, 32\)"):
        target.generate(prompt(5), assistant_model=drafter, max_new_tokens=6)
    assert not any(m._forward_hooks for m in target.modules())


def test_target_without_a_cache_object(target, drafter, monkeypatch):
    monkeypatch.setattr(
        type(target), "_supports_default_dynamic_cache", classmethod(lambda _: False)
    )
    assert_refused(target, drafter, NotImplementedError, "without a cache object.*plain generate")


def test_target_that_supports_only_other_modes(target, drafter, monkeypatch):
    monkeypatch.setattr(type(target), "_supported_generation_modes", ["sample"], raising=False)
    assert_refused(target, drafter, ValueError, r"supports only \['sample'\]")


def test_random_model_built_from_a_drafters_folder(target, drafter, tmp_path, capfd):
    drafter.save_pretrained(tmp_path)
    misloaded = AutoModel.from_pretrained(tmp_path)
    assert type(misloaded).__name__ == "Qwen3Model"
    capfd.readouterr()  # its load report
    assert_refused(target, misloaded, TypeError, "random weights.*trust_remote_code=True")
    plain = target.generate(prompt(5), max_new_tokens=6)
    loaded = DFlashDraftModel.from_pretrained(tmp_path)
    assert torch.equal(target.generate(prompt(5), max_new_tokens=6, assistant_model=loaded), plain)


def test_a_folder_without_code_is_said_to_need_it(target, drafter, tmp_path, capfd):
    """Formats for serving engines have none, and `trust_remote_code` finds nothing to trust."""
    drafter.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["auto_map"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    misloaded = AutoModel.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(misloaded).__name__ == "Qwen3Model"
    capfd.readouterr()  # its load report
    assert_refused(target, misloaded, TypeError, "if the folder holds its code, with AutoModel")


def test_decoding_works_after_a_refusal(target, drafter):
    assert_refused(target, drafter, NotImplementedError, "num_beams", num_beams=3)
    assert_equal_to_plain(target, prompt(5), max_new_tokens=24)


def test_forward_gets_what_plain_decoding_gives_it(target, drafter):
    names = []
    hook = target.register_forward_pre_hook(
        lambda _m, _a, kwargs: names.append(set(kwargs)), with_kwargs=True
    )
    target.generate(prompt(5), max_new_tokens=6)
    plain, names[:] = list(names), []
    target.generate(prompt(5), max_new_tokens=6, assistant_model=drafter)
    hook.remove()
    assert names[0] == plain[0]
    assert names[1] == plain[1]


def test_policy_of_the_call_goes_before_the_drafters(target):
    drafter = random_drafter(target)
    policy = drafting_policy(drafter, GenerationConfig())
    assert (policy.n_drafts, policy.confidence_threshold, policy.temperature) == (7, None, None)
    drafter.generation_config.num_assistant_tokens = 3
    drafter.generation_config.assistant_confidence_threshold = 0.2
    drafter.generation_config.temperature = 0.0
    policy = drafting_policy(drafter, GenerationConfig())
    assert (policy.n_drafts, policy.confidence_threshold, policy.temperature) == (3, 0.2, 0.0)
    call = GenerationConfig(num_assistant_tokens=5, assistant_confidence_threshold=0.9)
    policy = drafting_policy(drafter, call)
    assert (policy.n_drafts, policy.confidence_threshold, policy.temperature) == (5, 0.9, 0.0)
    assert drafter.generation_config.num_assistant_tokens == 3


def test_transformers_defaults_say_nothing(target):
    """`generate` fills them in: they cannot be told from options left out."""
    drafter = random_drafter(target)
    call = GenerationConfig(**GenerationConfig._get_default_generation_params())
    assert drafting_policy(drafter, call) == drafting_policy(drafter, GenerationConfig())


def test_other_calls_go_to_transformers(target, drafter):
    """Classic assistants, prompt lookup and plain calls are what they are without the dispatch."""
    assistant = tiny_target(seed=5, num_hidden_layers=2)
    calls = [
        {},
        {"do_sample": True},
        {"num_beams": 2},
        {"assistant_model": assistant},
        {"assistant_model": assistant, "num_assistant_tokens": 3},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_model": drafter, "speculation_type": "dflash"},
    ]

    def outputs():
        results = []
        for call in calls:
            torch.manual_seed(0)
            results.append(target.generate(prompt(5), max_new_tokens=12, **call).tolist())
        return results

    with_dispatch = outputs()
    remove_dispatch()
    try:
        assert outputs() == with_dispatch
        with pytest.raises(ValueError, match="batch_size = 1"):
            target.generate(
                torch.cat([prompt(5), prompt(5)]), max_new_tokens=6, assistant_model=assistant
            )
    finally:
        install_dispatch()
    with pytest.raises(ValueError, match="batch_size = 1"):
        target.generate(
            torch.cat([prompt(5), prompt(5)]), max_new_tokens=6, assistant_model=assistant
        )


def methods():
    return [getattr(GenerationMixin, name) for name in METHODS]


def test_dispatch_installs_once_and_can_be_removed(target):
    installed = methods()
    install_dispatch()
    random_drafter(target)
    assert methods() == installed
    remove_dispatch()
    originals = methods()
    assert originals == [m.__wrapped__ for m in installed]
    assert all(m.__module__ == "transformers.generation.utils" for m in originals)
    remove_dispatch()
    assert methods() == originals
    install_dispatch()
    assert [m.__wrapped__ for m in methods()] == originals
    assert_equal_to_plain(target, prompt(5), max_new_tokens=24)


def test_newer_dispatch_replaces_an_older_one_and_not_the_other_way(monkeypatch):
    originals = [m.__wrapped__ for m in methods()]
    ours = methods()
    monkeypatch.setattr(
        generation_dflash, "DISPATCH_VERSION", generation_dflash.DISPATCH_VERSION + 1
    )
    install_dispatch()
    newer = methods()
    assert all(a is not b for a, b in zip(ours, newer, strict=True))
    assert [m.__wrapped__ for m in newer] == originals
    monkeypatch.undo()
    install_dispatch()
    assert methods() == newer
    remove_dispatch()
    assert methods() == originals
    install_dispatch()


def test_removal_under_somebody_elses_wrapper():
    ours = GenerationMixin._assisted_decoding
    original = ours.__wrapped__

    @functools.wraps(ours)
    def theirs(*args, **kwargs):
        return ours(*args, **kwargs)

    GenerationMixin._assisted_decoding = theirs
    install_dispatch()
    assert GenerationMixin._assisted_decoding is theirs
    remove_dispatch()
    assert GenerationMixin._assisted_decoding is original
    install_dispatch()


def test_signature_that_generate_inspects_is_kept():
    for method in methods():
        assert inspect.signature(method) == inspect.signature(method.__wrapped__)
    assert "inputs_tensor" in inspect.signature(GenerationMixin._assisted_decoding).parameters


def test_importing_the_package_changes_nothing():
    script = """
        from transformers import GenerationMixin
        before = GenerationMixin._assisted_decoding, GenerationMixin._validate_generation_mode
        import hf_dflash
        from hf_dflash import DFlashConfig, DFlashDraftModel, DFlashCandidateGenerator
        after = GenerationMixin._assisted_decoding, GenerationMixin._validate_generation_mode
        assert before == after
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


def test_error_inside_decoding_leaves_no_hook():
    target = tiny_target()
    plain = target.generate(prompt(5), max_new_tokens=12)
    for at in (1, 4, 8):
        calls = []

        def criterion(ids, _scores, calls=calls, at=at, **_):
            calls.append(ids)
            if len(calls) == at:
                raise RuntimeError("client gone")
            return torch.zeros(1, dtype=torch.bool)

        drafter = ScriptedDrafter(target, plain[0].tolist(), mixed)
        with pytest.raises(RuntimeError, match="client gone"):
            target.generate(
                prompt(5), max_new_tokens=12, assistant_model=drafter, stopping_criteria=[criterion]
            )
        assert not any(m._forward_hooks for m in target.modules())
    assert torch.equal(target.generate(prompt(5), max_new_tokens=12), plain)


def test_config_of_the_drafter_is_not_changed(target, drafter):
    before = drafter.config.to_dict(), drafter.generation_config.to_dict()
    target_before = target.config.to_dict(), target.generation_config.to_dict()
    target.generate(prompt(5), max_new_tokens=12, assistant_model=drafter, num_assistant_tokens=3)
    assert (drafter.config.to_dict(), drafter.generation_config.to_dict()) == before
    assert (target.config.to_dict(), target.generation_config.to_dict()) == target_before
