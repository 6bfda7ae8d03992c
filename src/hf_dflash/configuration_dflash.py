"""`DFlashConfig`: what a DFlash or DFlare drafter is, whatever spelling its file has.

Letters: T taps, B block size, H draft hidden size, Ht target hidden size, V vocabulary, L draft
layers, N layers of the target.
"""

import math
from typing import Any

from transformers import PreTrainedConfig, Qwen3Config
from transformers.activations import ACT2FN

from .formats_dflash import QWEN3_NUM_LAYERS, read_config_dict, write_config_dict
from .geometry_dflash import (
    DEFAULT_TAPS,
    choose_draft_layers,
    choose_mask_token_id,
    choose_target_layer_ids,
    target_fields,
)
from .rope_dflash import checked_rope
from .values_dflash import check_dtype, check_int, plain_field_errors

#: Where the two classes are in a published folder.
AUTO_MAP = {
    "AutoConfig": "configuration_dflash.DFlashConfig",
    "AutoModel": "modeling_dflash.DFlashDraftModel",
}
LAYER_TYPES = ("full_attention", "sliding_attention")
#: Fields of every config that are always written; the rest only where it is not the default.
ALWAYS_WRITTEN = ("dtype", "architectures", "transformers_version")
#: The drafter's own fields and their defaults.
DRAFTER_DEFAULTS: dict[str, Any] = {
    "architecture": "dflash",
    "block_size": 16,
    "mask_token_id": None,
    "target_layer_ids": None,
    "num_target_layers": None,
    "target_hidden_size": None,
    "is_causal": None,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
}


