"""The parts of a model card that hold no measured figure, as Markdown.

But for one: the number of drafts to decode with, where the card's headline advises one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from huggingface_hub.utils import HFValidationError, validate_repo_id

from .checkpoint_dflash import tensor_headers_of, weight_files
from .configuration_dflash import DFlashConfig
from .findings import ARCHITECTURES, advised_drafts, plural, short_name
from .measurement import Measurement
from .serving import SLIDING, sglang_command, vllm_command

PAPERS = {"dflash": "arxiv:2602.06036", "dflare": "arxiv:2606.02091"}
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}

_PACKAGE = """\
```python
from hf_dflash import DFlashDraftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained({load})
tokenizer = AutoTokenizer.from_pretrained("{target}")
drafter = DFlashDraftModel.from_pretrained("{drafter}", dtype=target.dtype)
chat = [{{"role": "user", "content": "Count from 1 to 20."}}]
inputs = tokenizer.apply_chat_template(
    chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
{call}print(tokenizer.decode(output[0]))
```
"""
#: Where `_PACKAGE` has the drafter's name and the target's.
USED_NAMES = (
    re.compile(r'DFlashDraftModel\.from_pretrained\("([^"\n]*)"'),
    re.compile(r'AutoModelForCausalLM\.from_pretrained\(\s*"([^"\n]*)"'),
)
#: Stands for the drafter's place where that is not known; a push puts the repository in.
PLACE_OF_CARD = "<drafter>"
_PLACE_NOTE = (
    f"`{PLACE_OF_CARD}` stands for the folder or repository that this card lies in. A folder gets "
    "the code for `trust_remote_code` and this name when it is published (`hf-dflash push`).\n"
)
#: By it a card that tells of the code in its repository is known.
REMOTE_CODE_CALL = "    trust_remote_code=True,\n"
_REMOTE_CODE = """\
```python
from transformers import AutoModel

drafter = AutoModel.from_pretrained(
    "{drafter}",
    dtype=target.dtype,
    trust_remote_code=True,
)
{call}```
"""
_LOAD = '"{target}", dtype="auto"'
#: In lines of their own: the format stays the same however long the target's name is.
_LOAD_AS_MEASURED = """
    "{target}",
    dtype="{dtype}",  # what the number of drafts below was measured in
"""
_CALL = "output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=64)\n"
_CALL_WITH_DRAFTS = """\
output = target.generate(
    **inputs,
    assistant_model=drafter,
    max_new_tokens=64,
    # the fastest number of drafts measured on {device}, in {dtype}
    num_assistant_tokens={n_drafts},
)
"""
_STOCK = """\
```python
output = target.generate(
    **inputs, assistant_model=drafter, speculation_type="dflash", max_new_tokens=64
)
```
"""


@dataclass(frozen=True, slots=True)
class Weights:
    """What the safetensors files of a drafter hold."""

    n_parameters: int
    dtype: str  # of most parameters


def weights_of(folder: Path) -> Weights:
    """Read sizes and dtypes out of the files' headers."""
    sizes: Counter[str] = Counter()
    for path in weight_files(folder, {}):
        for header in tensor_headers_of(path).values():
            sizes[header["dtype"]] += prod(header["shape"])
    kind, _ = sizes.most_common(1)[0]
    return Weights(sum(sizes.values()), DTYPES.get(kind, kind.lower()))


def introduction(config: DFlashConfig, target: str | None) -> str:
    """What it is, for whom."""
    of_target = short_name(target) if target else "its target model"
    if target and is_repository(target):
        of_target = f"[{of_target}]({target_link(target)})"
    return (
        f"A {ARCHITECTURES[config.architecture]} drafter for {of_target}. It proposes "
        f"{plural(config.block_size - 1, 'token')} in one pass; the target checks them in one pass "
        "and keeps what it would have written itself. So `generate()` gives the target's own text "
        "in fewer passes of the target. It is of no use without its target, and for no other one.\n"
    )


