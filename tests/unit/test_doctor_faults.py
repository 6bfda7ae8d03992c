"""Planted faults: one folder, one fault, and the finding that names the engine and the reason."""

import re

import pytest
import torch

import published_folders as folders
from hf_dflash.doctor import as_dict, examine
from hf_dflash.doctor_facts import ENGINES, FAULT
from planted import (
    FULL,
    NESTED,
    SLIDING,
    cast,
    config,
    file,
    native,
    nested,
    ours,
    prefix,
    published,
    remove,
    speculators,
    tensors,
    truncate,
)


def unreadable_and_incomplete(folder):
    folders.edit_config(ours(folder), block_size="8", dflash_config={**NESTED, "block_size": "8"})
    names = ("norm.weight", "layers.1.mlp.up_proj.weight")
    folders.edit_tensors(folder, lambda content: [content.pop(name) for name in names])


FAULTS = [
    # files
    ("truncated weights", truncate, ENGINES[2:5], "weights", "truncated or is not a safetensors"),
    ("no weights", remove("model.safetensors"), ["hf-dflash"], "weights", "has no model.safetens"),
    (
        "code missing",
        remove("modeling_dflash.py"),
        ["trust_remote_code"],
        "auto_map",
        "points to m",
    ),
    ("part of the code", remove("rope_dflash.py"), ["trust_remote_code"], "rope", "imports rope_d"),
    (
        "mask embedding",
        file("mask_embedding.pt", ""),
        ["hf-dflash", "llama.cpp"],
        "mask_",
        "is not",
    ),
    ("card of vLLM", file("README.md", '"num_speculative_tokens": 8'), ["vllm"], "README", "B - 1"),
    (
        "card of SGLang",
        file("README.md", "--speculative-num-draft-tokens 7"),
        ["sglang"],
        "README",
        "the anchor included",
    ),
    (
        "too many drafts",
        file("generation_config.json", '{"num_assistant_tokens": 8}'),
        ["hf-dflash"],
        "num_assistant_tokens",
        "8 drafts a cycle, but a block of 8 has 7",
    ),
    # taps
    ("no taps", nested(target_layer_ids="DELETE"), ["vllm"], "target_layer", "EAGLE-3's three"),
    ("no taps, SGLang", nested(target_layer_ids="DELETE"), ["sglang"], "target_", "spread"),
    ("no taps, ours", nested(target_layer_ids="DELETE"), ["hf-dflash"], "config", "cannot be g"),
    ("a tap too few", nested(target_layer_ids=[0]), ["vllm", "sglang"], "target_", "1 taps of"),
    ("a tap too deep", nested(target_layer_ids=[0, 4]), ["sglang"], "target_", r"must lie in 0..3"),
    (
        "ids of vLLM differ",
        config(eagle_aux_hidden_state_layer_ids=[0, 2]),
        ["vllm"],
        "eagle_aux",
        r"\[0, 2\], not \[0, 2\] \+ 1",
    ),
    # mask token
    ("no mask token", nested(mask_token_id="DELETE"), ["vllm", "llama.cpp"], "mask", "no mask"),
    ("no mask, SGLang", nested(mask_token_id="DELETE"), ["sglang"], "mask", "untrained row"),
    ("mask beyond", nested(mask_token_id=96), ["vllm", "sglang"], "mask_token_id", "no row of a"),
    # windows
    (
        "window discarded",
        config(layer_types=[SLIDING] * 2, sliding_window=16),
        ["vllm", "sglang"],
        "sliding_window",
        "`use_sliding_window` is not true",
    ),
    (
        "no window",
        config(layer_types=[SLIDING] * 2, use_sliding_window=True),
        ["vllm", "sglang"],
        "sliding_window",
        "`sliding_window` is missing",
    ),
    (
        "two windows",
        config(
            **{"layer_types": [SLIDING] * 2, "sliding_window": 128, "use_sliding_window": True},
            dflash_config={**NESTED, "use_swa": True, "swa_window_size": 64},
        ),
        ["sglang"],
        "sliding_window",
        r"takes `sliding_window` \(128\), not `swa_window_size` \(64\)",
    ),
    (
        "layer types unknown",
        config(layer_types=["full", FULL]),
        ["vllm", "sglang"],
        "layer_types",
        r"\['full'\]: there are full_attention and",
    ),
    ("a type too few", config(layer_types=[FULL]), ["vllm", "sglang"], "layer_types", "1 entries"),
    ("swa of ModelOpt", published(folders.modelopt), ["sglang"], "use_swa", "full attention"),
    # causality
    (
        "causality differs",
        config(is_causal=True, dflash_config={**NESTED, "causal": False}),
        ["vllm", "sglang"],
        "is_causal",
        "differ",
    ),
    ("causal for vLLM only", nested(causal=True), ["sglang"], "is_causal", "ignores"),
    # names and tensors
    ("prefix", tensors(prefix), ["vllm", "llama.cpp"], "model.", "start with `model.`"),
    (
        "a head",
        tensors(lambda t: t.update({"lm_head.weight": torch.zeros(96, 32)})),
        ["hf-dflash", "llama.cpp"],
        "lm_head",
        "lm_head.weight",
    ),
    (
        "a reduced head",
        tensors(lambda t: t.update({"d2t": torch.zeros(8)})),
        ["sglang"],
        "d2t",
        "drops d2t without a word",
    ),
    (
        "a buffer",
        tensors(lambda t: t.update({"rotary_emb.inv_freq": torch.zeros(8)})),
        ["hf-dflash", "llama.cpp"],
        "rotary",
        "refused|cannot map",
    ),
    (
        "a scale",
        tensors(lambda t: t.update({"layers.0.mlp.up_proj.weight_scale": torch.zeros(1)})),
        ["vllm"],
        "layers.0.mlp",
        "no parameter",
    ),
    ("a norm missing", tensors(lambda t: t.pop("norm.weight")), ["sglang"], "norm", "not notice"),
    (
        "bias not said",
        tensors(
            lambda t: t.update({"layers.0.self_attn.q_proj.bias": torch.zeros(32)}),
        ),
        ["vllm"],
        "layers.0.self_attn.q_proj.bias",
        "no parameter",
    ),
    ("sizes", config(intermediate_size=48), ["vllm", "sglang"], "layers.0.mlp", "the config asks"),
    (
        "two of one",
        tensors(lambda t: t.update({"model.fc.weight": t["fc.weight"] + 1})),
        ["vllm"],
        "w",
        "Two tensors",
    ),
    (
        "DFlare called DFlash",
        lambda folder: folders.edit_config(
            ours(folder, architecture="dflare"), architectures=["DFlashDraftModel"]
        ),
        ["sglang"],
        "architectures",
        "tensors are DFlare's: SGLang drops them",
    ),
    # architecture, dtype, rope, activation
    ("class name", config(architectures=["MyDraftModel"]), ["vllm", "sglang"], "archi", "MyDraft"),
    (
        "class name, ours",
        config(architectures=["MyDraftModel"]),
        ["hf-dflash"],
        "config",
        "must be",
    ),
    ("model type", config(model_type="dflash"), ["vllm", "llama.cpp"], "model_type", "no config"),
    ("dtypes differ", config(torch_dtype="float32"), ["vllm", "hf-dflash"], "dtype", "differ"),
    ("packed", tensors(cast(torch.int8, "fc.weight")), ["hf-dflash"], "quantization", "quantised"),
    (
        "rope spellings differ",
        config(rope_theta=5.0),
        ["hf-dflash"],
        "config.json",
        "`rope_theta` .* must agree",
    ),
    ("activation", config(hidden_act="gelu"), ["vllm", "sglang"], "hidden_act", "silu only"),
    ("scaled rows", config(input_embedding_scale=8.0), ["vllm"], "input_embed", "unscaled rows"),
    ("wide taps", config(target_hidden_size=48), ["sglang"], "target_hidden", "is not read"),
    # what this package cannot read is not said to load elsewhere
    (
        "unreadable, tensors missing",
        unreadable_and_incomplete,
        ["vllm", "sglang", "llama.cpp"],
        "config.json",
        r"could not be compared: `block_size` must be an integer, got '8'",
    ),
    ("anchor", config(sample_from_anchor=True), ["vllm"], "sample_from", "vLLM stops"),
    (
        "anchor, in SGLang",
        config(sample_from_anchor=True),
        ["sglang"],
        "config",
        "could not be compared: `sample_from_anchor` = True",
    ),
    ("a size in words", config(hidden_size="32"), ["hf-dflash", "vllm"], "config", "`hidden_size`"),
    (
        "taps in words",
        nested(target_layer_ids="1,8"),
        ["vllm", "sglang"],
        "target_layer_ids",
        "`target_layer_ids` must be a list of layers, got '1,8'",
    ),
    (
        "ids in words",
        config(eagle_aux_hidden_state_layer_ids="2,9"),
        ["vllm"],
        "eagle_aux",
        "must be a list of layers, got '2,9'",
    ),
    ("types in words", config(layer_types=FULL), ["hf-dflash", "sglang"], "config", "list of na"),
    # block size
    ("block sizes differ", config(block_size=16), ["sglang", "llama.cpp"], "block_size", "16 at"),
    (
        "z-lab's code reads the top level",
        published(folders.zlab, auto_map={"AutoModel": "dflash.X"}, num_target_layers=None),
        ["trust_remote_code"],
        "num_target_layers",
        "z-lab's code",
    ),
    # speculators
    (
        "windows left to vLLM",
        speculators(
            sliding_window_non_causal=None,
            transformer_layer_config=folders.GEOMETRY
            | folders.VOCAB
            | folders.PARAMETERS
            | {"layer_types": [SLIDING] * 2, "sliding_window": 16, "use_sliding_window": True},
        ),
        ["vllm"],
        "sliding_window_non",
        "is missing: vLLM lets windows look both ways",
    ),
    ("vLLM's own fault", speculators(), ["vllm"], "sliding_window_non", "every layer causal"),
    (
        "no verifier",
        speculators(speculators_config={}),
        ["vllm", "speculators"],
        "spec",
        "must name",
    ),
    (
        "K too large",
        speculators(
            speculators_config={
                "proposal_methods": [{"speculative_tokens": 8}],
                "verifier": {"name_or_path": "org/t"},
            }
        ),
        ["vllm"],
        "speculative_tokens",
        "is 8; a block of 8 drafts 7",
    ),
    (
        "no ids",
        speculators(aux_hidden_state_layer_ids=None),
        ["speculators"],
        "config",
        "must list",
    ),
    (
        "ids in words, speculators",
        speculators(aux_hidden_state_layer_ids=["1"]),
        ["speculators", "vllm"],
        "config",
        r"must list the target's layers, each \+ 1, got \['1'\]",
    ),
    (
        "proposals in words",
        speculators(
            speculators_config={"proposal_methods": "greedy", "verifier": {"name_or_path": "org/t"}}
        ),
        ["speculators", "vllm"],
        "speculators_config",
        "must name `speculative_tokens`",
    ),
    (
        "a verifier in words",
        speculators(
            speculators_config={
                "proposal_methods": [{"speculative_tokens": 7}],
                "verifier": "org/t",
            }
        ),
        ["speculators", "vllm"],
        "speculators_config",
        "`verifier.name_or_path`",
    ),
    ("no maps", speculators(draft_vocab_size=8), ["speculators", "vllm"], "d2t", "8 rows"),
    # transformers' own class
    (
        "native names",
        native(lambda t: t.update({"fc.weight": t.pop("encoder.fc.weight")})),
        ["transformers"],
        "encoder.fc",
        "at random",
    ),
    ("native default", native(mask_token_id="DELETE"), ["transformers"], "mask", "own default"),
    ("native causal", native(is_causal=True), ["transformers"], "is_causal", "both ways"),
]


@pytest.mark.parametrize(
    ("plant", "engines", "subject", "reason"),
    [fault[1:] for fault in FAULTS],
    ids=[fault[0] for fault in FAULTS],
)
def test_a_planted_fault_is_found(plant, engines, subject, reason, tmp_path):
    folder = plant(tmp_path / "d")
    examination = examine(folder or tmp_path / "d")
    assert examination.exit_code == 1
    verdicts = {verdict.engine: verdict for verdict in examination.verdicts}
    for engine in engines:
        assert verdicts[engine].state == "faulty", as_dict(examination)["engines"][engine]
        assert any(
            re.match(subject, finding.subject) and re.search(reason, finding.reason)
            for finding in verdicts[engine].findings
            if finding.severity == FAULT and finding.remedy
        ), as_dict(examination)["engines"][engine]
