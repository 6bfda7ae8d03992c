"""The arguments of `hf-dflash train`: one dataclass each, read from flags, a YAML file, or both."""

import difflib
import json
from argparse import SUPPRESS, Action, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml
from transformers import HfArgumentParser, TrainingArguments

from .training_arguments import DFlashTrainingArguments

USAGE = "hf-dflash train [RUN.yaml] [--NAME VALUE ...]"
DESCRIPTION = """\
Train a drafter on rows of `hf-dflash prepare`. Arguments come from a YAML file of the same names,
from flags, or both; flags win. All arguments of transformers' TrainingArguments are taken, of which
the usual ones are listed."""
EPILOG = """\
Example: hf-dflash train --target my-model --data rows.jsonl --output_dir my-drafter
On all GPUs of a machine: accelerate launch -m hf_dflash.cli train run.yaml"""
#: Of transformers' arguments, those that `--help` lists: over a hundred would hide ours.
LISTED = (
    "output_dir",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_train_epochs",
    "max_steps",
    "learning_rate",
    "warmup_steps",
    "bf16",
    "seed",
    "logging_steps",
    "eval_strategy",
    "eval_steps",
    "save_strategy",
    "save_steps",
    "save_total_limit",
    "resume_from_checkpoint",
    "report_to",
    "dataloader_num_workers",
    "push_to_hub",
    "hub_model_id",
    "hub_private_repo",
)
#: transformers leaves what it means to each script.
RESUME_HELP = "true: go on from the last checkpoint of output_dir; or the folder of one."
#: Options of a drafter yet to be made; a trained one has them already, and only its blocks can
#: get another size.
NEW_DRAFTER = (
    "architecture",
    "num_draft_layers",
    "num_taps",
    "target_layer_ids",
    "block_size",
    "mask_token_id",
    "drafter_config",
)


def _option(help_text: str, default: Any = None) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass
class RunArguments:
    """What is trained on what; how, is `DFlashTrainingArguments`.

    The help texts of the fields are their documentation.

    Raises:
        ValueError: One of them would be ignored because of another, or lacks one it needs.
    """

    _argument_group_name = "the run"

    target: str = field(metadata={"help": "Folder or Hub repository of the target."})
    data: str = field(metadata={"help": "Rows to train on, made by `hf-dflash prepare`."})
    eval_data: list[str] | None = field(
        default=None,
        metadata={
            "help": "Held-out rows, evaluated as eval_strategy says and at the end; several files "
            "(languages, thinking on and off, lengths) are told apart by their names."
        },
    )
    decoding_prompts: int = _option("Prompts of each of them to decode at every evaluation.", 0)
    decoding_max_new_tokens: int = _option("Most tokens to decode for each of them.", 128)
    taps: str | None = _option("Folder of data's cached taps (`prepare --cache-taps`).")
    target_dtype: Literal["auto", "float32", "bfloat16", "float16"] = _option(
        "Dtype of the target; auto: as it was saved.", "auto"
    )
    target_device_map: str | None = _option(
        "Spread the target over the GPUs of one process, such as auto; not with several processes."
    )
    shard_target: bool = _option(
        "Spread the target's layers over all processes (FSDP2), if one GPU cannot hold it.", False
    )
    drafter: str | None = _option(
        "Folder or Hub repository of a drafter to go on from (warm start). None: a new one."
    )
    drafter_attention: Literal["sdpa", "eager", "flex_attention"] | None = _option(
        "Attention kernel of the drafter. None: flex_attention on CUDA, else sdpa."
    )
    architecture: Literal["dflash", "dflare"] | None = _option(
        "Of a new drafter, as all of these are. None: dflash."
    )
    num_draft_layers: int | None = _option("None: 5 for dflash, 7 for dflare (the papers').")
    num_taps: int | None = _option("Target layers it reads. None: 5 for dflash, 9 for dflare.")
    target_layer_ids: list[int] | None = field(
        default=None, metadata={"help": "Which ones, 0-based, instead of num_taps."}
    )
    block_size: int | None = _option(
        "Tokens of a block, the anchor included; also to go on from `drafter` with another size. "
        "None: 16, or the drafter's."
    )
    mask_token_id: int | None = _option(
        "Token that no text holds. None: chosen by the tokenizer; see docs/training.md."
    )
    drafter_config: str | None = _option(
        "Other fields of its config: a mapping in YAML, JSON text as a flag."
    )
    init_from_target: bool = _option("Start its layers from the target's own.", False)
    lora_rank: int | None = _option("Train an adapter of this rank on `drafter` and nothing else.")
    lora_alpha: int | None = _option("Scale of the adapter. None: lora_rank.")
    lora_merge: bool = _option("Merge the adapter into the drafter that is saved.", True)

    def __post_init__(self) -> None:
        """Refuse what would be ignored."""
        fixed = [name for name in NEW_DRAFTER if name != "block_size"]
        given = [f"`{name}`" for name in fixed if getattr(self, name) is not None]
        given += ["`init_from_target`"] * self.init_from_target
        self._check(
            self.drafter is None or not given,
            f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} for a new drafter, but "
            "`drafter` names a trained one. Leave one of them out.",
        )
        self._check(
            self.lora_rank is None or (self.drafter is not None and self.lora_rank > 0),
            f"`lora_rank` must be at least 1 and needs `drafter`, the drafter to adapt, got "
            f"{self.lora_rank} and {self.drafter}.",
        )
        self._check(
            self.lora_rank is not None or (self.lora_alpha is None and self.lora_merge),
            "`lora_alpha` and `lora_merge` are of no account without `lora_rank`. Give it too.",
        )
        self._check(
            self.lora_merge or self.block_size is None,
            f"`block_size` is kept by a whole drafter only, but `lora_merge` is false, got "
            f"{self.block_size}. Leave one of them out.",
        )
        self._check(
            self.decoding_prompts == 0 or (self.decoding_prompts > 0 and bool(self.eval_data)),
            f"`decoding_prompts` are the first of each `eval_data`: give that, and a number of "
            f"at least 0, got {self.decoding_prompts}.",
        )
        self._check(
            self.decoding_max_new_tokens > 0,
            f"`decoding_max_new_tokens` must be at least 1, got {self.decoding_max_new_tokens}.",
        )
        self._check_shards()

    def _check_shards(self) -> None:
        self._check(
            not self.shard_target or self.target_device_map is None,
            "`shard_target` and `target_device_map` both place the target. Leave one of them out.",
        )
        self._check(
            not self.shard_target or self.decoding_prompts == 0,
            "`decoding_prompts` are decoded by one process, but with `shard_target` each has only "
            "part of the target. Decode with saved checkpoints instead.",
        )

    def new_drafter_options(self) -> dict[str, Any]:
        """Arguments of `DFlashConfig.for_target` that were given."""
        given = {name: getattr(self, name) for name in NEW_DRAFTER}
        more = given.pop("drafter_config")
        fields_of_config = _mapping(json.loads(more), "drafter_config") if more else {}
        return {k: v for k, v in given.items() if v is not None} | fields_of_config

    def _check(self, is_right: bool, message: str) -> None:
        if not is_right:
            raise ValueError(message)


