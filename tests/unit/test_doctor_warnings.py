"""What `doctor` finds of the pair, and what works but needs a look."""

import json
import re

import pytest
import torch

import published_folders as folders
from hf_dflash.doctor import examine
from hf_dflash.doctor_facts import WARNING
from pairs import tiny_target
from planted import (
    FULL,
    SLIDING,
    cast,
    config,
    file,
    native,
    nested,
    ours,
    published,
    speculators,
    tensors,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    tiny_target(eos_token_id=95).save_pretrained(folder)
    tokens = [{"id": 90, "content": "<|MASK|>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    return str(folder)


def test_the_target_s_mask_token_and_the_drafter_s_must_be_one(target, tmp_path):
    examination = examine(ours(tmp_path / "d"), target)
    found = [f for v in examination.verdicts for f in v.findings if f.subject == "mask_token_id"]
    assert any(f.engine == "sglang" and "at 90" in f.reason for f in found)
    assert any(f.severity == WARNING and "eos token" in f.reason for f in found)


@pytest.mark.parametrize(
    ("sizes", "subject", "reason"),
    [
        ({"hidden_size": 40}, "hidden_size", "`hidden_size` is 32, the target's is 40"),
        ({"vocab_size": 128}, "vocab_size", "`vocab_size` is 96, the target's is 128"),
        ({"num_hidden_layers": 6}, "num_target_layers", "is 4, the target's is 6"),
        ({"num_hidden_layers": 2}, "target_layer_ids", "but the target has 2 layers"),
    ],
)
def test_a_drafter_of_another_target_is_found(sizes, subject, reason, tmp_path):
    tiny_target(**sizes).save_pretrained(tmp_path / "target")
    examination = examine(ours(tmp_path / "d"), str(tmp_path / "target"))
    for engine in ("hf-dflash", "vllm", "sglang"):
        findings = next(v.findings for v in examination.verdicts if v.engine == engine)
        assert any(f.subject == subject and reason in f.reason for f in findings)


WARNINGS = [
    ("last tap", nested(target_layer_ids=[0, 3]), "vllm", "target_layer_ids", "last layer"),
    ("float16", tensors(cast(torch.float16)), "sglang", "dtype", "overflow"),
    ("dtype not said", tensors(cast(torch.float32)), "hf-dflash", "dtype", "says bfloat16"),
    ("flat", published(folders.flat), "vllm", "dflash_config", "top level"),
    (
        "mixed",
        config(layer_types=[SLIDING, FULL], sliding_window=8, use_sliding_window=True),
        "vllm",
        "layer_types",
        "V2 model runner",
    ),
    ("softcap", config(final_logit_softcapping=30.0), "vllm", "final_logit", "temperature"),
    ("scale", config(input_embedding_scale=8.0), "sglang", "input_embed", "own scale"),
    ("no block size", published(folders.zlab, block_size=None), "sglang", "block_size", "missing"),
    (
        "embeddings",
        tensors(lambda t: t.update({"embed_tokens.weight": torch.zeros(96, 32)})),
        "sglang",
        "embed_tokens",
        "without a word",
    ),
    ("mask embedding", file("mask_embedding.pt", ""), "sglang", "mask_embedding", "local folder"),
    (
        "native windows",
        native(layer_types=[SLIDING] * 2, sliding_window=16, is_causal=False),
        "transformers",
        "sliding_window",
        "one token further",
    ),
    (
        "z-lab's windows",
        published(
            folders.zlab,
            auto_map={"AutoModel": "dflash.X"},
            layer_types=[SLIDING] * 2,
            sliding_window=8,
            use_sliding_window=True,
        ),
        "trust_remote_code",
        "layer_types",
        "flash attention only",
    ),
    (
        "fewer drafts",
        speculators(
            speculators_config={
                "proposal_methods": [{"speculative_tokens": 3}],
                "verifier": {"name_or_path": "o/t"},
            }
        ),
        "vllm",
        "speculative_tokens",
        "is 3",
    ),
]


@pytest.mark.parametrize(
    ("plant", "engine", "subject", "reason"),
    [w[1:] for w in WARNINGS],
    ids=[w[0] for w in WARNINGS],
)
def test_what_works_but_needs_a_look_is_a_warning(plant, engine, subject, reason, tmp_path):
    folder = plant(tmp_path / "d")
    verdict = examine(folder or tmp_path / "d", engines=[engine]).verdicts[0]
    assert any(
        finding.severity == WARNING
        and re.match(subject, finding.subject)
        and re.search(reason, finding.reason)
        for finding in verdict.findings
    ), verdict
