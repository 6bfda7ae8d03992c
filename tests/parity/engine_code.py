"""Run single files of an engine without the rest of it, to ask them how they read a folder.

Run as a script in a process of its own: servers' packages need a GPU's libraries to be imported
whole. What is asked are functions of config files alone; everything else that their files import
is a stand-in that does nothing. Prints one JSON object.

    python engine_code.py sglang|vllm INSTALLED_AT FOLDER...
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class _NamesAsStrings(type):
    """Members of a stand-in for an enumeration are their own names."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _StandIn(metaclass=_NamesAsStrings):
    """Anything that a file imports and that is not asked: class, decorator, function, False."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> str:
        return type(self).__getattr__(type(self), name)


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of some packages, empty but for stand-ins."""

    def __init__(self, *packages: str) -> None:
        self.packages = packages

    def find_spec(self, name: str, *_: Any) -> Any:
        if name.partition(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        def member(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (_StandIn,), {})

        module = types.ModuleType(spec.name)
        module.__getattr__ = member  # type: ignore[method-assign]
        return module

    def exec_module(self, module: Any) -> None:
        pass


def load(root: Path, name: str) -> Any:
    """Run a file of the engine for real; what it imports of the engine is there or a stand-in."""
    path = root / (name.replace(".", "/") + ".py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def read_with_sglang(root: Path, folder: str) -> dict[str, Any]:
    from transformers import AutoConfig

    utils = load(root, "sglang.srt.speculative.dflash_utils")
    model = load(root, "sglang.srt.models.dflash")
    config = AutoConfig.from_pretrained(folder)
    parsed = utils.parse_dflash_draft_config(draft_hf_config=config)
    layers = range(config.num_hidden_layers)
    return {
        "block_size": parsed.resolve_block_size(default=16),
        "mask_token_id": parsed.mask_token_id,
        "target_layer_ids": parsed.resolve_target_layer_ids(target_num_layers=4),
        "num_target_layers": parsed.num_target_layers,
        "layers": [model._get_dflash_layer_attention_params(config, i) for i in layers],
        "architectures": [cls.__name__ for cls in model.EntryClass],
    }


def read_with_vllm(root: Path, folder: str) -> dict[str, Any]:
    from transformers import AutoConfig, PreTrainedConfig

    eagle = load(root, "vllm.transformers_utils.configs.eagle")
    load(root, "vllm.transformers_utils.configs.speculators.algos")
    base = load(root, "vllm.transformers_utils.configs.speculators.base")
    base.without_trust_remote_code = dict
    model = load(root, "vllm.model_executor.models.qwen3_dflash")
    taps = load(root, "vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils")
    raw, _ = PreTrainedConfig.get_config_dict(folder)
    n_drafts = None
    if "speculators_model_type" in raw:
        config = base.SpeculatorsConfig.from_pretrained(folder)
        n_drafts = base.SpeculatorsConfig.extract_vllm_speculative_config(raw)
    else:
        config = eagle.EAGLEConfig(
            AutoConfig.from_pretrained(folder), method="dflash", model_type="eagle"
        )
    draft = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config))
    return {
        "architectures": config.architectures,
        "taps": taps.get_eagle3_aux_layers_from_config(draft),
        "mask_token_id": (getattr(config, "dflash_config", None) or {}).get("mask_token_id")
        or getattr(config, "mask_token_id", None),
        "layers": [
            model._resolve_layer_attention(config, i) for i in range(config.num_hidden_layers)
        ],
        "rope_theta": config.rope_parameters["rope_theta"],
        "speculative": n_drafts,
    }


def main(engine: str, root: str, *folders: str) -> None:
    """Print what the engine reads in each folder."""
    import torch  # noqa: F401  # before the stand-ins: theirs are not meant for it
    import transformers.models.qwen3  # noqa: F401

    sys.meta_path.insert(0, StandIns("sglang", "vllm", "flashinfer"))
    read = {"sglang": read_with_sglang, "vllm": read_with_vllm}[engine]
    answers: dict[str, Any] = {}
    for folder in folders:
        try:
            answers[folder] = read(Path(root), folder)
        except ValueError as error:  # the engine refuses it
            answers[folder] = {"error": str(error), "layers": []}
    print(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
