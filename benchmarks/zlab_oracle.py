"""Does hf-dflash make the tokens and accept the drafts that z-lab's own package does?

The package `dflash` 0.1.0 (MIT) comes from the authors of the method and shares no code with this
one. Both decode the same prompts with the same two folders, greedy, in float32. One half of this
script runs in an environment of its own and writes what z-lab's package did:

    python -m venv zlab && zlab/bin/pip install torch==2.13.0 transformers==5.15.0
    zlab/bin/pip install --no-deps dflash==0.1.0
    zlab/bin/python benchmarks/zlab_oracle.py record --target FOLDER --drafter FOLDER \
        --prompts FILE.jsonl --out RECORD.json

The other half runs where hf-dflash is installed, and says where it differs:

    python benchmarks/zlab_oracle.py compare RECORD.json --target FOLDER --drafter FOLDER

Lines of the prompts file hold `prompt` (text, put in the chat format) or `prompt_ids`. Compared
are the tokens and the number of tokens that each cycle emitted, in every cycle. Near the length
limit z-lab's package drafts as many tokens as may still be emitted and hf-dflash one fewer, since
the target adds one; the size of a block changes its drafts. So hf-dflash is given one token more to
emit here, which makes the blocks equal, and the surplus token is dropped before comparing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers


def main() -> int:
    """Run one of the two halves."""
    args = _arguments()
    if args.half == "record":
        record(args)
        return 0
    differences = compare(_read(args.record), args.target, args.drafter)
    for line in differences:
        print(line)
    print(f"{len(differences)} differences")
    return int(bool(differences))


def record(args: argparse.Namespace) -> None:
    """Decode every prompt with z-lab's package and write what each cycle emitted."""
    from dflash.model import DFlashDraftModel, dflash_generate

    target = _load_target(args.target)
    drafter, loaded = DFlashDraftModel.from_pretrained(
        args.drafter, dtype=torch.float32, output_loading_info=True
    )
    if loaded["missing_keys"] or loaded["unexpected_keys"]:
        raise RuntimeError(f"z-lab's class does not load {args.drafter} whole: {loaded}.")
    runs = []
    for prompt_ids in _prompts(args.prompts, args.target)[:: args.step]:
        # Its timing waits for a GPU.
        with mock.patch("torch.cuda.synchronize"):
            result = dflash_generate(
                drafter.eval(),
                target,
                torch.tensor([prompt_ids]),
                args.max_new_tokens,
                args.stop_ids or None,
                return_stats=True,
            )
        new_ids = result.output_ids[0, len(prompt_ids) :].tolist()
        emitted = [int(n) for n in result.acceptance_lengths]
        runs.append({"prompt_ids": prompt_ids, "new_ids": new_ids, "n_emitted": emitted})
    args.out.write_text(_dumps(_provenance(args) | {"runs": runs}), "utf-8")


def compare(recorded: dict[str, Any], target_folder: Path, drafter_folder: Path) -> list[str]:
    """Decode the recorded prompts with hf-dflash; returns one line for each difference.

    Raises:
        RuntimeError: The weights are not those that were recorded.
    """
    for name, folder in (("target", target_folder), ("drafter", drafter_folder)):
        if _sha256(folder) != recorded["sha256"][name]:
            raise RuntimeError(f"The weights in {folder} are not those of the record. Record anew.")
    from hf_dflash import DFlashDraftModel

    target = _load_target(target_folder)
    drafter = DFlashDraftModel.from_pretrained(drafter_folder, dtype=torch.float32).eval()
    target.generation_config.eos_token_id = recorded["stop_ids"] or None
    differences = []
    for number, run in enumerate(recorded["runs"]):
        cycles = decode(target, drafter, run["prompt_ids"], recorded["max_new_tokens"])
        pairs = {
            "tokens": (run["new_ids"], [token for cycle in cycles for token in cycle]),
            "tokens of each cycle": (run["n_emitted"], [len(cycle) for cycle in cycles[1:]]),
        }
        differences += [
            f"prompt {number}: {what}\n  z-lab     {theirs}\n  hf-dflash {ours}"
            for what, (theirs, ours) in pairs.items()
            if theirs != ours
        ]
    return differences


def decode(
    target: Any, drafter: Any, prompt_ids: list[int], max_new_tokens: int
) -> list[list[int]]:
    """New tokens by cycle, the prompt's forward first, with z-lab's block sizes at the end."""
    from near_tie import CycleRecorder

    recorder = CycleRecorder()
    ids = torch.tensor([prompt_ids])
    target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=drafter,
        streamer=recorder,
        max_new_tokens=max_new_tokens + 1,
        do_sample=False,
    )
    left, cycles = max_new_tokens, []
    for cycle in recorder.cycles:
        cycles.append(cycle[:left])
        left -= len(cycles[-1])
    return [cycle for cycle in cycles if cycle]


def _load_target(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _prompts(path: Path, target: Path) -> list[list[int]]:
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    if "prompt_ids" in lines[0]:
        return [line["prompt_ids"] for line in lines]
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    chats = [[{"role": "user", "content": line["prompt"]}] for line in lines]
    options = {"add_generation_prompt": True, "return_dict": True}
    return [tokenizer.apply_chat_template(chat, **options)["input_ids"] for chat in chats]


def _provenance(args: argparse.Namespace) -> dict[str, Any]:
    from importlib.metadata import version

    return {
        "recorded_with": "benchmarks/zlab_oracle.py record",
        "versions": {name: version(name) for name in ("dflash", "torch", "transformers")},
        "sha256": {"target": _sha256(args.target), "drafter": _sha256(args.drafter)},
        "max_new_tokens": args.max_new_tokens,
        "stop_ids": args.stop_ids,
    }


def _sha256(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8"))


def _dumps(content: dict[str, Any]) -> str:
    """One line a run: short enough to read, and to see what a new recording changes."""
    runs = ",\n  ".join(json.dumps(run) for run in content["runs"])
    head = json.dumps({k: v for k, v in content.items() if k != "runs"}, indent=1)
    return head.removesuffix("\n}") + f',\n "runs": [\n  {runs}\n ]\n}}\n'


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    halves = parser.add_subparsers(dest="half", required=True)
    recording = halves.add_parser("record", help="in z-lab's environment")
    recording.add_argument("--prompts", type=Path, required=True)
    recording.add_argument("--out", type=Path, required=True)
    recording.add_argument("--max-new-tokens", type=int, default=48)
    recording.add_argument("--step", type=int, default=1, help="take every STEPth prompt")
    recording.add_argument("--stop-ids", type=int, nargs="*", default=[])
    comparing = halves.add_parser("compare", help="in hf-dflash's environment")
    comparing.add_argument("record", type=Path)
    for half in (recording, comparing):
        half.add_argument("--target", type=Path, required=True)
        half.add_argument("--drafter", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
