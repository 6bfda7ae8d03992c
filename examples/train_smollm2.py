"""Train the drafter of SmolLM2-135M-Instruct from the target's own answers.

    python examples/train_smollm2.py OUT                  # from scratch
    python examples/train_smollm2.py OUT --warm-start DIR # from a trained drafter
    python examples/train_smollm2.py OUT --resume         # go on after an interruption

The shipped drafters, A for DFlash and B for DFlare, on two cores with bfloat16 instructions (AMX):

    cpu="--taps TAPS --dtype bfloat16 --sampled-tokens 2048 --batch-size 16 --eval-prompts 0"
    new="--from-target --anchors 4 --learning-rate 2e-3 --epochs 40 --eval-steps 573"
    python examples/train_smollm2.py A $cpu $new
    flare="--architecture dflare --anchors 4 --learning-rate 1e-3 --max-steps 1148"
    python examples/train_smollm2.py B $cpu $flare --warm-start A/drafter --eval-steps 287

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
from hf_dflash.taps_cache import MANIFEST, CachedTaps, write_taps
from hf_dflash.target_states import run_target
from hf_dflash.warm_start import init_from_target
from hf_dflash.warm_start_dflare import init_from_dflash

ANSWERS = Path(__file__).parent / "data" / "smollm2_answers.jsonl.gz"
HELD_OUT = Path(__file__).parent / "data" / "smollm2_held_out.jsonl.gz"
# <empty_output>: a token of the tokenizer that the target never writes.
MASK_TOKEN_ID = 16
MAX_NEW_TOKENS = 96
# Thirteen thousand tokens: DFlare's context is fitted to DFlash's on them.
N_FITTED_ROWS = 64


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of checkpoints and of the result")
    parser.add_argument("--answers", type=Path, default=ANSWERS)
    parser.add_argument("--n-answers", type=int, help="train on the first ones only")
    parser.add_argument("--held-out", type=Path, default=HELD_OUT, help="answers to evaluate on")
    parser.add_argument("--taps", type=Path, help="folder to keep the target's hidden states in")
    parser.add_argument("--warm-start", type=Path, help="a trained drafter to go on from")
    parser.add_argument("--warm-start-name", help="what the training log calls that drafter")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--max-steps", type=int, default=-1, help="stop there, whatever the epochs")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--anchors", type=int, default=24)
    parser.add_argument("--block-size", type=int, default=8, help="anchor included")
    parser.add_argument("--layers", type=int, default=3, help="draft layers of a new drafter")
    parser.add_argument(
        "--architecture",
        choices=["dflash", "dflare"],
        help="of a new drafter; DFlare can be warm-started from a DFlash drafter too",
    )
    parser.add_argument("--from-target", action="store_true", help="start from target layers")
    parser.add_argument("--sampled-tokens", type=int, help="for a sampled softmax, on CPUs")
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--schedule", default="cosine", help="of the learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-steps", type=int, default=200)
    parser.add_argument("--eval-prompts", type=int, default=13)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    target, tokenizer = load_target(options.dtype)
    rows = encode_chats(tokenizer, read_chats(options.answers))
    drafter = new_drafter(target, rows, options)
    if options.from_target:
        init_from_target(drafter, target, input_ids=torch.tensor([rows[0]["input_ids"]]))
    if options.taps is not None:  # the target runs once for a row, not once an epoch
        if not (options.taps / MANIFEST).is_file():
            write_taps(target, drafter.config, rows, options.taps)
        rows = CachedTaps(rows, options.taps, drafter.config)
    n_rows = len(rows) if options.n_answers is None else options.n_answers
    new_weights = "copies of the target's layers" if options.from_target else "new weights"
    trainer = DFlashTrainer(
        drafter,
        target,
        arguments(options),
        train_dataset=Subset(rows, range(n_rows)),
        eval_dataset=encode_chats(tokenizer, read_chats(options.held_out)),
    )
    trainer.data_record = {
        "answers": f"the first {n_rows} of {options.answers.name}: the target's own, greedy",
        "evaluated on": f"{options.held_out.name}: other fillers of the same templates",
        "started from": str(options.warm_start_name or options.warm_start or new_weights),
        "chat template": "the tokenizer's own, without a system message of the user's",
        "thinking": "the target has no such mode",
    }
    if options.eval_prompts:
        asked = held_out_prompts(tokenizer, options.eval_prompts)
        trainer.add_callback(DecodingCallback(trainer, asked, max_new_tokens=MAX_NEW_TOKENS))
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(str(options.out / "drafter"))


def new_drafter(target: Any, rows: Any, options: argparse.Namespace) -> DFlashDraftModel:
    """A new drafter with five taps, or a trained one whose blocks may get another size."""
    if options.warm_start is not None:
        config = DFlashConfig.from_pretrained(options.warm_start)
        config.block_size = options.block_size
        trained = DFlashDraftModel.from_pretrained(
            options.warm_start, config=config, dtype=torch.float32
        )
        if options.architecture in (None, config.architecture):
            return trained
        config = DFlashConfig(**{**config.to_dict(), "architecture": options.architecture})
        drafter = DFlashDraftModel(config)
        ids = [torch.tensor([rows[i]["input_ids"]]) for i in range(N_FITTED_ROWS)]
        taps = [run_target(target, config.target_layer_ids, i, i.new_ones(i.shape)) for i in ids]
        lost = init_from_dflash(drafter, trained, torch.cat([part.taps for part in taps], dim=1))
        print("Of the variance of the context's keys and values the fit loses", lost)
        return drafter
    config = DFlashConfig.for_target(
        target.config,
        architecture=options.architecture or "dflash",
        num_draft_layers=options.layers,
        num_taps=5,
        block_size=options.block_size,
        mask_token_id=MASK_TOKEN_ID,
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
        lr_scheduler_type=options.schedule,
        seed=options.seed,
        n_anchors=options.anchors,
        n_sampled_tokens=options.sampled_tokens,
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
