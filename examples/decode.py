"""Decode one prompt with a drafter: python examples/decode.py TARGET DRAFTER "PROMPT".

Without arguments: SmolLM2-135M-Instruct, the drafter of this repository, and a prompt it likes.
"""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dflash import DFlashDraftModel
from hf_dflash.smollm2 import target_folder

DRAFTER = Path(__file__).parents[1] / "model_cards" / "smollm2-135m-instruct-dflash"
PROMPT = "Count from 1 to 40, one number per line."


def main(target_name: str, drafter_name: str, prompt: str) -> None:
    """Load, decode, and print the text and how it went."""
    target = AutoModelForCausalLM.from_pretrained(target_name, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(target_name)
    drafter = DFlashDraftModel.from_pretrained(drafter_name, dtype="auto")
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = target.generate(
        **inputs, assistant_model=drafter, max_new_tokens=96, return_dict_in_generate=True
    )
    n_prompt = inputs["input_ids"].shape[1]
    print(tokenizer.decode(output.sequences[0, n_prompt:], skip_special_tokens=True))
    print(f"acceptance length {output.statistics.acceptance_length:.2f}")
    print(f"target forwards   {output.statistics.target_forwards}")


if __name__ == "__main__":
    main(*(sys.argv[1:] or (str(target_folder()), str(DRAFTER), PROMPT)))
