"""Stream a drafted answer cycle by cycle: accepted drafts in green, the target's own tokens plain.

A streamer with a method `put_cycle` gets each cycle whole. One without gets token after token, as
from plain decoding, so `TextStreamer` and `TextIteratorStreamer` work unchanged.
"""

from pathlib import Path

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from hf_dflash import DFlashDraftModel
from hf_dflash.demo_view import IncrementalText
from hf_dflash.smollm2 import load_target

DRAFTER = Path(__file__).parents[1] / "model_cards" / "smollm2-135m-instruct-dflash"
GREEN, RESET = "\033[32m", "\033[0m"


class ColourStreamer(BaseStreamer):
    """Prints each cycle as it comes."""

    def __init__(self, text: IncrementalText) -> None:
        self.text = text

    def put(self, value: Tensor) -> None:
        """The prompt comes this way; it is not shown."""

    def put_cycle(self, token_ids: Tensor, n_accepted: int) -> None:
        """The first ``n_accepted`` tokens are accepted drafts."""
        ids = token_ids.tolist()
        drafts, bonus = self.text.push(ids[:n_accepted]), self.text.push(ids[n_accepted:])
        print(f"{GREEN}{drafts}{RESET}{bonus}", end="", flush=True)

    def end(self) -> None:
        """Finish the line."""
        print()


def main() -> None:
    """Stream one answer of SmolLM2-135M-Instruct."""
    target, tokenizer = load_target()
    drafter = DFlashDraftModel.from_pretrained(DRAFTER, dtype="auto")
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "List the even numbers from 2 to 60."}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    streamer = ColourStreamer(IncrementalText(tokenizer))
    target.generate(**inputs, assistant_model=drafter, max_new_tokens=64, streamer=streamer)


if __name__ == "__main__":
    main()
