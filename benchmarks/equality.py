"""Are the tokens of drafted decoding those of plain decoding, and how many forwards do they take?

    python benchmarks/equality.py

decodes 50 prompts x 128 tokens plainly and with the drafter, greedy, in float32 and in bfloat16,
and writes `benchmarks/results/equality.json`. It takes about half an hour on two cores. A run that
was interrupted goes on where it stopped. Exit status 1: a difference that is no near tie, any
difference in float32, or a target that ran more often than `tokens / 1.3` in float32.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from hf_dflash import DFlashDraftModel
from hf_dflash.smollm2 import target_folder
from made_with import made_with
from near_tie import CycleRecorder, examine

ROOT = Path(__file__).parents[1]
# The promise of the project for this pair and mix of prompts, judged in float32.
TOKENS_PER_FORWARD = 1.3
#: What may differ between two parts of a run.
FREE = ("command", "date")


def main() -> int:
    """Run what is not in the results file yet, print the summary."""
    args = _arguments()
    target = args.target or target_folder(notify=print)
    prompts = [json.loads(line) for line in args.prompts.read_text("utf-8").splitlines()]
    record = open_record(args.out, _provenance(args, Path(target)))
    exact_target = _load_target(target, "float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    for dtype in args.dtypes:
        rows = record["rows"].setdefault(dtype, [])
        if len(rows) == len(prompts):
            continue
        pair = (
            exact_target if dtype == "float32" else _load_target(target, dtype),
            DFlashDraftModel.from_pretrained(args.drafter, dtype=getattr(torch, dtype)).eval(),
        )
        for prompt in prompts[len(rows) :]:
            ids = prompt_ids(tokenizer, prompt["prompt"])
            rows.append(prompt | compare(*pair, exact_target, ids, args.max_new_tokens))
            _report(dtype, len(rows), rows[-1])
            record["summary"][dtype] = summarise(rows)
            _write(args.out, record)
    print(json.dumps(record["summary"], indent=1))
    return int(any(failures(dtype, record["summary"][dtype]) for dtype in args.dtypes))


def prompt_ids(tokenizer: Any, prompt: str) -> Tensor:
    """One user message in the tokenizer's chat format: (1, n) int64."""
    chat = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return encoded["input_ids"]


def compare(
    target: Any, drafter: Any, exact_target: Any, ids: Tensor, max_new_tokens: int
) -> dict[str, Any]:
    """Decode one prompt both ways, greedy, and measure the first difference if there is one."""
    options = {"max_new_tokens": max_new_tokens, "do_sample": False}
    mask = torch.ones_like(ids)
    plain = target.generate(ids, attention_mask=mask, **options)[0, ids.shape[1] :].tolist()
    recorder = CycleRecorder()
    statistics = target.generate(
        ids,
        attention_mask=mask,
        assistant_model=drafter,
        streamer=recorder,
        return_dict_in_generate=True,
        **options,
    ).statistics
    difference = examine(
        target, exact_target, ids, plain, cycles=recorder.cycles, n_drafted=statistics.n_drafted
    )
    return {
        "n_tokens": sum(map(len, recorder.cycles)),
        "target_forwards": statistics.target_forwards,
        "n_accepted": statistics.n_accepted,
        "identical": difference is None,
        "difference": difference and asdict(difference) | {"is_near_tie": difference.is_near_tie},
    }


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Totals over prompts, and per kind of prompt."""
    kinds = sorted({row["kind"] for row in rows})
    totals = _totals(rows)
    return totals | {"kinds": {k: _totals([r for r in rows if r["kind"] == k]) for k in kinds}}


def failures(dtype: str, summary: dict[str, Any]) -> list[str]:
    """What of the promise does not hold."""
    found = []
    if summary["n_no_near_tie"]:
        found.append(f"{dtype}: {summary['n_no_near_tie']} differences are no near ties")
    if dtype == "float32" and summary["n_identical"] < summary["n_prompts"]:
        found.append(f"float32: {summary['n_identical']} of {summary['n_prompts']} identical")
    if dtype == "float32" and summary["tokens_per_forward"] <= TOKENS_PER_FORWARD:
        found.append(f"float32: {summary['tokens_per_forward']} tokens a target forward")
    for line in found:
        print(f"FAILED {line}", file=sys.stderr)
    return found


def _totals(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    n_tokens = sum(row["n_tokens"] for row in rows)
    forwards = sum(row["target_forwards"] for row in rows)
    accepted = [n for row in rows for n in row["n_accepted"]]
    differences = [row["difference"] for row in rows if row["difference"]]
    return {
        "n_prompts": len(rows),
        "n_identical": sum(row["identical"] for row in rows),
        "mismatch_rate": round(len(differences) / len(rows), 3),
        "n_no_near_tie": sum(not difference["is_near_tie"] for difference in differences),
        "n_tokens": n_tokens,
        "target_forwards": forwards,
        "tokens_per_forward": round(n_tokens / forwards, 3),
        "acceptance_length": round(1 + sum(accepted) / max(len(accepted), 1), 3),
    }


def _provenance(args: argparse.Namespace, target: Path) -> dict[str, Any]:
    return {
        **made_with(),
        "max_new_tokens": args.max_new_tokens,
        "sha256": {
            "target": _sha256(target / "model.safetensors"),
            "drafter": _sha256(args.drafter / "model.safetensors"),
            "prompts": _sha256(args.prompts),
        },
    }


def open_record(path: Path, provenance: dict[str, Any]) -> dict[str, Any]:
    """What an interrupted run has left, or an empty record.

    Raises:
        RuntimeError: It was made with something else; rows of two kinds would be mixed.
    """
    if not path.exists():
        return {"provenance": provenance, "summary": {}, "rows": {}}
    record = json.loads(path.read_text("utf-8"))
    there, now = ({**made, **dict.fromkeys(FREE)} for made in (record["provenance"], provenance))
    if there != now:
        raise RuntimeError(
            f"`--out` {path} was made with other code, versions, weights, prompts or threads: "
            f"{record['provenance']}, now {provenance}. Delete it, or name another file."
        )
    return record


def _load_target(folder: Path | str, dtype: str) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    return model.eval()


def _report(dtype: str, number: int, row: dict[str, Any]) -> None:
    what = "identical" if row["identical"] else f"differs: {row['difference']}"
    rate = row["n_tokens"] / row["target_forwards"]
    print(f"{dtype} {number:3} {row['kind']:10} {rate:.2f} tokens/forward, {what}", flush=True)


def _write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Renamed into place, so that an interrupted run never leaves half a file.
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    part.replace(path)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", type=Path, help="folder; default: SmolLM2-135M-Instruct")
    drafter = ROOT / "model_cards" / "smollm2-135m-instruct-dflash"
    parser.add_argument("--drafter", type=Path, default=drafter)
    parser.add_argument("--prompts", type=Path, default=ROOT / "benchmarks" / "prompts.jsonl")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    out = ROOT / "benchmarks" / "results" / "equality.json"
    parser.add_argument("--out", type=Path, default=out)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
