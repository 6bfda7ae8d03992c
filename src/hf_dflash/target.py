"""What decoding and training need of the target, the same for every model family.

Letters: N batch, S rows of one forward, Ht target hidden size, H draft hidden size, V vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


def text_config(target: Any) -> Any:
    """The config of the target's language model, also when it is part of a larger model."""
    return target.config.get_text_config(decoder=True)


def decoder_layers(target: Any) -> Sequence[nn.Module]:
    """The target's decoder layers, first to last.

    Raises:
        NotImplementedError: No list of ``num_hidden_layers`` modules is found.
    """
    n_layers = text_config(target).num_hidden_layers
    # What get_decoder() finds may be a head of that name (ModernBERT), hence the second root.
    for root in (target.get_decoder(), target.base_model):
        found = {
            name: module
            for name, module in root.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == n_layers
        }
        if found:
            # The outermost: an image encoder inside the decoder may have as many (Idefics).
            return list(found[min(found, key=lambda name: name.count("."))])
    raise NotImplementedError(
        f"`{type(target).__name__}` keeps its {n_layers} decoder layers in no module list that "
        "could be found, so its hidden states cannot be tapped. Please report the model family."
    )


class TargetTaps:
    """Records the outputs of the tapped layers.

    Hooks serve every family and every transformers release alike, keep only the tapped layers,
    and read the residual stream before the final norm also at the last layer, as serving engines
    do. They hang on the target while this object is entered, and record while `recording` is.
    Two threads may decode with one target: each records its own forwards only.

    Args:
        target: The target model.
        layer_ids: 0-based decoder layers; id k is the output of layer k, ``hidden_states[k + 1]``.
    """

    def __init__(self, target: Any, layer_ids: Sequence[int]) -> None:
        layers = decoder_layers(target)
        self._layers = [layers[i] for i in layer_ids]
        self._rows: list[list[Tensor]] = [[] for _ in layer_ids]
        self._thread: int | None = None  # the one that records
        self._hooks: list[Any] = []

    def __enter__(self) -> TargetTaps:
        for layer, rows in zip(self._layers, self._rows, strict=True):
            self._hooks.append(layer.register_forward_hook(self._recorder(rows)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the forwards of this thread while entered.

        Not for longer than the decode loop's own forward: processors (guidance), criteria and
        streamers may run the target too.
        """
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None

    def _recorder(self, rows: list[Tensor]) -> Any:
        def record(_module: nn.Module, _args: Any, output: Any) -> None:
            if threading.get_ident() == self._thread:
                rows.append(output[0] if isinstance(output, tuple) else output)

        return record

    def take(self) -> list[Tensor]:
        """One tensor (N, S, Ht) a tap, of everything that was recorded since the last call.

        Raises:
            NotImplementedError: Layers return something else, several streams say (Gemma 3n).
        """
        taps = [rows[0] if len(rows) == 1 else torch.cat(rows, dim=1) for rows in self._rows]
        for rows in self._rows:
            rows.clear()
        if taps[0].dim() != 3:
            raise NotImplementedError(
                "Layers of the target must return hidden states (batch, tokens, width) to be "
                f"tapped, got {tuple(taps[0].shape)}. Use plain generate()."
            )
        return taps


def noise_embeddings(target: Any, token_ids: Tensor, scale: float) -> Tensor:
    """Embed anchor and mask tokens as the drafter was trained to read them.

    That is ``scale`` times the raw rows of the target's table. The table is called as a module,
    since it may be quantised, offloaded or adapted; a scale of its own (Gemma 3) is divided out.

    Args:
        target: The target model.
        token_ids: (N, B) int64.
        scale: ``config.input_embedding_scale`` of the drafter.

    Returns:
        (N, B, H).
    """
    table = target.get_input_embeddings()
    if hasattr(table, "embed_norm"):  # Muse Glimmer norms inside its table; drafters read raw rows
        embeds = F.embedding(token_ids.to(table.weight.device), table.weight)
    else:
        embeds = table(token_ids.to(input_device(table, token_ids.device)))
        own_scale = getattr(table, "scalar_embed_scale", None)
        scale = scale if own_scale is None else scale / own_scale
    return embeds if scale == 1.0 else embeds * scale


def draft_logits(target: Any, hidden_states: Tensor, config: Any) -> Tensor:
    """Logits of draft slots by the target's own head, on the head's device.

    Args:
        target: The target model.
        hidden_states: (N, K, H) from the drafter.
        config: The drafter's config: ``output_multiplier`` and ``final_logit_softcapping``.

    Returns:
        (N, K, V).
    """
    head = target.get_output_embeddings()
    hidden_states = hidden_states.to(input_device(head, hidden_states.device), target.dtype)
    return scaled_logits(head(hidden_states), config)


def scaled_logits(logits: Tensor, config: Any) -> Tensor:
    """Multiply and soft-cap what the head gave, as the drafter's config says."""
    if config.output_multiplier != 1.0:
        logits = logits * config.output_multiplier
    cap = config.final_logit_softcapping
    return logits if cap is None else torch.tanh(logits / cap) * cap


def input_device(module: nn.Module, otherwise: torch.device) -> torch.device:
    """Where a module wants its input; weights that are offloaded are moved by its own hooks."""
    weight = next(module.parameters(), None)
    return otherwise if weight is None or weight.device.type == "meta" else weight.device


def roll_back(cache: Any, n_removed: int) -> None:
    """Take the last ``n_removed`` slots out of the target's cache.

    Called also with 0: a layer that records its past drops what has left its window here.
    """
    for layer in cache.layers:
        _crop(layer, n_removed)


def roll_back_to(cache: Any, n_slots: int) -> None:
    """Cut the target's cache to its first ``n_slots`` slots, even if a forward was interrupted.

    Layers may then hold different numbers of slots. Slower than `roll_back` for a static cache,
    which keeps its length on the device.
    """
    for layer in cache.layers:
        if hasattr(layer, "get_seq_length"):
            _crop(layer, max(int(layer.get_seq_length()) - n_slots, 0))
        elif hasattr(layer, "conv_states"):  # recorded since it was last rolled back
            _crop(layer, max(layer.conv_states[0].shape[-1] - layer.conv_kernel_size[0], 0))


def _crop(layer: Any, n_removed: int) -> None:
    if hasattr(layer, "crop"):
        layer.crop(-n_removed)
    else:  # static layers before transformers 5.24: later rows overwrite those past the length
        layer.cumulative_length.sub_(n_removed)


def refuse_recurrent(cache: Any) -> None:
    """Refuse a cache that a forward has left with a recurrent state: no draft can leave that again.

    Most such targets are known by their class and refused before any forward.

    Raises:
        NotImplementedError: A layer keeps a recurrent state.
    """
    for layer in cache.layers:
        if any(getattr(layer, "is_recurrent_states_initialized", {}).values()):
            raise NotImplementedError(
                f"A `{type(layer).__name__}` keeps a recurrent state, which cannot be rolled back "
                "to the accepted tokens. Use plain generate()."
            )


def forget_past(cache: Any) -> None:
    """Let windowed layers drop at once what leaves the window, as they did before decoding.

    A cache that went on recording would keep the whole prompt of the next turn.
    """
    for layer in cache.layers:
        if hasattr(layer, "record_past"):
            layer.record_past = False


def check_pair(target: Any, config: Any) -> None:
    """Refuse a drafter that was made for another target, before any work.

    Args:
        target: The target model.
        config: The drafter's config.

    Raises:
        ValueError: Widths, depth, vocabulary, taps or the mask token do not fit; or the target
            has no output head.
    """
    text = text_config(target)
    if target.get_output_embeddings() is None:
        raise ValueError(
            f"`{type(target).__name__}` has no output embeddings, so drafts cannot be scored. "
            "Load it with its language-model head (AutoModelForCausalLM)."
        )
    pairs = [
        ("target_hidden_size", config.target_hidden_size, text.hidden_size),
        ("vocab_size", config.vocab_size, text.vocab_size),
        ("num_target_layers", config.num_target_layers, text.num_hidden_layers),
    ]
    for name, wanted, got in pairs:
        if wanted is not None and wanted != got:
            raise ValueError(
                f"The drafter was made for another target: its `{name}` is {wanted}, this "
                f"{type(target).__name__} has {got}. Load the drafter of this target."
            )
    n_layers = text.num_hidden_layers
    n_rows, width = target.get_input_embeddings().weight.shape
    if not all(0 <= i < n_layers for i in config.target_layer_ids):
        raise ValueError(
            f"`target_layer_ids` must be layers of the target (0..{n_layers - 1}), got "
            f"{list(config.target_layer_ids)}. Load the drafter of this target."
        )
    if not 0 <= config.mask_token_id < n_rows:
        raise ValueError(
            f"`mask_token_id` {config.mask_token_id} is no row of the target's embedding "
            f"({n_rows} rows). Load the drafter of this target, or resize_token_embeddings()."
        )
    if width != config.hidden_size:
        raise ValueError(
            f"The drafter's `hidden_size` {config.hidden_size} is not the width of the target's "
            f"embedding ({width}). Load the drafter of this target."
        )
