"""Loading and saving a drafter strictly: what is in the files, and whether it is all of it.

The weights of z-lab's format and of transformers' own block drafter differ in two names only.
Everything else that a file holds beyond the drafter's tensors, or lacks, is an error that names it:
serving engines drop unknown tensors silently, and what is left drafts badly and says nothing.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import cached_file

from .formats_dflash import REFUSED_FORMATS, detect_format

#: Other names of our tensors: vLLM's prefix, the native class, and training code of DFlare.
KEY_MAPPING = {
    r"^model\.": "",
    r"^encoder\.fc\.": "fc.",
    r"^encoder\.output_norm_enc\.": "hidden_norm.",
    r"^context_proj\.": "fc.",
    r"^context_norm\.": "hidden_norm.",
    r"^final_norm\.": "norm.",
}
SAFE_NAMES = ("model.safetensors", "model.safetensors.index.json")
PICKLE_NAMES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
#: Arguments of `from_pretrained` that say where the files are.
HUB_OPTIONS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "token",
    "revision",
    "subfolder",
    "proxies",
)
#: Options of the drafter's generation config that mean something to it.
POLICY = {
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "temperature",
    "draft_tree_nodes",
}
#: Found in every generation config; they describe the tokenizer or the file.
DESCRIPTIVE = {
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "transformers_version",
    "_from_model_config",
}


def strict_loading_options(source: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Look at a checkpoint before transformers does, and complete `from_pretrained`'s arguments.

    Args:
        source: Folder or repository.
        options: The keyword arguments given by the user.

    Returns:
        Keyword arguments under which transformers loads every known spelling of the names, from
        safetensors only, and reports what does not fit instead of passing over it.

    Raises:
        ValueError: If the format is not one this package reads, the weights are pickled,
            truncated or absent, or an option would load less than everything.
        FileNotFoundError: If `source` is the path of a folder that does not exist.
    """
    for name, wanted in (("ignore_mismatched_sizes", False), ("use_safetensors", True)):
        if options.get(name) not in (None, wanted):
            raise ValueError(
                f"`{name}`={options[name]} is not supported: a drafter is loaded completely, from "
                "safetensors. Leave it out."
            )
    if options.get("gguf_file") is not None:
        raise ValueError("`gguf_file` is not supported: a drafter is loaded from safetensors.")
    complete = {
        **options,
        "use_safetensors": True,
        "ignore_mismatched_sizes": True,  # reported by `check_loading_info`, with all the rest
        "key_mapping": KEY_MAPPING | (options.get("key_mapping") or {}),
    }
    if source is None:  # the weights come as `state_dict`
        return complete
    _check_source(source, options)
    names = [name for path in weight_files(source, options) for name in tensor_headers_of(path)]
    given = options.get("config")
    raw = given.to_dict() if isinstance(given, PreTrainedConfig) else _raw_config(source, options)
    kind = detect_format(raw, names)
    if kind in REFUSED_FORMATS:
        raise ValueError(f"The checkpoint {source} is {REFUSED_FORMATS[kind]}.")
    if isinstance(given, PreTrainedConfig):
        _check_given_config(given, kind)
    elif kind == "dflare":
        complete["architecture"] = "dflare"  # the tensors know better than the class name
    return complete


def check_folder_exists(source: Any, argument: str, options: Mapping[str, Any]) -> None:
    """Refuse a mistyped folder, of which transformers says that it is no good repository name.

    "a/b" may be in the Hub though there is a folder "a": that is refused if the Hub has none.

    Args:
        source: Folder or repository.
        argument: Name of the argument, for the message.
        options: Arguments of `from_pretrained`.

    Raises:
        FileNotFoundError: If `source` looks like a path, and no folder is there.
    """
    text = os.fspath(source)
    path = Path(text)
    if path.is_dir():
        return
    needed = f"`{argument}` must be a folder or a Hub repository, but there is no folder {text}"
    if path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1:
        raise FileNotFoundError(f"{needed}. Check the path, and write `~` in full.")
    if "/" in text and path.parent.is_dir():
        try:
            cached_file(source, "config.json", **_hub_options(options))
        except OSError as error:
            raise FileNotFoundError(f"{needed}, nor a repository: {error}") from error


