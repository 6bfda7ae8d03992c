"""DFlash and DFlare drafters for Hugging Face transformers: the same tokens, sooner.

    from hf_dflash import DFlashDraftModel
    drafter = DFlashDraftModel.from_pretrained(folder_or_repo, dtype="auto")
    target.generate(**inputs, assistant_model=drafter)

Load drafters with :class:`DFlashDraftModel`, or with ``AutoModel`` and ``trust_remote_code=True``.
Never with ``AutoModel`` alone: a drafter's ``model_type`` is "qwen3", as every serving engine
expects, so ``AutoModel`` alone builds a Qwen3 model with random weights and only a warning.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .callbacks import DecodingCallback as DecodingCallback
    from .configuration_dflash import DFlashConfig as DFlashConfig
    from .drafting import DFlashCandidateGenerator as DFlashCandidateGenerator
    from .modeling_dflash import DFlashDraftModel as DFlashDraftModel
    from .trainer import DFlashTrainer as DFlashTrainer
    from .training_arguments import DFlashTrainingArguments as DFlashTrainingArguments

__version__ = "0.1.0"

# Resolved on first use: `hf-dflash --help` and the modules that need only torch stay quick.
_HOME_OF = {
    "DFlashCandidateGenerator": "drafting",
    "DFlashConfig": "configuration_dflash",
    "DFlashDraftModel": "modeling_dflash",
    "DFlashTrainer": "trainer",
    "DFlashTrainingArguments": "training_arguments",
    "DecodingCallback": "callbacks",
}
__all__ = [
    "DFlashCandidateGenerator",
    "DFlashConfig",
    "DFlashDraftModel",
    "DFlashTrainer",
    "DFlashTrainingArguments",
    "DecodingCallback",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
