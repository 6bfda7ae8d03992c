"""The config and the vocabulary maps of vLLM's speculators, read and written.

Where it differs from the other formats: the decoder's fields are nested, layer ids count from the
embeddings (0-based ids + 1), the draft head may cover only part of the vocabulary, and the target
("verifier") is named. What the other formats have no place for is kept as a record, which
`hf-dflash convert` writes beside a converted drafter (`RECORD_NAME`) and reads back.

Letters: V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .configuration_dflash import DFlashConfig
from .formats_dflash import DROPPED, PASSED_ON

#: What only speculators' format says, beside a drafter in another one.
RECORD_NAME = "speculators.json"
#: The release whose own classes read what is written here (tests/parity/test_engines.py).
SPECULATORS_VERSION = "0.9.0"
EMBEDDINGS, HEAD = "embed_tokens.weight", "lm_head.weight"
#: Tensors of this format that no other one has; all of them follow from the target.
CARRIED = (EMBEDDINGS, HEAD, "d2t", "t2d")

_OWN_KEYS = (
    "block_size",
    "mask_token_id",
    "target_hidden_size",
    "num_target_layers",  # not the library's own, which keeps what it does not know
)
_RECORDED = ("architectures", "speculators_version", "speculators_config")
_READ = {
    *_OWN_KEYS,
    *_RECORDED,
    "speculators_model_type",
    "transformer_layer_config",
    "draft_vocab_size",
    "aux_hidden_state_layer_ids",
    "sliding_window_non_causal",
    "sample_from_anchor",
}


def read_speculators_config(raw: Mapping[str, Any]) -> tuple[DFlashConfig, dict[str, Any]]:
    """Turn a speculators `config.json` into a drafter's config and a record of the rest.

    Args:
        raw: The file's content.

    Returns:
        The config, and what only this format says: the verifier, how many tokens are proposed,
        the size of the draft vocabulary, whether sliding layers look both ways.

    Raises:
        ValueError: If it is another algorithm, a key is missing or unknown, or it asks for
            something a DFlash drafter does not do.
    """
    kind = raw.get("speculators_model_type")
    if kind != "dflash":
        raise ValueError(
            f'`speculators_model_type` must be "dflash", got {kind!r}: another method. Serve it '
            "with vLLM, or use a plain DFlash drafter of the same target."
        )
    generic = PASSED_ON | DROPPED | set(PreTrainedConfig().to_dict())
    if unknown := sorted(raw.keys() - _READ - generic):
        raise ValueError(
            f"Unknown keys {unknown} in a speculators config. Correct the spelling, or delete a "
            "key that does not change the drafter's forward pass."
        )
    if raw.get("sample_from_anchor"):
        raise ValueError(
            "`sample_from_anchor` must be false, got true: the anchor's slot would predict too, as "
            "in DSpark. Use a drafter trained without it."
        )
    fields = _decoder_fields(raw)
    fields |= {key: raw[key] for key in _OWN_KEYS if raw.get(key) is not None}
    fields["target_layer_ids"] = _zero_based(raw.get("aux_hidden_state_layer_ids"))
    non_causal = raw.get("sliding_window_non_causal")
    if non_causal:
        fields["is_causal"] = False
    config = DFlashConfig(**fields)
    config.validate_drafter()
    record = {key: raw[key] for key in _RECORDED if key in raw}
    if non_causal is not None:
        record["sliding_window_non_causal"] = non_causal
    if raw.get("draft_vocab_size") not in (None, config.vocab_size):
        record["draft_vocab_size"] = raw["draft_vocab_size"]
    return config, record


def _decoder_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    fields = raw.get("transformer_layer_config")
    if not isinstance(fields, Mapping):
        raise ValueError(
            "`transformer_layer_config` must be an object with the draft layers' fields, got "
            f"{fields!r:.80}. Get the config.json anew."
        )
    fields = {key: value for key, value in fields.items() if key != "architectures"}
    if "dtype" not in fields and raw.get("dtype") is not None:
        fields["dtype"] = raw["dtype"]
    return fields


def is_list_of_ids(value: Any) -> bool:
    """Whether it is a list of integers, as ids of layers are."""
    return isinstance(value, list) and all(type(index) is int for index in value)


def _zero_based(layer_ids: Any) -> list[int]:
    if not is_list_of_ids(layer_ids) or not layer_ids:
        raise ValueError(
            "`aux_hidden_state_layer_ids` must list the target's layers, each + 1, got "
            f"{layer_ids!r}. They cannot be guessed for a trained drafter."
        )
    if min(layer_ids) < 1:
        raise ValueError(
            f"`aux_hidden_state_layer_ids` must be at least 1, got {layer_ids}: 0 stands for the "
            "embeddings, which no other format can tap."
        )
    return [index - 1 for index in layer_ids]


def write_speculators_config(config: DFlashConfig, record: Mapping[str, Any]) -> dict[str, Any]:
    """Lay a drafter's config out as speculators does.

    Args:
        config: Of a DFlash drafter, all of which this format can hold.
        record: As from `read_speculators_config`; at least `speculators_config`.
    """
    portable = config.to_diff_dict()
    top = {key: portable[key] for key in _OWN_KEYS if portable.get(key) is not None}
    left_out = {*_OWN_KEYS, "architectures", "auto_map", "dflash_config", "is_causal"}
    left_out |= {"rope_theta", "rope_scaling", "torch_dtype", "transformers_version"}
    out = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION,
        **{key: record[key] for key in _RECORDED if key in record},
        "transformer_layer_config": {k: v for k, v in portable.items() if k not in left_out},
        **top,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": [index + 1 for index in config.target_layer_ids],
        "draft_vocab_size": record.get("draft_vocab_size", config.vocab_size),
        "sample_from_anchor": False,
    }
    both_ways = config.is_causal is False
    slides = "sliding_attention" in config.layer_types
    if slides or both_ways or "sliding_window_non_causal" in record:
        # Else left out: vLLM 0.33 takes "false" for "every layer is causal".
        out["sliding_window_non_causal"] = both_ways
    for key in ("dtype", "transformers_version"):
        if key in portable:
            out[key] = portable[key]
    return out


def new_record(target: str, architectures: Sequence[str], block_size: int) -> dict[str, Any]:
    """The part of a speculators config that names the target and how many tokens are drafted."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": block_size - 1,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target, "architectures": list(architectures)},
        }
    }


