"""Adapters of drafters (PEFT) as they are published: what their folder says, its card, its checks.

A card is made of the files of the folder alone, so it can be made again and compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from .card_blocks import write_block
from .card_sections import PAPERS, is_repository, table, target_link
from .checkpoint_dflash import tensor_headers_of
from .findings import ARCHITECTURES, short_name
from .measurement import write_whole
from .model_card import CARD_NAME, CardOptions
from .modeling_dflash import DFlashDraftModel
from .old_card import GENERATED, check_notes, known_notes, notes_section, of_old, old_card
from .provenance import published_name
from .training_log import TRAINING_LOG_NAME, read_training_log

ADAPTER_CONFIG_NAME = "adapter_config.json"
ADAPTER_WEIGHTS_NAME = "adapter_model.safetensors"
#: Stand for places that no file tells; a push puts the adapter's in.
_PLACE, _DRAFTER, _TARGET = "<adapter>", "<drafter>", "<target>"
_OWN_NAME = re.compile(r'PeftModel\.from_pretrained\(\s*drafter, "([^"\n]*)"')
_OWN_TARGET = re.compile(r'AutoModelForCausalLM\.from_pretrained\(\s*"([^"\n]*)"')

_BODY = """\
# {title}

An adapter ({kind}, [PEFT](https://huggingface.co/docs/peft)) of {drafter_words}, trained for \
{target_words}. It is added to that drafter's weights and is of no use without them, nor for \
another target.

## Use

```python
from hf_dflash import DFlashDraftModel
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained("{target}", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("{target}")
# in float32, because half precision would round the adapter's small changes away
drafter = DFlashDraftModel.from_pretrained("{drafter}", dtype="float32")
drafter = PeftModel.from_pretrained(
    drafter, "{name}"
).merge_and_unload()
drafter = drafter.to(target.dtype)
chat = [{{"role": "user", "content": "Count from 1 to 20."}}]
inputs = tokenizer.apply_chat_template(
    chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=64)
print(tokenizer.decode(output[0]))
```

{placeholders}## Merge and serve

Serving engines take a whole drafter, not an adapter of one. The drafter above is whole:

```python
drafter.save_pretrained("merged-drafter")
```

`hf-dflash doctor merged-drafter` says which engines load it, and the commands that serve it.

## Measured

Not measured: figures are of a whole drafter. Measure the merged one with `hf-dflash bench`.

## Training

{training}
## Limits

* It fits one drafter and one target. On another drafter of the same shapes it loads, and spoils it.
* The text does not depend on it, the speed does: where drafts are mostly rejected, it costs time.

## Details

{details}"""


@dataclass(frozen=True, slots=True)
class Adapter:
    """What the files of an adapter's folder say."""

    config: Mapping[str, Any]  # PEFT's
    drafter: str | None  # the name that the drafter it belongs to may be published under
    architecture: str | None  # of the drafter; None: no file tells
    target: str | None


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and no whole drafter."""
    return (folder / ADAPTER_CONFIG_NAME).is_file() and not (folder / "config.json").is_file()


def read_adapter(folder: Path) -> Adapter:
    """Read the files of an adapter's folder that its card tells of.

    Raises:
        ValueError: One of them is not what its place says.
    """
    path = folder / ADAPTER_CONFIG_NAME
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be JSON written by PEFT: {error}.") from error
    if not isinstance(config, dict) or not config.get("peft_type"):
        raise ValueError(f"{path} must be an adapter's config of PEFT, but names no `peft_type`.")
    made_for = (config.get("auto_mapping") or {}).get("base_model_class")
    if made_for not in (None, DFlashDraftModel.__name__):
        raise ValueError(
            f"{path} must be of an adapter of a drafter, but its `base_model_class` is {made_for}."
        )
    drafter = config.get("base_model_name_or_path")
    log_path = folder / TRAINING_LOG_NAME
    log = read_training_log(log_path) if log_path.is_file() else None
    architecture = None if log is None else log.settings.get("architecture")
    if architecture not in (None, *ARCHITECTURES):
        raise ValueError(
            f"{log_path}: `architecture` must be one of {', '.join(ARCHITECTURES)}, got "
            f"{architecture!r}."
        )
    return Adapter(
        config,
        published_name(drafter) if drafter else None,
        None if architecture is None else str(architecture),
        None if log is None else log.target,
    )


def write_adapter_card(folder: Path, options: CardOptions | None = None) -> Path:
    """Write README.md into an adapter's folder.

    Args:
        folder: Of the adapter, as PEFT and `DFlashTrainer.save_model` write it.
        options: What no file tells; ``code`` does not matter.

    Returns:
        Path of the card.

    Raises:
        ValueError: A file is not what its place says, the card that is there has no mark of this
            generator, or the notes hold a figure.
    """
    options = options or CardOptions()
    path = folder / CARD_NAME
    old = old_card(path, overwrite=options.overwrite)
    adapter = read_adapter(folder)
    check_notes(options.notes)
    options = replace(
        options,
        name=options.name or _name_in(old),
        target=options.target or adapter.target or _target_in(old),
        licence=options.licence or of_old(old, "license"),
        notes=options.notes or known_notes(old),
    )
    metadata = _metadata(adapter, options)
    write_whole(path, f"---\n{metadata.to_yaml()}\n---\n\n{_body(folder, adapter, options)}")
    return path


def check_adapter(folder: Path) -> None:
    """Make sure that an adapter's files can be read, and that its card says only what they say.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file cannot be read, or the card is not the one that is made of the others.
    """
    for name in (ADAPTER_WEIGHTS_NAME, CARD_NAME):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder} has no {name}. Save the adapter with `DFlashTrainer.save_model` or "
                f"PEFT's `save_pretrained`, and write its card: `hf-dflash card {folder}`."
            )
    tensor_headers_of(folder / ADAPTER_WEIGHTS_NAME)
    adapter, card = read_adapter(folder), ModelCard.load(folder / CARD_NAME)
    options = CardOptions(
        name=_name_in(card),
        target=_target_in(card),
        licence=of_old(card, "license"),
        notes=known_notes(card),
    )
    check_notes(options.notes)
    is_same = card.text.strip() == _body(folder, adapter, options).strip()
    if not is_same or card.data.to_dict() != _metadata(adapter, options).to_dict():
        raise ValueError(
            f"{folder / CARD_NAME} is not the card that is made of the files beside it: it was "
            "edited, or another version of hf-dflash or another program wrote it. Write it again: "
            f"`hf-dflash card {folder} --overwrite`; text of your own goes into --notes."
        )


def published_adapter_config(folder: Path) -> bytes:
    """PEFT's config, with the drafter by its name where it has the drafter's path here."""
    adapter = read_adapter(folder)
    config = {**adapter.config, "base_model_name_or_path": adapter.drafter}
    return (json.dumps(config, indent=2) + "\n").encode()


def adapter_with_place(card: str, place: str) -> str:
    """A card whose readers load the adapter from ``place``, if it left that open."""
    note = _PLACEHOLDERS[_PLACE]
    if note not in card:
        return card
    named = re.sub(r"^# .*$", f"# {short_name(place)}", card, count=1, flags=re.MULTILINE)
    return named.replace(note, "").replace(_PLACE, place)


#: What is said of each name that is not known.
_PLACEHOLDERS = {
    _PLACE: f"`{_PLACE}` stands for the folder or repository that this card lies in.\n\n",
    _DRAFTER: f"`{_DRAFTER}` stands for the folder or repository of the drafter.\n\n",
    _TARGET: f"`{_TARGET}` stands for the folder or repository of the target.\n\n",
}


def _on_hub(name: str | None) -> str | None:
    """A model's name if readers can load it by that."""
    return name if name is not None and is_repository(name) else None


def _body(folder: Path, adapter: Adapter, options: CardOptions) -> str:
    places = {
        _PLACE: options.name,
        _DRAFTER: _on_hub(adapter.drafter),
        _TARGET: _on_hub(options.target),
    }
    log = folder / TRAINING_LOG_NAME
    known = adapter.architecture is not None
    kind = f"{ARCHITECTURES[str(adapter.architecture)]} drafter" if known else "drafter"
    unnamed = f"{adapter.config['peft_type']} adapter of a {kind}"
    body = _BODY.format(
        title=short_name(options.name) if options.name else unnamed,
        kind=adapter.config["peft_type"],
        drafter_words=_words(f"the {kind}", adapter.drafter),
        target_words=_words("the target", options.target),
        name=places[_PLACE] or _PLACE,
        drafter=places[_DRAFTER] or _DRAFTER,
        target=places[_TARGET] or _TARGET,
        placeholders="".join(note for key, note in _PLACEHOLDERS.items() if not places[key]),
        training=write_block(folder, "trained", log.name)
        if log.is_file()
        else "How it was trained is not recorded here.\n",
        details=_details(adapter.config),
    )
    return "\n".join([f"{GENERATED}\n\n{body}", *notes_section(options.notes)])


def _words(kind: str, name: str | None) -> str:
    if name is None:
        return f"{kind} that it was trained with"
    return f"{kind} [{name}]({target_link(name)})" if is_repository(name) else f"{kind} {name}"


def _details(config: Mapping[str, Any]) -> str:
    modules = config.get("target_modules") or []
    names = [modules] if isinstance(modules, str) else {name.split(".")[-1] for name in modules}
    rows = {
        "kind": config["peft_type"],
        "rank": config.get("r"),
        "alpha": config.get("lora_alpha"),
        "adapted modules": ", ".join(sorted(names)),
        "PEFT": config.get("peft_version"),
    }
    told = {name: str(value) for name, value in rows.items() if value not in (None, "")}
    return table({"": ""}, told)


def _metadata(adapter: Adapter, options: CardOptions) -> ModelCardData:
    drafter = _on_hub(adapter.drafter)
    architecture = adapter.architecture
    kind = str(adapter.config["peft_type"]).lower()
    return ModelCardData(
        library_name="peft",
        pipeline_tag="text-generation",
        license=options.licence,
        base_model=drafter,
        base_model_relation="adapter" if drafter else None,
        tags=[
            *([f"base_model:adapter:{drafter}"] if drafter else []),
            kind,
            *([] if architecture is None else [architecture]),
            "speculative-decoding",
            "block-diffusion",
            "draft-model",
            *([] if architecture is None else [PAPERS[architecture]]),
        ],
    )


def _name_in(card: ModelCard | None) -> str | None:
    return _found(_OWN_NAME, card, _PLACE)


def _target_in(card: ModelCard | None) -> str | None:
    return _found(_OWN_TARGET, card, _TARGET)


def _found(pattern: re.Pattern[str], card: ModelCard | None, unknown: str) -> str | None:
    found = None if card is None else pattern.search(card.content)
    return None if found is None or found.group(1) == unknown else found.group(1)
