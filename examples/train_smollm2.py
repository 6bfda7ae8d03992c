"""Train the drafter of SmolLM2-135M-Instruct from the target's own answers.

    python examples/train_smollm2.py OUT                  # from scratch
    python examples/train_smollm2.py OUT --warm-start DIR # from a trained drafter
    python examples/train_smollm2.py OUT --resume         # go on after an interruption

The prompts come from `smollm2_prompts.py`, the answers from the target (`regenerate_answers`).
Held-out prompts share templates with the trained ones, but none of their fillers; on them the
drafter is judged by real decoding. Needs the extras `train` and `demo`.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from smollm2_prompts import prompts
from torch.utils.data import Subset

from hf_dflash import (
    DecodingCallback,
    DFlashConfig,
    DFlashDraftModel,
    DFlashTrainer,
    DFlashTrainingArguments,
)
from hf_dflash.chats import read_chats
from hf_dflash.data import encode_chats
from hf_dflash.smollm2 import load_target

ANSWERS = Path(__file__).parent / "data" / "smollm2_answers.jsonl.gz"
# <empty_output>: a token of the tokenizer that the target never writes.
MASK_TOKEN_ID = 16
MAX_NEW_TOKENS = 96


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of checkpoints and of the result")
    parser.add_argument("--answers", type=Path, default=ANSWERS)
    parser.add_argument("--warm-start", type=Path, help="a trained drafter to go on from")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--max-steps", type=int, default=-1, help="stop there, whatever the epochs")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--anchors", type=int, default=24)
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--eval-steps", type=int, default=200)
    parser.add_argument("--eval-prompts", type=int, default=13)
    options = parser.parse_args()
    torch.manual_seed(0)
    target, tokenizer = load_target(options.dtype)
    rows = encode_chats(tokenizer, read_chats(options.answers))
    n_eval = 4 * options.eval_prompts
    trainer = DFlashTrainer(
        new_drafter(target, options),
        target,
        arguments(options),
        train_dataset=Subset(rows, range(n_eval, len(rows))),
        eval_dataset=Subset(rows, range(n_eval)),
    )
    held_out = held_out_prompts(tokenizer, options.eval_prompts)
    trainer.add_callback(DecodingCallback(trainer, held_out, max_new_tokens=MAX_NEW_TOKENS))
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(str(options.out / "drafter"))


def new_drafter(target: Any, options: argparse.Namespace) -> DFlashDraftModel:
    """Three layers and five taps, or a trained drafter."""
    if options.warm_start is not None:
        return DFlashDraftModel.from_pretrained(options.warm_start, dtype=torch.float32)
    config = DFlashConfig.for_target(
        target.config, num_draft_layers=3, num_taps=5, mask_token_id=MASK_TOKEN_ID
    )
    return DFlashDraftModel(config)


def arguments(options: argparse.Namespace) -> DFlashTrainingArguments:
    """Training arguments; everything not set here is the papers'."""
    return DFlashTrainingArguments(
        output_dir=str(options.out),
        num_train_epochs=options.epochs,
        max_steps=options.max_steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        n_anchors=options.anchors,
        bf16=options.dtype == "bfloat16",  # quicker on a GPU, and on CPUs with AMX
        use_cpu=not torch.cuda.is_available(),
        logging_steps=20,
        save_steps=options.eval_steps,
        eval_strategy="steps",
        eval_steps=options.eval_steps,
        save_total_limit=2,
        report_to=[],
        export_dtype="bfloat16",
    )


def held_out_prompts(tokenizer: Any, n_prompts: int) -> list[list[int]]:
    """Token ids of prompts whose fillers are in no trained one, spread over the kinds."""
    held_out = [p for p in prompts() if p.split == "held_out"]
    chosen = held_out[:: max(1, len(held_out) // n_prompts)][:n_prompts]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": p.prompt}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for p in chosen
    ]


if __name__ == "__main__":
    main()