def vocabulary_maps(token_ids: Sequence[int], vocab_size: int) -> dict[str, Tensor]:
    """Make the maps of a reduced draft vocabulary.

    Args:
        token_ids: (Vd,) token of the target for each row of the draft head, ascending.
        vocab_size: V.

    Returns:
        `d2t` (Vd,) int64 offsets (row i stands for token i + d2t[i]) and `t2d` (V,) bool.

    Raises:
        ValueError: If the ids are not ascending tokens of the vocabulary.

    Example:
        >>> maps = vocabulary_maps([0, 2, 5], 6)
        >>> maps["d2t"].tolist(), maps["t2d"].tolist()
        ([0, 1, 3], [True, False, True, False, False, True])
    """
    ids = torch.tensor(list(token_ids), dtype=torch.int64)
    ascending = bool((ids[1:] > ids[:-1]).all())
    if len(ids) == 0 or not ascending or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise ValueError(
            f"The draft vocabulary must be ascending token ids in 0..{vocab_size - 1}, got "
            f"{len(ids)} ids from {list(token_ids)[:3]} on. Sort them, each once."
        )
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": mask}


def vocabulary_of(tensors: Mapping[str, Tensor], config: DFlashConfig, size: int) -> list[int]:
    """Read the tokens of a reduced draft vocabulary from its maps, which must agree.

    Args:
        tensors: Of the checkpoint.
        config: Of the drafter.
        size: Vd, as the config has it.

    Raises:
        ValueError: If a map or the head is missing, has the wrong size, or both maps differ.
    """
    needed = {"d2t": size, "t2d": config.vocab_size}
    if HEAD in tensors or size != config.vocab_size:  # the whole one may be left to the target
        needed[HEAD] = size
    for name, rows in needed.items():
        found = len(tensors[name]) if name in tensors else None
        if found != rows:
            raise ValueError(
                f"`{name}` must have {rows} rows for `draft_vocab_size` {size} of "
                f"{config.vocab_size} tokens, got {found}. Get the weights anew."
            )
    ids = torch.arange(size) + tensors["d2t"].to(torch.int64)
    if not torch.equal(ids, tensors["t2d"].nonzero().flatten()):
        raise ValueError(
            "`d2t` (offsets: row i stands for token i + d2t[i]) and `t2d` must name the same "
            "tokens, but differ. Absolute ids in `d2t` belong to another format."
        )
    return [int(index) for index in ids]