class DFlashConfig(Qwen3Config):
    """Configuration of a block drafter: Qwen3 layers plus what ties them to their target.

    It is built from flat keyword arguments, or from the content of any known `config.json`:
    z-lab's, the flat one, ModelOpt's, AngelSlim's DFlash and DFlare, transformers' own block
    drafter. It is written in one spelling, the one every serving engine reads. Nothing given is
    ignored: a key that is unknown, or asks for what is not implemented, is an error.

    `DFlashConfig()` alone can be built, because transformers does so to find defaults. A drafter
    cannot be built from it: the mask token and the taps have no default (see `validate_drafter`).

    Beyond Qwen3's fields:
        architecture: "dflash" (taps concatenated, one projection for all layers) or "dflare" (a
            learned mix of the taps for each layer, separate K/V projections for the context).
        block_size: B, the anchor included; B - 1 tokens are drafted a cycle. 16 if it stands in
            neither place of a file, as z-lab's code and SGLang take it.
        mask_token_id: Token whose embedding fills the slots to be drafted.
        target_layer_ids: T 0-based layers of the target whose outputs are read, in the order in
            which they are concatenated.
        num_target_layers: N, or `None` if the file does not say.
        target_hidden_size: Ht, H by default.
        is_causal: Whether block slots see only those before them. `None`: sliding layers are
            causal, full ones are not.
        input_embedding_scale: Factor on the raw embedding rows of the target.
        output_multiplier: Factor on the output of the target's head.
        final_logit_softcapping: Soft cap on the logits, or `None`.
    """

    # `None` only until `validate_drafter` has passed, so that no model has to ask.
    num_key_value_heads: int = 32
    layer_types: list[str] = None  # type: ignore[assignment]
    mask_token_id: int = None  # type: ignore[assignment]
    target_layer_ids: list[int] = None  # type: ignore[assignment]
    target_hidden_size: int = None  # type: ignore[assignment]
    architecture: str = "dflash"
    block_size: int = 16
    num_target_layers: int | None = None
    is_causal: bool | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

    def __init__(self, **kwargs: Any) -> None:
        """Read flat keyword arguments or the content of any drafter's `config.json`.

        Raises:
            ValueError: If the format is not a DFlash or DFlare drafter's, a key is unknown or not
                supported, two spellings disagree, or a value is out of range.
            TypeError: If a value is of the wrong kind.
        """
        fields = read_config_dict(kwargs)
        drafter = {key: fields.pop(key, value) for key, value in DRAFTER_DEFAULTS.items()}
        n_layers = fields.get("num_hidden_layers", QWEN3_NUM_LAYERS)
        _check_layers(fields["layer_types"], fields["sliding_window"], n_layers)
        for key, value in drafter.items():
            setattr(self, key, list(value) if isinstance(value, tuple | list) else value)
        for key in ("dtype", "torch_dtype"):
            check_dtype(key, fields.get(key))
        with plain_field_errors():
            super().__init__(**fields)
        # There is no embedding and no head in a drafter that could be tied.
        self.tie_word_embeddings = False
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        _check_given(self)

    @classmethod
    def for_target(
        cls,
        target_config: PreTrainedConfig,
        *,
        num_draft_layers: int | None = None,
        num_taps: int | None = None,
        block_size: int = 16,
        mask_token_id: int | None = None,
        tokenizer: Any | None = None,
        architecture: str = "dflash",
        **overrides: Any,
    ) -> "DFlashConfig":
        """Derive the config of a new drafter from its target's.

        Draft layers get the target's widths, heads, rotary embedding (that of its full-attention
        layers) and vocabulary, and attend fully. Their projections have biases if the target says
        so by its `attention_bias`; those on queries, keys and values alone (Qwen2) are left out,
        as drafters have them on all four or none. Everything can be overridden.

        Args:
            target_config: Config of the target; of a vision or audio model too.
            num_draft_layers: L; 5 for DFlash, 7 for DFlare (the papers' sizes).
            num_taps: T; 5 for DFlash, 9 for DFlare, fewer if the target has fewer layers. Only in
                place of ``target_layer_ids``.
            block_size: B; 16 as in the papers.
            mask_token_id: Token for the slots to be drafted; chosen from ``tokenizer`` if absent.
            tokenizer: The target's tokenizer.
            architecture: "dflash" or "dflare".
            **overrides: Any other field, such as ``target_layer_ids`` or ``layer_types``.

        Raises:
            ValueError: If the target is no decoder with attention heads, has too few layers for
                ``num_taps``, or no mask token can be found; or if a number is out of range.
        """
        if architecture not in DEFAULT_TAPS:
            raise ValueError(_ARCHITECTURE_NEEDED.format(architecture))
        fields = target_fields(target_config, overrides)
        overrides["target_layer_ids"] = choose_target_layer_ids(
            architecture, fields["num_target_layers"], num_taps, overrides.get("target_layer_ids")
        )
        if mask_token_id is None:
            mask_token_id = choose_mask_token_id(fields["vocab_size"], tokenizer)
        fields |= {
            "architecture": architecture,
            "num_hidden_layers": choose_draft_layers(architecture, num_draft_layers),
            "block_size": block_size,
            "mask_token_id": mask_token_id,
        }
        config = cls(**(fields | overrides))
        config.validate_drafter()
        return config

    @classmethod
    def from_pretrained(  # type: ignore[override]  # the others go by name
        cls, pretrained_model_name_or_path: Any, **kwargs: Any
    ) -> Any:
        """Read the `config.json` of a folder or a Hub repository, in any spelling.

        Not as transformers does it, which warns of every `model_type` but Qwen3's, though the
        other spellings are read as well.

        Raises:
            ValueError: As `from_dict`.
            OSError: There is no such file.
        """
        config_dict, kwargs = cls.get_config_dict(pretrained_model_name_or_path, **kwargs)
        return cls.from_dict(config_dict, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build the config from the content of a `config.json`, which must be a drafter's.

        Raises:
            ValueError: As the constructor, and if the mask token or the taps are missing.
        """
        loaded = super().from_dict(config_dict, **kwargs)
        config = loaded[0] if isinstance(loaded, tuple) else loaded
        config.validate_drafter()
        return loaded

    @property
    def dflash_config(self) -> dict[str, Any]:
        """The nested section as it is written: serving engines read it off the config object."""
        return self.to_dict()["dflash_config"]

    def layer_is_causal(self, layer_idx: int) -> bool:
        """Say whether the block slots of a layer see only those before them.

        Source: z-lab's rule. Sliding layers are causal and full ones are not, unless `is_causal`
        says otherwise for all.
        """
        if self.is_causal is not None:
            return self.is_causal
        return self.layer_types[layer_idx] == "sliding_attention"

    def layer_window(self, layer_idx: int) -> int | None:
        """Return the window of a layer (distance < window is seen), `None` for no limit."""
        return self.sliding_window if self.layer_types[layer_idx] == "sliding_attention" else None

    def validate_drafter(self) -> None:
        """Check that a drafter can be built from this config, or is described by it.

        Its model and its loader call it, and so may who uses a config that can have been changed.

        Raises:
            ValueError: If the mask token or the taps are missing, or any value is out of range.
            TypeError: If a value is of the wrong kind.
        """
        if self.mask_token_id is None:
            raise ValueError(
                "`mask_token_id` is missing: a drafter needs the token that fills the slots to "
                "be drafted (top level or in `dflash_config`). Pass it to DFlashConfig, or let "
                "DFlashConfig.for_target(..., tokenizer=...) choose it."
            )
        if self.target_layer_ids is None:
            raise ValueError(
                "`target_layer_ids` is missing: a drafter needs the target's layers it reads "
                "(top level or in `dflash_config`). Pass them to DFlashConfig; they cannot be "
                "guessed for a trained drafter."
            )
        _check_given(self)

    def validate(self) -> None:
        """Check everything; transformers calls this before it saves."""
        self.validate_drafter()  # first, for its messages
        super().validate()  # type: ignore[misc]  # made by a decorator

    def to_dict(self) -> dict[str, Any]:
        """Return the portable `config.json` layout as a dict."""
        flat = super().to_dict()
        for key, default in PreTrainedConfig().to_dict().items():
            if key not in ALWAYS_WRITTEN and flat.get(key) == default:
                flat.pop(key, None)
        auto_map = flat.pop("auto_map", None) or {}
        # A file of another origin points to its own code, which is not saved along.
        own = {
            key: name for key, name in AUTO_MAP.items() if _module_path(auto_map.get(key)) == name
        }
        return write_config_dict(flat) | ({"auto_map": own} if own else {})

    def to_diff_dict(self) -> dict[str, Any]:
        """Return what is saved: every field, since other engines have other defaults."""
        return {key: value for key, value in self.to_dict().items() if key != "_name_or_path"}

    def __eq__(self, other: object) -> bool:
        """Two configs are equal if the same would be saved for both."""
        return isinstance(other, DFlashConfig) and _content(self) == _content(other)

    __hash__ = None  # type: ignore[assignment]


_ARCHITECTURE_NEEDED = '`architecture` must be "dflash" or "dflare", got {!r}.'


def _content(config: DFlashConfig) -> dict[str, Any]:
    saved = config.to_diff_dict()
    return {key: saved[key] for key in saved if key not in ("transformers_version", "auto_map")}


def _module_path(reference: str | None) -> str | None:
    """Return `module.Class` of an `auto_map` entry, without the repository it may name."""
    return None if reference is None else str(reference).rpartition("--")[2]


def _check_given(config: DFlashConfig) -> None:
    """Check all values that are set, the mask token and the taps only if they are."""
    if config.architecture not in tuple(DEFAULT_TAPS):  # may be unhashable
        raise ValueError(_ARCHITECTURE_NEEDED.format(config.architecture))
    _check_layers(config.layer_types or [], config.sliding_window, config.num_hidden_layers)
    _check_sizes(config)
    _check_taps(config)
    _check_scales(config)
    checked_rope(dict(config.rope_parameters or {}))
    if config.mask_token_id is not None:
        check_int("mask_token_id", config.mask_token_id, 0, config.vocab_size - 1)
    if config.is_causal not in (None, True, False):
        raise TypeError(f"`is_causal` must be true, false or null, got {config.is_causal!r}.")


def _check_layers(layer_types: list[str], window: int | None, num_layers: int) -> None:
    check_int("num_hidden_layers", num_layers, 1)
    if len(layer_types) != num_layers:
        raise ValueError(
            f"`layer_types` must have one entry for each of the {num_layers} draft layers, got "
            f"{len(layer_types)}."
        )
    if unknown := sorted(set(layer_types) - set(LAYER_TYPES)):
        raise ValueError(f"`layer_types` must be among {list(LAYER_TYPES)}, got {unknown}.")
    if "sliding_attention" in layer_types:
        if window is None:
            raise ValueError(
                "`sliding_window` is missing: `layer_types` lists sliding_attention layers. Give "
                "the number of tokens they see, or make every layer full_attention."
            )
        check_int("sliding_window", window, 1)


def _check_sizes(config: DFlashConfig) -> None:
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "target_hidden_size",
        "max_position_embeddings",
    )
    for name in names:
        check_int(name, getattr(config, name), 1)
    check_int("block_size", config.block_size, 2)
    if config.num_target_layers is not None:
        check_int("num_target_layers", config.num_target_layers, 1)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % (kv_heads or heads):
        raise ValueError(
            f"`num_attention_heads` ({heads}) must be a multiple of `num_key_value_heads` "
            f"({kv_heads})."
        )
    if config.head_dim % 2:
        raise ValueError(
            f"`head_dim` must be even for the rotary embedding, got {config.head_dim}."
        )
    if config.architecture == "dflare" and config.target_hidden_size != config.hidden_size:
        raise ValueError(
            "`target_hidden_size` of a DFlare drafter must equal `hidden_size` "
            f"({config.hidden_size}), got "
            f"{config.target_hidden_size}: it mixes the taps without projecting them. Use "
            'architecture "dflash".'
        )
    if config.hidden_act not in ACT2FN:
        raise ValueError(
            '`hidden_act` must be an activation of transformers such as "silu", got '
            f"{config.hidden_act!r}."
        )


def _check_taps(config: DFlashConfig) -> None:
    ids = config.target_layer_ids
    if ids is None:
        return
    if not isinstance(ids, list) or any(not isinstance(i, int) or isinstance(i, bool) for i in ids):
        raise TypeError(f"`target_layer_ids` must be a list of integers, got {ids!r}.")
    n_layers = config.num_target_layers
    if (
        not ids
        or len(set(ids)) < len(ids)
        or min(ids) < 0
        or (n_layers is not None and max(ids) >= n_layers)
    ):
        known = f" ({n_layers} layers, 0..{n_layers - 1})" if n_layers is not None else " (0-based)"
        raise ValueError(
            f"`target_layer_ids` must be distinct layers of the target{known}, got {ids}. "
            "Negative ids and ids shifted by one belong to other formats; "
            "DFlashConfig.for_target finds the default spread."
        )


def _check_scales(config: DFlashConfig) -> None:
    names = ["input_embedding_scale", "output_multiplier"]
    if config.final_logit_softcapping is not None:
        names.append("final_logit_softcapping")
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise TypeError(f"`{name}` must be a number, got {value!r}.")
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(
                f"`{name}` must be positive and finite, got {value}. Leave it out for no effect."
            )


# Published folders load with `trust_remote_code`; AutoConfig.register would take over all of Qwen3.
DFlashConfig.register_for_auto_class()
