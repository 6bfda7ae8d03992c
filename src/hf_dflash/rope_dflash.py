"""The rotary embedding's two spellings in config files, merged and checked.

transformers 4 wrote `rope_theta` and `rope_scaling`, transformers 5 writes `rope_parameters`.
"""

from collections.abc import Mapping
from typing import Any

#: Keys each kind of rotary embedding needs, and those it may have.
ROPE_KEYS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "dynamic": (frozenset({"factor"}), frozenset({"original_max_position_embeddings"})),
    "yarn": (
        frozenset({"factor"}),
        frozenset(
            {
                "original_max_position_embeddings",
                "attention_factor",
                "beta_fast",
                "beta_slow",
                "mscale",
                "mscale_all_dim",
                "truncate",
            }
        ),
    ),
    "longrope": (
        frozenset({"short_factor", "long_factor"}),
        frozenset({"original_max_position_embeddings", "attention_factor", "factor"}),
    ),
    "llama3": (
        frozenset(
            {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}
        ),
        frozenset(),
    ),
}


def read_rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Merge the two spellings of the rotary embedding into one dict, `rope_type` and all.

    Raises:
        ValueError: If they disagree, or ask for a rotary embedding Qwen3's layers do not have.
    """
    theta = raw.pop("rope_theta", None)
    scaling = raw.pop("rope_scaling", None)
    parameters = raw.pop("rope_parameters", None)
    factor = raw.pop("partial_rotary_factor", None)
    rope = _flat_rope(scaling, "rope_scaling") | _flat_rope(parameters, "rope_parameters")
    for key, value in _flat_rope(scaling, "rope_scaling").items():
        if rope[key] != value:
            raise ValueError(
                f"`rope_scaling.{key}` ({value!r}) and `rope_parameters.{key}` ({rope[key]!r}) "
                "must agree. Keep the spelling the drafter was trained with."
            )
    if theta is not None and rope.setdefault("rope_theta", theta) != theta:
        raise ValueError(
            f"`rope_theta` ({theta}) and `rope_parameters.rope_theta` ({rope['rope_theta']}) must "
            "agree. Keep the one the drafter was trained with."
        )
    if factor is not None:
        rope.setdefault("partial_rotary_factor", factor)
    return checked_rope(rope)


def _flat_rope(section: Any, name: str) -> dict[str, Any]:
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise TypeError(f"`{name}` must be an object or null, got {section!r}.")
    rope = dict(section)
    legacy_type = rope.pop("type", None)
    if legacy_type is not None and rope.setdefault("rope_type", legacy_type) != legacy_type:
        raise ValueError(
            f"`{name}` has `type` {legacy_type!r} and `rope_type` {rope['rope_type']!r}. Keep one "
            "of them."
        )
    return rope


def checked_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Return ``rope`` with its defaults filled in, if Qwen3's layers honour all of it.

    Raises:
        ValueError: If they do not, or if something the kind of embedding needs is missing.
    """
    rope = {key: value for key, value in rope.items() if value is not None}
    # Sections are for positions with several axes. A drafter's have one, and then they all agree.
    for key in ("mrope_section", "mrope_interleaved"):
        rope.pop(key, None)
    if rope.get("rope_type") == "mrope":
        rope["rope_type"] = "default"
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            "`partial_rotary_factor` must be 1.0: Qwen3's rotary embedding turns whole heads. A "
            "drafter trained with another value is not supported."
        )
    kind = rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", 10000.0)
    if kind not in ROPE_KEYS:
        raise ValueError(
            f"`rope_parameters.rope_type` must be one of {sorted(ROPE_KEYS)}, got {kind!r}. One "
            "entry for all layers is expected, not one per layer type."
        )
    required, optional = ROPE_KEYS[kind]
    keys = rope.keys() - {"rope_type", "rope_theta"}
    if missing := sorted(required - keys):
        raise ValueError(f"`rope_parameters` of type {kind!r} need {missing}, got {sorted(keys)}.")
    if unknown := sorted(keys - required - optional):
        raise ValueError(
            f"`rope_parameters` of type {kind!r} cannot honour {unknown}. Remove what does not "
            f"belong to it; {sorted(required | optional)} are read."
        )
    return rope
