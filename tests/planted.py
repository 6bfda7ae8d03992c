"""Drafters' folders with one fault each, for `doctor` to find.

A planter is given a path that does not exist and makes the folder there, or returns another path.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import published_folders as folders
from hf_dflash.convert import convert
from pairs import random_drafter, tiny_target

Planter = Callable[[Path], Any]
SLIDING, FULL = "sliding_attention", "full_attention"
NESTED = {"block_size": 8, "mask_token_id": 95, "target_layer_ids": [0, 2]}


def ours(folder, **overrides):
    drafter = random_drafter(tiny_target(), num_target_layers=4, **overrides)
    drafter.to(torch.bfloat16).save_pretrained(folder)
    return folder


def config(**changes):
    """A drafter as this package saves it, with changes to its config.json."""

    def plant(folder):
        folders.edit_config(ours(folder), **changes)

    return plant


def nested(**changes):
    content = {**NESTED, **changes}
    return config(dflash_config={k: v for k, v in content.items() if v != "DELETE"})


def tensors(change, **overrides):
    def plant(folder):
        folders.edit_tensors(ours(folder, **overrides), change)

    return plant


def file(name, content):
    def plant(folder):
        (ours(folder) / name).write_text(content)

    return plant


def remove(name):
    def plant(folder):
        (ours(folder) / name).unlink()

    return plant


def published(make, *args, **changes):
    return lambda folder: make(folder, *args, **changes)


def speculators(**changes):
    return lambda folder: folders.speculators(folder, tiny_target(), "org/t", **changes)


def native(change=None, **changes):
    def plant(folder):
        ours(folder / "ours")
        convert(folder / "ours", folder / "d", to="native")
        folders.edit_config(folder / "d", **changes)
        if change is not None:
            folders.edit_tensors(folder / "d", change)
        return folder / "d"

    return plant


def truncate(folder):
    path = ours(folder) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def cast(dtype, *names):
    def change(content):
        for name in names or list(content):
            content[name] = content[name].to(dtype)

    return change


def prefix(content):
    for name in list(content):
        content[f"model.{name}"] = content.pop(name)
