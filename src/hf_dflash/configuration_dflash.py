"""`DFlashConfig`: what a DFlash or DFlare drafter is, whatever spelling its file has.

Letters: T taps, B block size, H draft hidden size, Ht target hidden size, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig, Qwen3Config

from .formats_dflash import read_config_dict, write_config_dict

#: Where the two classes are in a published folder.
AUTO_MAP = {
    "AutoConfig": "configuration_dflash.DFlashConfig",
    "AutoModel": "modeling_dflash.DFlashDraftModel",
}


class DFlashConfig(Qwen3Config):
    """Configuration of a block drafter: Qwen3 layers plus what ties them to their target."""

    architecture: str = "dflash"
    block_size: int = 16
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    num_target_layers: int | None = None
    target_hidden_size: int | None = None
    is_causal: bool | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

    def __init__(self, **kwargs: Any) -> None:
        """Read flat keyword arguments or the content of any drafter's `config.json`."""
        fields = read_config_dict(kwargs)
        drafter = {key: fields.pop(key, getattr(DFlashConfig, key)) for key in DRAFTER_FIELDS}
        super().__init__(**fields)
        for key, value in drafter.items():
            setattr(self, key, value)
        self.tie_word_embeddings = False
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size

    @property
    def dflash_config(self) -> dict[str, Any]:
        """The nested section as written: serving engines read it off the config object."""
        return self.to_dict()["dflash_config"]

    def layer_is_causal(self, layer_idx: int) -> bool:
        """Say whether block queries of a layer see only the block slots before them.

        Sliding layers are causal and full layers are not, unless `is_causal` says otherwise.
        """
        if self.is_causal is not None:
            return self.is_causal
        return self.layer_types[layer_idx] == "sliding_attention"

    def layer_window(self, layer_idx: int) -> int | None:
        """Return how far a layer sees (distance < window), `None` for no limit."""
        return self.sliding_window if self.layer_types[layer_idx] == "sliding_attention" else None

    def to_dict(self) -> dict[str, Any]:
        """Return the portable `config.json` layout as a dict."""
        flat = super().to_dict()
        for key, default in PreTrainedConfig().to_dict().items():
            if key not in KEPT and flat.get(key) == default:
                flat.pop(key, None)
        auto_map = flat.pop("auto_map", None) or {}
        own = {key: name for key, name in AUTO_MAP.items() if str(auto_map.get(key)).endswith(name)}
        return write_config_dict(flat) | ({"auto_map": own} if own else {})

    def to_diff_dict(self) -> dict[str, Any]:
        """Return what is saved: everything, since other engines have other defaults."""
        return {key: value for key, value in self.to_dict().items() if key != "_name_or_path"}


DRAFTER_FIELDS = (
    "architecture",
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "target_hidden_size",
    "is_causal",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
)
KEPT = ("dtype", "architectures", "transformers_version")

DFlashConfig.register_for_auto_class()
