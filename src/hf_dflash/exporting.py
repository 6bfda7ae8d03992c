"""Write the trained drafter as it is published: whole, strict to load, with a card."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpointing import PART_FOLDER, publish_files

_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- dflash
- speculative-decoding
- block-diffusion
{base_model}---

# {name}

A {architecture} drafter for {target}: with it, `generate()` makes the same tokens in fewer
forwards of the target.

```python
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained("{target}", dtype="auto", device_map="auto")
tokenizer = AutoTokenizer.from_pretrained("{target}")
drafter = AutoModel.from_pretrained("{name}", trust_remote_code=True, dtype="auto")
drafter.to(target.device)
inputs = tokenizer("Hello", return_tensors="pt").to(target.device)
target.generate(**inputs, assistant_model=drafter, max_new_tokens=64)
```

## Training

| setting | value |
|---|---|
{settings}

## Evaluation

{evaluation}
"""


def export_drafter(
    drafter: Any, state: Mapping[str, Tensor], folder: Path, dtype: str | None
) -> None:
    """Save weights as a published drafter, file by file complete.

    Args:
        drafter: Whose config and drafting policy to write.
        state: All its weights.
        folder: Where to.
        dtype: Of the file; `None`: as they are.
    """
    kept = None if dtype is None else getattr(torch, dtype)
    with torch.device("meta"):  # neither memory nor random numbers are spent on what is replaced
        exported = type(drafter)(copy.deepcopy(drafter.config))
    weights = {name: t.detach().cpu().to(kept or t.dtype) for name, t in state.items()}
    exported.load_state_dict(weights, strict=True, assign=True)
    exported.generation_config = drafter.generation_config
    part = folder / f"{PART_FOLDER}_export"
    shutil.rmtree(part, ignore_errors=True)
    exported.save_pretrained(part)
    publish_files(part, folder)


def write_card(
    folder: Path,
    *,
    name: str,
    architecture: str,
    target: str | None,
    settings: Mapping[str, Any],
    metrics: Mapping[str, float],
) -> None:
    """Write the stub of a model card, to be completed with data and figures.

    Args:
        folder: Of the drafter.
        name: Of the repository.
        architecture: "dflash" or "dflare".
        target: Name of the target's repository, if it has one.
        settings: Of the training run.
        metrics: Of the last evaluation.
    """
    rows = "\n".join(f"| {key} | {value} |" for key, value in settings.items())
    figures = "\n".join(f"* {key}: {value:.4g}" for key, value in metrics.items())
    card = _CARD.format(
        base_model=f"base_model: {target}\n" if target else "",
        name=name,
        architecture={"dflash": "DFlash", "dflare": "DFlare"}[architecture],
        target=target or "its target",
        settings=rows,
        evaluation=figures or "Not evaluated yet.",
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
