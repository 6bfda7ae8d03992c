"""Adapt a trained drafter to long contexts: few long samples, few epochs.

    python examples/long_context.py TARGET DRAFTER ROWS OUT

ROWS are rows of `hf-dflash prepare --regenerate --max-length 32768` (or as long as the prompts you
serve), made of long prompts: question answering and summaries over documents. What counts is where
the answer stands, so a thousand samples go a long way: DFlash (arXiv:2602.06036, Table 4) took
1.6K samples of LongAlign-10K and 3 epochs, and on gov_report at 16K tokens the acceptance length
rose from 2.67 to 3.81.

The drafter's anchors lie in the answers, hundreds of tokens behind thousands: a row costs a forward
of the target over all of it, but few blocks. Needs the extra `train`.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from hf_dflash import DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments
from hf_dflash.row_file import open_rows


def main() -> None:
    """Read the command line and adapt."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="folder or repository of the target")
    parser.add_argument("drafter", help="folder or repository of its drafter")
    parser.add_argument("rows", type=Path, help="long rows of `hf-dflash prepare`")
    parser.add_argument("out", type=Path, help="folder of checkpoints and of the result")
    parser.add_argument("--epochs", type=float, default=3)  # the paper's
    # A tenth of the papers' for training from scratch: little is to be unlearned.
    parser.add_argument("--learning-rate", type=float, default=6e-5)
    parser.add_argument("--rows-per-update", type=int, default=16)
    parser.add_argument("--anchors", type=int, default=512)
    options = parser.parse_args()
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype="auto")
    drafter = DFlashDraftModel.from_pretrained(
        options.drafter,
        dtype=torch.float32,
        # A table of who sees whom would take gigabytes at such lengths.
        attn_implementation="flex_attention" if torch.cuda.is_available() else "sdpa",
    )
    rows = open_rows(options.rows)
    # Rows beyond the positions that both models know are refused here. A drafter made for a shorter
    # limit than its target can be given the target's: set `max_position_embeddings` (and
    # `rope_parameters`, if the target has YaRN) in its config.json before.
    trainer = DFlashTrainer(drafter, target, arguments(options), train_dataset=rows)
    trainer.train()
    trainer.save_model()


def arguments(options: argparse.Namespace) -> DFlashTrainingArguments:
    """One row at a time, as it is long; the rest of an update is accumulated."""
    return DFlashTrainingArguments(
        output_dir=str(options.out),
        num_train_epochs=options.epochs,
        learning_rate=options.learning_rate,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=options.rows_per_update,
        n_anchors=options.anchors,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        logging_steps=1,
        save_total_limit=2,
        report_to=[],
    )


if __name__ == "__main__":
    main()