class _Formatter(RawDescriptionHelpFormatter):
    """One spelling of each name, and its default where there is one."""

    def _format_action_invocation(self, action: Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        if action.choices is not None:
            kind = "|".join(map(str, action.choices))
        else:
            kind = {int: "N", float: "X", str: "TEXT"}.get(action.type, "true|false")  # type: ignore[call-overload]
        if action.nargs == 0:
            return ", ".join(action.option_strings)
        return f"{action.option_strings[0]} {kind}{' ...' * (action.nargs == '+')}"

    def _get_help_string(self, action: Action) -> str:
        has_default = action.default not in (None, SUPPRESS)
        return (action.help or "") + (" (default: %(default)s)" if has_default else "")


class _Parser(HfArgumentParser):
    """Errors as exceptions, and no abbreviations: a mistyped name is never another's."""

    def __init__(self) -> None:
        kinds: list[Any] = [RunArguments, DFlashTrainingArguments]
        super().__init__(
            kinds,
            usage=USAGE,
            description=DESCRIPTION,
            epilog=EPILOG,
            allow_abbrev=False,
            formatter_class=_Formatter,
        )
        self._action_groups.insert(0, self._action_groups.pop())  # the run comes first
        theirs = {f.name for f in fields(TrainingArguments)} - set(LISTED)
        for action in self._actions:
            if action.dest == "resume_from_checkpoint":
                action.help = RESUME_HELP
            if action.dest in theirs or "--no_" in "".join(action.option_strings):
                action.help = SUPPRESS

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see `hf-dflash train --help`)")


def parse_run(words: Sequence[str]) -> tuple[RunArguments, DFlashTrainingArguments]:
    """Read the command line of a run.

    Args:
        words: What stands behind ``hf-dflash train``: at most one YAML file, and flags.

    Raises:
        ValueError: A name is unknown, or a value cannot be read.
    """
    parser = _Parser()
    flags = list(words)
    if flags and flags[0].endswith((".yaml", ".yml")):
        path = Path(flags.pop(0))
        flags = _flags_of(path, parser) + flags
    known, unknown = parser.parse_known_args(flags)
    if unknown:
        names = [word.lstrip("-").split("=")[0] for word in unknown]
        raise ValueError(_unknown("The command line", names, parser))
    del known
    run, args = parser.parse_args_into_dataclasses(args=flags, look_for_args_file=False)
    return run, args


def _flags_of(path: Path, parser: _Parser) -> list[str]:
    """What the command line would be: so both are read by the same rules."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    values = _mapping(content or {}, str(path))
    actions = {action.dest: action for action in parser._actions}
    unknown = [name for name in values if name not in actions]
    if unknown:
        raise ValueError(_unknown(str(path), unknown, parser))
    flags = []
    for name, value in values.items():
        if isinstance(value, list) and actions[name].nargs == "+":
            flags += [f"--{name}", *map(str, value)]
        elif value is not None:  # null leaves the default
            is_text = isinstance(value, str)
            # JSON writes true, lists and mappings as the parser reads them.
            flags.append(f"--{name}={value if is_text else json.dumps(value)}")
    return flags


def _mapping(content: Any, where: str) -> dict[str, Any]:
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ValueError(f"{where} must hold names and values, `name: value`, got {content!r:.60}.")
    return content


def _unknown(where: str, names: Sequence[str], parser: _Parser) -> str:
    known = [action.dest for action in parser._actions]
    told = []
    for name in names:
        close = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
        told.append(f"`{name}`" + (f" (meant: {close[0]}?)" if close else ""))
    return (
        f"{where} holds what is no argument of a run: {', '.join(told)}. "
        "`hf-dflash train --help` lists them."
    )