def check_loading_info(info: Mapping[str, Any], source: Any) -> None:
    """Raise if anything of the checkpoint or of the drafter was left over.

    Args:
        info: What transformers reports with `output_loading_info`.
        source: Folder or repository, for the message.

    Raises:
        ValueError: Naming every missing, unexpected and wrongly shaped tensor.
    """
    problems = [
        _listed("missing", sorted(info["missing_keys"])),
        _listed("unexpected", sorted(info["unexpected_keys"])),
        _listed(
            "wrongly shaped",
            [
                f"{name} {tuple(found)} instead of {tuple(wanted)}"
                for name, found, wanted in sorted(info["mismatched_keys"])
            ],
        ),
        _listed("unreadable", list(info.get("error_msgs") or ())),
    ]
    found = "; ".join(problem for problem in problems if problem)
    if found:
        raise ValueError(
            f"The tensors of {source} must be exactly those its config.json asks for. {found}. "
            "Check `num_hidden_layers`, `target_layer_ids`, `attention_bias` and the sizes in "
            "config.json, or get the files anew; if they are of another kind of model, use the "
            "drafter's own repository."
        )


def read_generation_config(source: Any, options: Mapping[str, Any]) -> GenerationConfig:
    """Return the drafting policy saved with a drafter, an empty one if none was saved.

    Raises:
        ValueError: If the file cannot be read as one.
    """
    given = options.get("generation_config")
    if isinstance(given, GenerationConfig):
        return given
    path = None if source is None else _find(source, "generation_config.json", options)
    if path is None:
        return GenerationConfig()
    content = _json_object(path)
    # Set afterwards: on its own, transformers takes a temperature for a forgotten `do_sample`.
    temperature = content.pop("temperature", None)
    try:
        config = GenerationConfig(**content)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no generation config: {error}. Correct it, or delete the file for the "
            "drafter's defaults."
        ) from error
    config.temperature = temperature
    return config


def _json_object(path: str | Path) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # of the JSON or of its encoding
        raise ValueError(
            f"{path} is not valid JSON ({error}). Correct it, or get the file anew."
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {content!r:.80}. Get the file anew.")
    return content


def save_generation_config(generation_config: GenerationConfig, folder: str | Path) -> None:
    """Write the drafting policy, which its own `save_pretrained` refuses to (see above)."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    generation_config.to_json_file(path / "generation_config.json", use_diff=True)


def validate_generation_config(generation_config: GenerationConfig, block_size: int) -> None:
    """Check the drafting policy. Called when a drafter is loaded, saved, and used.

    Args:
        generation_config: The drafter's own.
        block_size: B; at most B - 1 tokens can be drafted.

    Raises:
        ValueError: If an option is unknown or out of range.
        NotImplementedError: If a schedule or a tree is asked for.
    """
    given = generation_config.to_diff_dict()
    unknown = sorted(given.keys() - POLICY - DESCRIPTIVE)
    if unknown:
        raise ValueError(
            f"Options {unknown} of the drafter's `generation_config` mean nothing to a drafter "
            f"({sorted(POLICY)} do). Pass them to generate(), which applies them to both models."
        )
    n_drafts = given.get("num_assistant_tokens")
    if n_drafts is not None and not (_is_int(n_drafts) and 1 <= n_drafts < block_size):
        raise ValueError(
            f"`num_assistant_tokens` must be in 1..{block_size - 1} for a drafter with block size "
            f"{block_size}, got {n_drafts}. Leave it out for all of them."
        )
    threshold = given.get("assistant_confidence_threshold")
    if threshold is not None and not (_is_number(threshold) and 0 <= threshold <= 1):
        raise ValueError(
            f"`assistant_confidence_threshold` must be in [0, 1], got {threshold}. Leave it out "
            "to draft the whole block."
        )
    temperature = given.get("temperature")
    if temperature is not None and not (_is_number(temperature) and temperature >= 0):
        raise ValueError(
            f"`temperature` of the drafter must be 0 (its most likely tokens) or more, got "
            f"{temperature}. Leave it out for the temperature of the call."
        )
    schedule = given.get("num_assistant_tokens_schedule")
    if schedule not in (None, "constant"):
        raise NotImplementedError(
            f'`num_assistant_tokens_schedule` must be "constant", got {schedule!r}. Set it so in '
            "`drafter.generation_config`."
        )
    if given.get("draft_tree_nodes"):
        raise NotImplementedError(
            f"`draft_tree_nodes` must be 0 (a chain), got {given['draft_tree_nodes']}. Trees are "
            "not supported yet; set it so in `drafter.generation_config`."
        )


def tensor_headers_of(path: Path) -> dict[str, dict[str, Any]]:
    """Read what a safetensors file holds, after checking that the file is whole.

    Returns:
        By name `dtype` (as safetensors spells it) and `shape` of every tensor.

    Raises:
        ValueError: If the file is cut short or is not a safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start == b"version ":
            raise ValueError(
                f"{path} is a Git LFS pointer, not the weights. Run `git lfs pull` in its folder."
            )
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else math.inf
        header = file.read(int(length)) if 8 + length <= size else b""
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, TypeError, KeyError, AttributeError):
        end, entries = math.inf, {}
    if 8 + length + end != size:
        raise ValueError(
            f"{path} ({size} bytes) is truncated or is not a safetensors file. Download or save "
            "it again."
        )
    return dict(entries)


