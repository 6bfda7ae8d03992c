"""Train small variants at equal steps on equal data, and compare what they learn.

    python benchmarks/training_runs.py WORK --json runs.json             # all of them
    python benchmarks/training_runs.py WORK --runs dflash dflare --seeds 0 1 2

Every variant is a call of `examples/train_smollm2.py` with the shipped answers; what is compared is
the simulated acceptance length on held-out prompts. WORK keeps the runs and the target's hidden
states, which all of them share; a run that is there is not repeated. Takes an hour and a half of
one core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from made_with import made_with, usual_device

SCRIPT = Path(__file__).parents[1] / "examples" / "train_smollm2.py"
COMMON = "--batch-size 4 --anchors 32 --block-size 8 --sampled-tokens 2048 --learning-rate 1e-3"
#: What each variant changes. The first is what all the others are compared with.
VARIANTS = {
    "dflash": "--from-target",
    "dflare": "--from-target --architecture dflare",
    "random start": "",
    "1200 answers": "--from-target --n-answers 1200",  # twice each in 600 steps
    "300 answers": "--from-target --n-answers 300",  # eight times each
    "2 layers": "--from-target --layers 2",
    "5 layers": "--from-target --layers 5",
}


def main() -> None:
    """Run what is asked for and write the curves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path, help="folder of the runs")
    parser.add_argument("--runs", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument(
        "--dtype", default="float32", help="bfloat16 is quicker on a GPU, and on CPUs with AMX"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {**made_with(usual_device()), "runs": []}
    for seed in options.seeds:
        for name in options.runs:
            results["runs"].append(run(options, name, seed))
            if options.json is not None:
                options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for name in options.runs:
        lengths = [r["curve"][-1]["acceptance_length"] for r in results["runs"] if r["run"] == name]
        spread = f"{min(lengths):.3f}..{max(lengths):.3f}"
        print(f"{name:26} {statistics.mean(lengths):.3f} ({spread}, {len(lengths)} seeds)")


def run(options: argparse.Namespace, name: str, seed: int) -> dict[str, Any]:
    """Train one variant, unless it is there, and read its evaluations."""
    work, steps = options.work, options.steps
    folder = work / f"{name.replace(' ', '-')}-{steps}-{seed}"
    settings = (
        f"--seed {seed} --dtype {options.dtype} --max-steps {steps}"
        f" --eval-steps {max(1, steps // 3)} --eval-prompts 0 {COMMON} {VARIANTS[name]}"
    ).split()
    state = folder / f"checkpoint-{steps}" / "trainer_state.json"
    origin = folder / "made_with.json"
    if not state.is_file():
        command = [str(SCRIPT), str(folder), "--taps", str(work / "taps"), *settings]
        made = made_with(usual_device())
        subprocess.run([sys.executable, *command], check=True)
        origin.write_text(json.dumps(made) + "\n", encoding="utf-8")
    # A run that was there may be of other code than what writes the result.
    made = json.loads(origin.read_text(encoding="utf-8")) if origin.is_file() else None
    history = json.loads(state.read_text(encoding="utf-8"))["log_history"]
    told = {"run": name, "seed": seed, "options": " ".join(settings), "made_with": made}
    return {**told, "curve": curve(history)}


def curve(history: list[dict[str, Any]]) -> list[dict[str, float]]:
    """The evaluations of a run."""
    wanted = ("acceptance_length", "accuracy_1", "loss")
    return [
        {"step": log["step"], **{name: log[f"eval_{name}"] for name in wanted}}
        for log in history
        if "eval_acceptance_length" in log
    ]


if __name__ == "__main__":
    main()
