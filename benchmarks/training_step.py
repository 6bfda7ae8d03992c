"""Time and memory of a training step: ours, a plain one, and published trainers', in one run.

    python benchmarks/training_step.py                  # SmolLM2, 3 draft layers, 4 rows a step
    python benchmarks/training_step.py --tiny           # a random pair
    python benchmarks/training_step.py --peer-python PEERS/bin/python  # with published trainers

`training_peers.py` says what differs in theirs. Their environment needs torch, transformers and

    pip install --no-deps specforge==0.2.0 speculators==0.9.0 hs-connectors openai datasets \
        multiprocess dill xxhash pandas pyarrow

All methods start from the same drafter and do the same updates: same batches, anchors, optimiser
and seed, on cached taps (the target's forward is the same for all and left out). Each runs in a
process of its own, so its peak of memory is its own: the highest resident size in any update, less
what is resident before the first. Updates alternate between the methods; ratios are paired within
a round. First of all, losses and gradients are compared: the exit status is 1 if the plain method's
differ from ours by more than 1e-5 relative. Linux only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_dflash import DFlashConfig, DFlashDraftModel, DFlashTrainingArguments
from hf_dflash.collator import DFlashCollator, EpochRows
from hf_dflash.provenance import published_command
from hf_dflash.target import decoder_layers
from hf_dflash.target_states import run_target
from made_with import made_with

HERE = Path(__file__).parent
ANSWERS = HERE.parent / "examples" / "data" / "smollm2_answers.jsonl.gz"
OWN, PEERS = ("ours", "plain"), ("specforge", "speculators")
TOLERANCE = 1e-5
SIZES = (
    "vocab_size",
    "hidden_size",
    "target_hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
)


class Process:
    """A method in its own process, that waits for commands."""

    def __init__(self, name: str, python: str, folder: Path) -> None:
        self.name = name
        command = [python, str(HERE / "training_worker.py"), name, str(folder)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()

    def ask(self, *command: object) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, command)) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"The process of {self.name!r} ended early; its error is above.")
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def main() -> int:
    """Run what the command line asks for, print it, and judge."""
    options = _options()
    torch.manual_seed(0)
    methods = dict.fromkeys(OWN, sys.executable)
    methods |= {name: options.peer_python for name in PEERS if options.peer_python}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        n_tokens = prepare(folder, options)
        processes = [Process(name, python, folder) for name, python in methods.items()]
        checks = check(processes, folder)
        steps = alternate(processes, options.steps)
        report = {
            **made_with(),
            "command": command(options),
            "threads": options.threads,
            "settings": {
                k: v for k, v in vars(options).items() if k not in ("json", "peer_python")
            },
            "checks": checks,
            **summary(steps, n_tokens, {p.name: p.ask("memory") for p in processes}),
        }
        for process in processes:
            process.close()
    show(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    return int(max(checks["plain"].values()) > TOLERANCE)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a random pair instead of SmolLM2")
    parser.add_argument("--rows", type=int, default=4, help="a step")
    parser.add_argument("--row-tokens", type=int, default=230, help="about so many a row")
    parser.add_argument("--batches", type=int, default=3, help="different ones, in turn")
    parser.add_argument("--anchors", type=int, default=24, help="a row")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--draft-layers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=9, help="updates of each method")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--chunk", type=int, default=512, help="rows of logits at once; 512 is DFlashTrainer's most"
    )
    parser.add_argument(
        "--chunk-blocks", type=int, default=128, help="the same for SpecForge, in blocks a row"
    )
    parser.add_argument("--peer-python", help="interpreter that has specforge and speculators")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    return parser.parse_args()


def command(options: argparse.Namespace) -> str:
    """The command line, without where the peers happen to lie."""
    peers = options.peer_python
    words = [word.replace(peers, "PEERS/bin/python") if peers else word for word in sys.argv]
    return published_command("python", words)


# ---- what all methods train with ----


def prepare(folder: Path, options: argparse.Namespace) -> list[int]:
    """Write drafter, target's ends and batches; returns the tokens of each batch."""
    target, rows = tiny_pair(options) if options.tiny else smollm2(options)
    config = DFlashConfig.for_target(
        target.config,
        num_draft_layers=options.draft_layers,
        num_taps=2 if options.tiny else 5,
        block_size=options.block_size,
        mask_token_id=16,
    )
    args = DFlashTrainingArguments(output_dir="unused", use_cpu=True, report_to=[])
    sizes = {
        "drafter": {name: getattr(config, name) for name in SIZES},
        "gamma": args.gamma_for(config.block_size),
        "learning_rate": args.learning_rate,
        "chunk": options.chunk,
        "chunk_blocks": options.chunk_blocks,
        "threads": options.threads,
    }
    (folder / "inputs.json").write_text(json.dumps(sizes), "utf-8")
    save_file(DFlashDraftModel(config).state_dict(), folder / "drafter.safetensors")
    ends = {
        "embedding": target.get_input_embeddings().weight,
        "head": target.get_output_embeddings().weight.clone(),
        "norm": target.get_decoder().norm.weight,
    }
    save_file({k: v.detach() for k, v in ends.items()}, folder / "target.safetensors")
    collator = DFlashCollator(
        config.block_size, options.anchors, mask_token_id=16, keeps_slots=False
    )
    numbered, n_tokens = EpochRows(rows), []
    for i in range(options.batches):
        chosen = [numbered[j] for j in range(i * options.rows, (i + 1) * options.rows)]
        batch = collator(chosen) | states(target, config, collator(chosen))
        masks = [torch.tensor(row["loss_mask"]) for row in chosen]
        batch["loss_mask"] = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
        save_file(batch, folder / f"batch_{i:03}.safetensors")
        n_tokens.append(int((batch["document_ids"] > 0).sum()))
    return n_tokens