def is_repository(name: str) -> bool:
    """Whether a model's name is one that the Hub may have, and not a folder's."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name


def target_link(target: str) -> str:
    """Where the target is on the Hub."""
    return f"https://huggingface.co/{target}"


def usage_section(
    config: DFlashConfig, drafter: str, target: str, *, has_code: bool, head: Measurement | None
) -> str:
    """How to decode with it in every engine that can.

    Args:
        config: Of the drafter.
        drafter: Repository or folder that the reader loads it from.
        target: The same of the target.
        has_code: Whether the repository will have this package's code for ``trust_remote_code``.
        head: The card's first measurement, for the number of drafts that its headline advises.
    """
    load, call = _load_and_call(target, head)
    names = {"drafter": drafter, "target": target, "load": load, "call": call}
    parts = ["## Use\n"]
    if drafter == PLACE_OF_CARD:
        parts.append(_PLACE_NOTE)
    parts += ["### hf-dflash\n", _PACKAGE.format(**names)]
    if has_code:
        parts += [
            "### transformers alone\n",
            "The code lies in this repository. `target`, `tokenizer` and `inputs` as above:\n",
            _REMOTE_CODE.format(**names),
            "The block loop that transformers has since 5.15 takes the same drafter:\n",
            _STOCK,
        ]
    parts.append(
        "`AutoModel` without `trust_remote_code=True` builds another model with random weights: "
        "the `model_type` is `qwen3`, which is what serving engines expect.\n"
    )
    return "\n".join([*parts, _serving(config, drafter, target)])


def _load_and_call(target: str, head: Measurement | None) -> tuple[str, str]:
    """Which number of drafts is the fastest depends on the dtype, so it is advised with its own."""
    n_drafts = None if head is None else advised_drafts(head)
    if head is None or n_drafts is None:
        return _LOAD.format(target=target), _CALL
    device, dtype = " ".join(head.provenance.device.split()), head.provenance.dtype
    return (
        _LOAD_AS_MEASURED.format(target=target, dtype=dtype),
        _CALL_WITH_DRAFTS.format(device=device, dtype=dtype, n_drafts=n_drafts),
    )


def _serving(config: DFlashConfig, drafter: str, target: str) -> str:
    if config.architecture == "dflare":
        return "### vLLM and SGLang\n\nNeither serves DFlare drafters (vLLM 0.33, SGLang 0.5.23).\n"
    n_drafts = config.block_size - 1
    return (
        f"### vLLM\n\nThe number of drafts is the block size less the anchor: {n_drafts}.\n\n"
        f"```bash\n{vllm_command(config, target, drafter)}\n```\n\n"
        f"### SGLang\n\nIt counts the anchor: {config.block_size}.\n\n"
        f"```bash\n{sglang_command(config, target, drafter)}\n```\n\n"
        "Both commands follow the engines' documentation (vLLM 0.33, SGLang 0.5.23); they were not "
        "run for this card.\n"
    )


def with_place(card: str, place: str) -> str:
    """A card whose readers load the drafter from ``place``, if it left that open."""
    note = f"{_PLACE_NOTE}\n"
    if note not in card:
        return card
    named = re.sub(r"^# .*$", f"# {short_name(place)}", card, count=1, flags=re.MULTILINE)
    return named.replace(note, "").replace(PLACE_OF_CARD, place)


def details_section(config: DFlashConfig, weights: Weights) -> str:
    """What the config and the weights say."""
    kinds = Counter(config.layer_types)
    attention = ", ".join(
        f"{n} sliding (window {config.sliding_window})" if kind == SLIDING else f"{n} full"
        for kind, n in kinds.items()
    )
    rows = {
        "architecture": f"{ARCHITECTURES[config.architecture]} ({PAPERS[config.architecture]})",
        "parameters": f"{weights.n_parameters:,}, {weights.dtype}; embeddings and head are the "
        "target's",
        "block size": f"{config.block_size}: the anchor and {config.block_size - 1} drafts",
        "draft layers": f"{config.num_hidden_layers}; attention: {attention}",
        "tapped target layers": f"{', '.join(map(str, config.target_layer_ids))} (0-based; the "
        "output of layer `i` is `hidden_states[i + 1]`)",
        "mask token": f"{config.mask_token_id}",
    }
    return "## Details\n\n" + table({"": ""}, rows)


def limits_section(config: DFlashConfig) -> str:
    """What it cannot do, whatever was measured."""
    lines = [
        "It fits one target. With another one, or after the target was fine-tuned, drafts are "
        "rejected more often, or it does not load.",
        "The text does not depend on it, the speed does: where its drafts are mostly rejected, it "
        "costs time. Measure on your own prompts: `hf-dflash bench`.",
        "In half precision a pass over several tokens rounds differently from a pass over one, so "
        "where the target's two best tokens are nearly tied, either may be written.",
        f"Block sizes above {config.block_size}, the one it was trained with, were not trained.",
    ]
    return "## Limits\n\n" + "\n".join(f"* {line}" for line in lines) + "\n"


def table(header: Mapping[str, str], rows: Mapping[str, str]) -> str:
    """A Markdown table of two columns."""
    [(left, right)] = header.items()
    lines = [f"| {left} | {right} |", "|---|---|"]
    lines += [f"| {cell(name)} | {cell(value)} |" for name, value in rows.items()]
    return "\n".join(lines) + "\n"


def cell(text: object) -> str:
    """Text that does not end a table's cell."""
    return " ".join(str(text).replace("|", "\\|").split())
