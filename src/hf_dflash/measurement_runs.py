"""What ``hf-dflash bench`` records: where it ran, with what settings, and every run.

Nothing here is computed from runs: see ``measurement_summary``.
"""

from dataclasses import dataclass, field
from typing import Literal

#: ``plain_<dtype>`` is plain decoding by the target in another dtype than the measurement's.
Method = Literal[
    "plain",
    "dflash",
    "stock_dflash",
    "prompt_lookup",
    "assistant_model",
    "plain_float32",
    "plain_bfloat16",
    "plain_float16",
]
#: Shape of the drafts of a cycle.
Mode = Literal["chain"]


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """The target that was measured."""

    name: str  # as it was loaded: a repository's, or the last part of a folder's path
    revision: str | None = None  # commit of its repository on the Hub; None for a folder


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """The drafter that was measured."""

    name: str
    sha256: str  # of its weights' file
    architecture: str  # "dflash" or "dflare"
    block_size: int  # of its config, the anchor included
    n_draft_layers: int
    n_parameters: int  # its own; embedding and head are the target's
    # Beside its weights they decide what it drafts. Older files do not have them.
    target_layer_ids: list[int] = field(default_factory=list)
    policy: dict[str, int | float] = field(default_factory=dict)  # what it sets of it


@dataclass(frozen=True, slots=True)
class MadeWith:
    """Code and machine of a record: the part of its provenance that no model decides."""

    command: str
    commit: str | None  # of the checkout that ran, "-dirty" if it was changed; None if installed
    date: str  # ISO 8601, when the measurement began
    versions: dict[str, str]  # "hf_dflash", "torch", "transformers", "python"
    device: str
    threads: int


@dataclass(frozen=True, slots=True)
class Provenance(MadeWith):
    """Everything that the figures depend on, apart from the settings."""

    dtype: str
    seed: int
    target: TargetInfo
    drafter: DrafterInfo
    n_processes: int = 1
    # Of how many rows products were made the other way (see `few_rows`), which every process finds
    # out by the clock; empty: of none. None: older files, or processes or sittings that differ.
    few_rows: list[int] | None = None
    # Of the package's source files, see `hash_of_code`: two changed checkouts of one commit differ
    # in it. Older files do not have it.
    code_sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked to be measured."""

    max_new_tokens: int
    temperature: float  # 0 is greedy
    n_prompts: dict[str, int]  # by data set
    repeats: int
    template_options: dict[str, str | int | float | bool] = field(default_factory=dict)
    methods: list[str] = field(default_factory=list)
    block_sizes: list[int] = field(default_factory=list)
    n_lookup_tokens: int | None = None  # drafts of a prompt look-up; None: not measured
    assistant_model: str | None = None
    metrics: list[str] = field(default_factory=list)  # that judged answers, and what computed them
    stops_at_eos: bool = True  # False: every run makes `max_new_tokens` tokens


@dataclass(frozen=True, slots=True)
class Seconds:
    """Wall clock of one call of ``generate``; every second of it is in exactly one field.

    As in the papers, a drafter's own pass over the prompt is kept apart from the decoding.
    """

    prefill: float  # from the call to the end of the target's forward over the prompt
    first_draft: float  # from there to the first drafts; 0 where nothing is drafted by a model
    decode: float  # all that is left; next to nothing for an output of one token

    @property
    def total(self) -> float:
        """The whole call."""
        return self.prefill + self.first_draft + self.decode


@dataclass(frozen=True, slots=True)
class CycleSeconds:
    """What ``Seconds.decode`` went into; the rest of it was spent in neither model."""

    draft: float  # forwards of the drafter and of the head on its hidden states
    verify: float  # forwards of the target


@dataclass(frozen=True, slots=True)
class Run:
    """One call of ``generate``."""

    dataset: str
    prompt_index: int
    language: str  # ISO 639-1
    thinking: bool
    turn: int  # 0 is the first
    method: Method
    mode: Mode
    block_size: int | None  # None for methods that draft no block
    repeat: int
    n_prompt_tokens: int
    token_ids: list[int]  # the new ones
    seconds: Seconds
    n_accepted: list[int] | None = None  # drafts emitted, by cycle; None where nothing is drafted
    n_drafted: list[int] | None = None
    # The same tokens as plain decoding of this prompt; None for plain itself, and when sampling.
    identical: bool | None = None
    first_difference: int | None = None  # index among the new tokens
    # How much the target's best logit exceeds its second best there, float32.
    top2_gap: float | None = None
    # How much it exceeds the worse of the two tokens' there, and how far rounding moves a logit
    # (see `near_tie`). No distance: one output ends there. No rounding: it was not measured.
    distance: float | None = None
    rounding: float | None = None
    correct: bool | None = None  # by the data set's own metric; None: it has none
    cycle_seconds: CycleSeconds | None = None
    # By cycle, the drafts that were not emitted, in order; None where they were not recorded.
    rejected_ids: list[list[int]] | None = None

    @property
    def variant(self) -> "Variant":
        """The method with what distinguishes it."""
        return Variant(self.method, self.mode, self.block_size)

    @property
    def is_near_tie(self) -> bool | None:
        """Whether rounding explains the first difference; None without one, or if not measured."""
        if self.rounding is None:
            return None
        return self.distance is not None and is_near_tie(self.distance, self.rounding)

    @property
    def prompt_key(self) -> tuple[str, int, int]:
        """What was decoded: data set, prompt, turn."""
        return self.dataset, self.prompt_index, self.turn

    @property
    def key(self) -> "tuple[str, int, int, Variant, int]":
        """What no two runs of a measurement share."""
        return (*self.prompt_key, self.variant, self.repeat)

    @property
    def tokens_per_s(self) -> float:
        """New tokens over the seconds of the whole call."""
        return len(self.token_ids) / self.seconds.total

    @property
    def decode_tokens_per_s(self) -> float | None:
        """New tokens over the seconds of decoding alone: 1 / TPOT of the papers.

        None for an output of one token: the prompt's forward makes it, so nothing was decoded.
        """
        if len(self.token_ids) < 2:
            return None
        return len(self.token_ids) / self.seconds.decode


def is_near_tie(distance: float, rounding: float) -> bool:
    """Whether a logit can pass one that exceeds it by ``distance`` if each moves by ``rounding``.

    >>> is_near_tie(0.25, 0.125), is_near_tie(0.3, 0.125)
    (True, False)
    """
    return distance <= 2 * rounding


@dataclass(frozen=True, slots=True)
class Variant:
    """One column of a comparison.

    >>> Variant("dflash", "chain", 16).label
    'dflash, block 16'
    """

    method: Method
    mode: Mode = "chain"
    block_size: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether nothing is drafted."""
        return self.method.split("_")[0] == "plain"

    @property
    def label(self) -> str:
        """As tables and pictures name it."""
        block = "" if self.block_size is None else f", block {self.block_size}"
        mode = "" if self.mode == "chain" else f", {self.mode}"
        return f"{self.method.replace('_', ' ')}{mode}{block}"
