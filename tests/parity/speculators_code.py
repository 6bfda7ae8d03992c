"""Load a folder with the speculators package itself; run in a process of its own.

What it needs to regenerate data (`datasets`, `openai`) is imported by its training code alone, and
is a stand-in here. Prints one JSON object.

    python speculators_code.py SAVE_TO FOLDER...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers.models.qwen3  # noqa: F401
from engine_code import StandIns


def read(folder: str, save_to: str) -> dict[str, Any]:
    """Load the model completely, save it again, and say what was read."""
    from speculators import DFlashDraftModel, SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model, info = DFlashDraftModel.from_pretrained(folder, config=config, output_loading_info=True)
    assert not any(info.values()), info
    held = {n: t for n, t in model.state_dict().items() if not n.startswith("verifier_")}
    torch.save(held, f"{save_to}.pt")
    model.save_pretrained(save_to)
    decoder = config.transformer_layer_config
    return {
        "taps": config.aux_hidden_state_layer_ids,
        "block_size": config.block_size,
        "mask_token_id": model.mask_token_id,
        "draft_vocab_size": config.draft_vocab_size,
        "layer_types": decoder.layer_types,
        "sliding_window": decoder.sliding_window,
        "non_causal": config.sliding_window_non_causal,
        "rope": decoder.rope_parameters,
        "proposal": config.speculators_config.proposal_methods[0].speculative_tokens,
        "verifier": config.speculators_config.verifier.name_or_path,
    }


def main(save_to: str, *folders: str) -> None:
    """Print what the package reads in each folder."""
    sys.meta_path.append(StandIns("datasets", "openai"))
    answers = {folder: read(folder, f"{save_to}/{Path(folder).name}") for folder in folders}
    print(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
