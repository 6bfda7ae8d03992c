"""The commands with which vLLM and SGLang serve a target with a drafter."""

from __future__ import annotations

from .configuration_dflash import DFlashConfig

SLIDING = "sliding_attention"


def vllm_command(config: DFlashConfig, target: str, drafter: str) -> str:
    """Serve with vLLM, which counts drafts: B - 1 of them; its own count is mandatory."""
    mixed = 0 < list(config.layer_types).count(SLIDING) < len(config.layer_types)
    runner = "VLLM_USE_V2_MODEL_RUNNER=1 " if mixed else ""  # the older runner takes one kind
    speculative = (
        f'{{"method": "dflash", "model": "{drafter}", '
        f'"num_speculative_tokens": {config.block_size - 1}}}'
    )
    return (
        f"{runner}vllm serve {target} \\\n"
        f"  --speculative-config '{speculative}' \\\n"
        "  --attention-backend flash_attn --max-num-batched-tokens 32768"
    )


def sglang_command(config: DFlashConfig, target: str, drafter: str) -> str:
    """Serve with SGLang, which counts the whole block, the anchor included."""
    return (
        f"python -m sglang.launch_server --model-path {target} \\\n"
        f"  --speculative-algorithm DFLASH --speculative-draft-model-path {drafter} \\\n"
        f"  --speculative-num-draft-tokens {config.block_size}"
    )