@torch.no_grad()
def states(target: Any, config: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Taps of a batch, and what the last layer gives to the final norm."""
    last = len(decoder_layers(target)) - 1
    layers = [*config.target_layer_ids, last]
    taps = run_target(target, layers, batch["input_ids"], batch["document_ids"], keeps_last=False)
    width = config.target_hidden_size
    return {
        "taps": taps.taps[..., :-width].contiguous(),
        "last_hidden_states": taps.taps[..., -width:].contiguous(),
    }


def smollm2(options: argparse.Namespace) -> tuple[Any, list[dict[str, Any]]]:
    """SmolLM2 and those of its committed answers that are nearest to the length wanted."""
    from hf_dflash.chats import read_chats
    from hf_dflash.data import encode_chats
    from hf_dflash.smollm2 import load_target

    target, tokenizer = load_target("float32")
    rows = encode_chats(tokenizer, itertools.islice(iter(read_chats(ANSWERS)), 2000))
    chosen = [rows[i] for i in range(len(rows))]
    chosen.sort(key=lambda row: abs(len(row["input_ids"]) - options.row_tokens))
    return target, chosen[: options.rows * options.batches]


def tiny_pair(options: argparse.Namespace) -> tuple[Any, list[dict[str, Any]]]:
    """A random target of four layers, and rows that it answered."""
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    config.eos_token_id = None
    target = Qwen3ForCausalLM(config).eval()
    # No row holds the drafter's mask token.
    target.lm_head.weight.data[16] = 0.0
    rows = []
    for i in range(options.rows * options.batches):
        n_prompt = options.block_size + i % 3
        prompt = torch.randint(17, 512, (1, n_prompt))
        ids = target.generate(
            prompt, max_new_tokens=options.row_tokens - n_prompt, do_sample=False, pad_token_id=0
        )[0].tolist()
        rows.append({"input_ids": ids, "loss_mask": [0] * n_prompt + [1] * (len(ids) - n_prompt)})
    return target, rows


# ---- measuring ----


def check(processes: Sequence[Process], folder: Path) -> dict[str, dict[str, float]]:
    """How the first batch's loss and the worst tensor's gradient differ from ours, relative."""
    losses, gradients = {}, {}
    for process in processes:
        path = folder / f"{process.name}.gradients"
        losses[process.name] = process.ask("check", path)["loss"]
        gradients[process.name] = load_file(path)
    ours = gradients["ours"]
    return {
        name: {
            "loss": abs(losses[name] / losses["ours"] - 1),
            "gradient": max(
                float((theirs[key] - ours[key]).norm() / ours[key].norm()) for key in ours
            ),
        }
        for name, theirs in gradients.items()
        if name != "ours"
    }


def alternate(processes: Sequence[Process], n_steps: int) -> dict[str, list[dict[str, Any]]]:
    """Let every method do the same updates, by turns, each time another one first."""
    steps: dict[str, list[dict[str, Any]]] = {process.name: [] for process in processes}
    for i in range(n_steps):
        for k in range(len(processes)):
            process = processes[(i + k) % len(processes)]
            steps[process.name].append(process.ask("step", i))
    return steps


def summary(steps: Any, n_tokens: Sequence[int], memories: Any) -> dict[str, Any]:
    """Figures of each method, and how the others compare with ours; the first round warms up."""
    counts = list(itertools.islice(itertools.cycle(n_tokens), len(steps["ours"])))
    methods = {}
    for name, answers in steps.items():
        seconds = [answer["seconds"] for answer in answers]
        methods[name] = {
            "tokens_per_s": statistics.median(
                n / s for n, s in list(zip(counts, seconds, strict=True))[1:]
            ),
            "step_s": statistics.median(seconds[1:]),
            "all_steps_s": seconds,
            "losses": [answer["loss"] for answer in answers],
            **memories[name],
        }
    ours = methods["ours"]
    ratios = {
        name: {
            "time": spread(
                [a / b for a, b in zip(m["all_steps_s"], ours["all_steps_s"], strict=True)][1:]
            ),
            "memory": m["step_bytes"] / ours["step_bytes"],
            "last_loss": m["losses"][-1] / ours["losses"][-1] - 1,
        }
        for name, m in methods.items()
        if name != "ours"
    }
    return {"methods": methods, "over_ours": ratios}


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return dict(zip(("lower_quartile", "median", "upper_quartile"), quartiles, strict=True))


def show(report: dict[str, Any]) -> None:
    """Print one table."""
    print(report["device"], report["threads"], "threads", report["versions"])
    columns = ("tokens/s", "s/step", "MiB", "time/ours", "quartiles", "memory/ours")
    print(" " * 12 + "".join(f"{name:>14}" for name in columns) + "   loss, gradient differ by")
    for name, row in report["methods"].items():
        line = f"{name:12}{row['tokens_per_s']:14.1f}{row['step_s']:14.2f}"
        line += f"{row['step_bytes'] / 2**20:14.0f}"
        if name != "ours":
            ratio, differs = report["over_ours"][name], report["checks"][name]
            time = ratio["time"]
            spread_text = f"{time['lower_quartile']:.2f}-{time['upper_quartile']:.2f}"
            line += f"{time['median']:14.2f}{spread_text:>14}{ratio['memory']:14.2f}"
            line += f"   {differs['loss']:.1e}, {differs['gradient']:.1e}"
        print(line)


if __name__ == "__main__":
    sys.exit(main())
