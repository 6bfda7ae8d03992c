"""The drafter: draft layers that read the target's hidden states as keys and values.

One class for two architectures: DFlash (arXiv:2602.06036) and DFlare (arXiv:2606.02091).

Letters: N batch, S context length, B block size, H draft hidden size, Ht target hidden size,
T taps, L draft layers, heads = key/value heads, hd head size.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)

from .attention_masks import BlockMasks
from .checkpoint_dflash import (
    check_loading_info,
    read_generation_config,
    save_generation_config,
    strict_loading_options,
    validate_generation_config,
)
from .configuration_dflash import DFlashConfig
from .context_cache import ContextCache
from .generation_dflash import install_dispatch


class DFlashAttention(nn.Module):
    """Attention of the block over the context and over itself (KV injection).

    Source: DFlash section 3 and appendix A.3; DFlare section 3 for the separate context K/V.
    """

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = config.layer_is_causal(layer_idx)
        self.window = config.layer_window(layer_idx)

        hidden, bias = config.hidden_size, config.attention_bias
        q_size = config.num_attention_heads * self.head_dim
        kv_size = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, q_size, bias=bias)
        self.k_proj = nn.Linear(hidden, kv_size, bias=bias)
        self.v_proj = nn.Linear(hidden, kv_size, bias=bias)
        self.o_proj = nn.Linear(q_size, hidden, bias=bias)
        if config.architecture == "dflare":
            self.k_proj_target = nn.Linear(hidden, kv_size, bias=bias)
            self.v_proj_target = nn.Linear(hidden, kv_size, bias=bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def keys_values(
        self, context: Tensor, block: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Project context features and block states to keys and values, context first.

        Args:
            context: (N, S_new, H) features; either part may have no rows.
            block: (N, B, H) normed states of the block.
            cos: (N, S_new + B, hd).
            sin: (N, S_new + B, hd).

        Returns:
            Rotated keys and values, each (N, heads, S_new + B, hd).
        """
        if self.config.architecture == "dflare":
            keys = torch.cat([self.k_proj_target(context), self.k_proj(block)], dim=1)
            values = torch.cat([self.v_proj_target(context), self.v_proj(block)], dim=1)
        else:
            states = torch.cat([context, block], dim=1)
            keys, values = self.k_proj(states), self.v_proj(states)
        keys = _rotate(self.k_norm(self._heads(keys)).transpose(1, 2), cos, sin)
        return keys, self._heads(values).transpose(1, 2)

    def forward(
        self,
        hidden_states: Tensor,
        context_features: Tensor,
        cos: Tensor,
        sin: Tensor,
        masks: BlockMasks,
        cache: Any | None,
    ) -> Tensor:
        """Let the block (N, B, H) attend to the context and to itself; returns (N, B, H)."""
        n_block = hidden_states.shape[1]
        queries = self.q_norm(self._heads(self.q_proj(hidden_states))).transpose(1, 2)
        queries = _rotate(queries, cos[:, -n_block:], sin[:, -n_block:])
        keys, values = self.keys_values(context_features, hidden_states, cos, sin)
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        outputs = [
            attend(
                self,
                queries[:, :, part.queries],
                part.of_keys(keys),
                part.of_keys(values),
                part.mask,
                dropout=self.attention_dropout if self.training else 0.0,
                scaling=self.scaling,
                sliding_window=self.window,
            )[0]
            for part in masks.for_layer(self, keys.shape[2])
        ]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1))

    def _heads(self, states: Tensor) -> Tensor:
        return states.view(*states.shape[:-1], states.shape[-1] // self.head_dim, self.head_dim)


class DFlashDecoderLayer(GradientCheckpointingLayer):
    """One pre-norm draft layer. Context features skip its norm, its queries and its MLP."""

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = DFlashAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        context_features: Tensor,
        cos: Tensor,
        sin: Tensor,
        masks: BlockMasks,
        cache: Any | None,
    ) -> Tensor:
        """(N, B, H) block states to (N, B, H)."""
        normed = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + self.self_attn(
            normed, context_features, cos, sin, masks, cache
        )
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class DFlashDraftModel(PreTrainedModel):
    """Proposes a block of tokens in one forward, reading the target's hidden states.

    It has no embedding and no head of its own: the target's are used. Pass it to the target:
    ``target.generate(**inputs, assistant_model=drafter)``. Building or loading one installs the
    dispatch that makes `generate` understand it.

    A saved drafter has ``model_type`` "qwen3", which is what serving engines expect. So
    ``AutoModel.from_pretrained(folder)`` *without* ``trust_remote_code=True`` builds a random
    Qwen3 model and only warns. Use this class, or pass ``trust_remote_code=True``.
    """

    config_class = DFlashConfig
    config: DFlashConfig
    base_model_prefix = "model"
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DFlashDecoderLayer"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    # What the dispatch looks for. A class loaded with trust_remote_code is another class than
    # the package's, so isinstance would not do.
    is_dflash_drafter = True

    def __init__(self, config: DFlashConfig) -> None:
        config.validate_drafter()
        super().__init__(config)
        n_taps, n_layers = len(config.target_layer_ids), config.num_hidden_layers
        if config.architecture == "dflare":
            self.layer_fusion_weights = nn.Parameter(torch.zeros(n_layers, n_taps))
        else:
            self.fc = nn.Linear(n_taps * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashDecoderLayer(config, i) for i in range(n_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.generation_config = GenerationConfig()
        # Marks contexts left with a target's cache between the turns of a chat; copies share it.
        self.context_key = uuid.uuid4().hex
        self.post_init()
        install_dispatch()

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any
    ) -> Any:
        """Load a drafter from a folder or repository, completely or not at all.

        Takes transformers' arguments. Every known spelling of the config and of the tensor names
        is read; an ``auto_map`` of the folder to other code is not followed. The drafting policy
        (``generation_config.json``) is read along.

        Do not load a drafter with ``AutoModel`` unless with ``trust_remote_code=True``: its
        ``model_type`` is "qwen3", so that builds a Qwen3 model with random weights.

        Raises:
            ValueError: If the checkpoint is of another format, truncated, pickled, or any of its
                tensors is missing, unexpected or wrongly shaped.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        options = strict_loading_options(pretrained_model_name_or_path, kwargs)
        loaded: Any = super().from_pretrained(
            pretrained_model_name_or_path, *model_args, output_loading_info=True, **options
        )
        model, info = loaded
        check_loading_info(info, pretrained_model_name_or_path)
        model.generation_config = read_generation_config(pretrained_model_name_or_path, kwargs)
        validate_generation_config(model.generation_config, model.config.block_size)
        return (model, info) if wants_info else model

    def get_input_embeddings(self) -> None:  # type: ignore[override]
        """A drafter has none; accelerate's FSDP2 asks every model."""

    def save_pretrained(  # type: ignore[override]  # takes the rest by name, whatever the release
        self, save_directory: Any, is_main_process: bool = True, **kwargs: Any
    ) -> None:
        """Save the drafter so that this package, ``trust_remote_code`` and every engine load it.

        Beyond transformers' own files this writes the drafting policy and the code. The tensors
        keep the field's names, whatever names they were loaded under.

        Raises:
            ValueError: If the config or the drafting policy is not valid.
        """
        validate_generation_config(self.generation_config, self.config.block_size)
        if is_main_process:
            save_generation_config(self.generation_config, save_directory)
        kwargs["save_original_format"] = False
        super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)

    def push_to_hub(  # type: ignore[override]  # its options are those of hf_dflash.hub
        self, repo_id: str, **kwargs: Any
    ) -> str:
        """Publish the drafter with a card, as `hf-dflash push` does.

        Where this file came with a checkpoint and hf-dflash is not installed: as transformers does.

        Args:
            repo_id: "organisation/name", or "name" for your own account.
            **kwargs: ``private``, ``revision``, ``create_pr``, ``commit_message``, ``token``.

        Returns:
            Address of the repository, or of the pull request.
        """
        try:
            hub = import_module("hf_dflash.hub")
        except ModuleNotFoundError:
            pushed: Any = super().push_to_hub(repo_id, **kwargs)  # type: ignore[arg-type]
            return str(pushed)
        return str(hub.push_model(self, repo_id, **kwargs))

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        weights = getattr(module, "layer_fusion_weights", None)
        if isinstance(weights, nn.Parameter):
            # DFlare's start: draft layer d of L listens mostly to tap d / L of the way up.
            n_layers, n_taps = weights.shape
            start = torch.zeros(n_layers, n_taps)
            for layer in range(n_layers):
                start[layer, min(n_taps - 1, layer * n_taps // n_layers)] = 2.0
            init.copy_(weights, start)

    def new_cache(self) -> ContextCache:
        """An empty context cache that fits this drafter."""
        layers = range(self.config.num_hidden_layers)
        return ContextCache([self.config.layer_window(i) for i in layers])

    def fuse_context(self, context_hidden_states: Tensor) -> Sequence[Tensor]:
        """Turn raw taps into the context features of each draft layer.

        DFlash projects the concatenated taps once, for all layers. DFlare mixes them by weights
        of each layer's own, softmax over the taps.

        Args:
            context_hidden_states: (N, S, T * Ht), taps concatenated in the order of
                ``config.target_layer_ids``.

        Returns:
            L tensors (N, S, H).
        """
        if self.config.architecture != "dflare":
            features = self.hidden_norm(self.fc(context_hidden_states))
            return [features] * self.config.num_hidden_layers
        n_taps = len(self.config.target_layer_ids)
        taps = context_hidden_states.unflatten(-1, (n_taps, -1))
        mixes = self.layer_fusion_weights.softmax(dim=-1)
        return [self.hidden_norm(torch.einsum("nsth,t->nsh", taps, mix)) for mix in mixes]

    def extend_context(
        self, context_hidden_states: Tensor, position_ids: Tensor, cache: ContextCache
    ) -> None:
        """Put the K/V of context rows into ``cache`` without drafting.

        Long prompts are fed in pieces through this, so that the taps of the whole prompt never
        lie concatenated in memory.

        Args:
            context_hidden_states: (N, S, T * Ht) raw taps.
            position_ids: (N, S) int64.
            cache: From `new_cache`.
        """
        features = self.fuse_context(context_hidden_states)
        cos, sin = self.rotary_emb(features[0], position_ids)
        for layer, context in zip(self.layers, features, strict=True):
            attention: Any = layer.self_attn
            keys, values = attention.keys_values(context, context[:, :0], cos, sin)
            cache.update(keys, values, attention.layer_idx)
        cache.commit(context_hidden_states.shape[1])

    def forward(
        self,
        noise_embeds: Tensor,
        context_hidden_states: Tensor,
        position_ids: Tensor,
        attention_mask: Any | None = None,
        cache: Any | None = None,
        past_key_values: Any | None = None,
    ) -> BaseModelOutput:
        """Denoise one block. The names and shapes are those of transformers' own block drafter.

        Args:
            noise_embeds: (N, B, H), embeddings of the anchor and of B - 1 mask tokens. Fewer
                slots than the drafter was trained with are fine.
            context_hidden_states: (N, S_new, T * Ht), raw taps of the tokens that the target has
                seen since the last call. S_new may be 0.
            position_ids: (N, S_new + B) int64, context first.
            attention_mask: (N, S + B), 0 for padding, over the whole context and the block; or in
                training a `BlockMaskRule`, for many blocks in one pass.
            cache: A `ContextCache`, or the cache of transformers' own block loop, which takes the
                block out again itself. Without one, only the rows passed here are seen.
            past_key_values: Name of ``cache`` in transformers before 5.24.

        Returns:
            ``last_hidden_state`` (N, B, H), after the final norm; slot k stands for the token at
            the anchor's position + k.
        """
        cache = past_key_values if cache is None else cache
        features = self.fuse_context(context_hidden_states)
        cos, sin = self.rotary_emb(noise_embeds, position_ids)
        masks = BlockMasks(self.config, noise_embeds, attention_mask)
        hidden_states = noise_embeds
        for layer, context in zip(self.layers, features, strict=True):
            hidden_states = layer(hidden_states, context, cos, sin, masks, cache)
        if isinstance(cache, ContextCache):
            cache.commit(context_hidden_states.shape[1])
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings: states (N, heads, S, hd), cos and sin (N, S, hd)."""
    return states * cos.unsqueeze(1) + rotate_half(states) * sin.unsqueeze(1)


# Puts the code and the `auto_map` into saved folders.
DFlashDraftModel.register_for_auto_class("AutoModel")