def weight_files(source: Any, options: Mapping[str, Any]) -> list[Path]:
    """Find the safetensors files of a checkpoint: one, or all that its index lists.

    Args:
        source: Folder or repository.
        options: Arguments of `from_pretrained`.

    Raises:
        ValueError: If there are none, or one that the index lists is missing.
    """
    variant = options.get("variant")
    single, index = (_with_variant(name, variant) for name in SAFE_NAMES)
    path = _find(source, single, options)
    if path is not None:
        return [Path(path)]
    path = _find(source, index, options)
    if path is None:
        raise ValueError(_no_weights(source, single, options))
    shards = _json_object(path).get("weight_map")
    if not isinstance(shards, dict):
        raise ValueError(f"{path} must have a `weight_map`, got {shards!r:.80}. Get it anew.")
    files = []
    for shard in sorted(set(shards.values())):
        shard_path = _find(source, shard, options)
        if shard_path is None:
            raise ValueError(
                f"`{shard}` is missing from {source}, although {index} lists it. Download it again."
            )
        files.append(Path(shard_path))
    return files


def _no_weights(source: Any, wanted: str, options: Mapping[str, Any]) -> str:
    pickled = [name for name in PICKLE_NAMES if _find(source, name, options) is not None]
    if pickled:
        return (
            f"{source} has its weights in {pickled[0]} only. Unpickling runs code from the file, "
            "so it is not read. Convert it once: `safetensors.torch.save_file(torch.load(path, "
            f'weights_only=True), "{wanted}", metadata={{"format": "pt"}})`.'
        )
    return (
        f"`pretrained_model_name_or_path` must be a folder or repository with config.json and "
        f"{wanted}, but {source} has no {wanted}. Check the path, and `subfolder` or `revision`."
    )


def _find(source: Any, name: str, options: Mapping[str, Any]) -> str | None:
    found: str | None = cached_file(
        source, name, _raise_exceptions_for_missing_entries=False, **_hub_options(options)
    )
    return found


def _check_source(source: Any, options: Mapping[str, Any]) -> None:
    if Path(source).is_dir():
        path = _find(source, "config.json", options)
        if path is None:
            raise ValueError(
                "`pretrained_model_name_or_path` must be a folder or repository with config.json "
                f"and model.safetensors, but {source} has no config.json. Save drafters with "
                "save_pretrained, which writes both."
            )
        _json_object(path)
    else:
        check_folder_exists(source, "pretrained_model_name_or_path", options)
        # transformers' own errors: not reachable, no such repository, gated.
        cached_file(source, "config.json", **_hub_options(options))


def _raw_config(source: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    path = options.get("config") or source
    raw, _ = PreTrainedConfig.get_config_dict(path, **_hub_options(options))
    return dict(raw)


def _hub_options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: options[key] for key in HUB_OPTIONS if options.get(key) is not None}


def _check_given_config(config: PreTrainedConfig, kind: str) -> None:
    architecture = getattr(config, "architecture", None)
    if architecture is None:
        raise TypeError(
            f"`config` must be a DFlashConfig, got {type(config).__name__}. Leave it out to read "
            "it from the checkpoint."
        )
    if (architecture == "dflare") != (kind == "dflare"):
        raise ValueError(
            f'`config.architecture` is "{architecture}" but the checkpoint holds a '
            f'"{kind}" drafter. Leave `config` out to read it from the checkpoint.'
        )


def _with_variant(name: str, variant: str | None) -> str:
    return name if variant is None else name.replace(".safetensors", f".{variant}.safetensors", 1)


def _listed(what: str, names: Iterable[str], most: int = 12) -> str:
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{len(names)} {what}: {', '.join(names[:most])}{more}" if names else ""


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
