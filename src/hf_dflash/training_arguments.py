"""`DFlashTrainingArguments`: those of transformers, with the papers' defaults, and ours."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import TrainingArguments
from transformers.trainer_utils import HubStrategy

#: Gamma of DFlash for the block sizes it was published with (arXiv:2602.06036, A.1).
PUBLISHED_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}
LOSSES = ("cross_entropy", "forward_kl", "total_variation", "lk_alpha", "lk_lambda")
WEIGHTINGS = ("decay", "dpace")
EXPORT_DTYPES = ("float32", "bfloat16", "float16")

#: Options of transformers that a drafter's training would ignore or stumble over: name, the one
#: value they may have, and why.
_WITHOUT_EFFECT = (
    ("label_smoothing_factor", 0.0, "the loss is the drafter's own, which smooths no labels"),
    ("neftune_noise_alpha", None, "a drafter reads the embeddings of its frozen target"),
    ("batch_eval_metrics", False, "acceptance is counted over all batches together"),
    ("eval_do_concat_batches", True, "acceptance is counted over all batches together"),
)


@dataclass
class DFlashTrainingArguments(TrainingArguments):
    """Transformers' training arguments with the papers' defaults, and the drafter's own.

    Beyond those of transformers:
        n_anchors: Most blocks a row and epoch (DFlash A.1: 512).
        random_anchors: Draw them anew each epoch; `False` is the paper's ablation baseline.
        loss_type: "cross_entropy" on the target's tokens (the papers'), or distance from the
            target's distribution: "forward_kl", "total_variation", "lk_alpha" or "lk_lambda"
            (arXiv:2602.23881).
        lk_eta: How soon "lk_lambda" goes over from KL to total variation (3, as in other
            trainers).
        on_policy: Take that distance behind the drafter's own drafts, which the target scores in
            a second forward (`hf_dflash.on_policy`), not behind the text of the rows.
        on_policy_temperature: At which it drafts then; 0: its best tokens.
        loss_weighting: "decay" over the block (the papers'), or "dpace" (arXiv:2605.18810).
        loss_decay_gamma: In slots; `None`: 7, 5, 4 for blocks of 16, 10, 8 (DFlash A.1), half the
            drafts otherwise.
        loss_decay_gamma_last: Gamma at the last step, reached linearly (DFlare starts at 4.5);
            `None`: constant.
        dpace_alpha: Smoothing of D-PACE's confidence (its paper: 0.5).
        n_sampled_tokens: Take the cross-entropy over the labels of a batch and this many other
            tokens (`SampledVocabulary`), where the head is most of a step: on CPUs. Evaluation is
            over all tokens. `None`: so is training.
        logits_chunk_size: Most rows of logits that exist at once; `None`: by what memory is free.
        pad_to_multiple_of: Fill up rows to a multiple of this many tokens, which changes no loss;
            `None`: 128 with flex attention, which is compiled anew for new lengths, else 1.
        ema_decay: Keep a moving average of the weights with this decay, which is then what is
            evaluated and exported; `None`: none.
        export_dtype: Of the drafter that `save_model` writes; `None`: as it is trained.

    Raises:
        ValueError: A value is out of range, or two options contradict each other.
    """

    learning_rate: float = field(default=6e-4, metadata={"help": "At its peak, of AdamW."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "See transformers."})
    warmup_steps: float = field(
        default=0.04, metadata={"help": "Steps of warm-up; below 1: share of all steps."}
    )
    max_grad_norm: float = field(default=1.0, metadata={"help": "Where gradients are clipped."})
    remove_unused_columns: bool = field(default=False)
    # Every parameter of a drafter is used in every forward.
    ddp_find_unused_parameters: bool | None = field(default=False)
    # With it, a loss that is not a number would be logged as 0.
    logging_nan_inf_filter: bool = field(default=False)
    n_anchors: int = field(default=512, metadata={"help": "Most blocks a row and epoch."})
    random_anchors: bool = field(default=True, metadata={"help": "Draw anchors anew each epoch."})
    loss_type: str = field(
        default="cross_entropy", metadata={"help": "What is minimised.", "choices": LOSSES}
    )
    lk_eta: float = field(
        default=3.0, metadata={"help": "Of lk_lambda: the larger, the sooner total variation."}
    )
    on_policy: bool = field(
        default=False, metadata={"help": "Distil behind the drafter's own drafts, not the text."}
    )
    on_policy_temperature: float = field(
        default=1.0, metadata={"help": "Of those drafts; 0: the best token of each slot."}
    )
    loss_weighting: str = field(
        default="decay", metadata={"help": "How slots are weighed.", "choices": WEIGHTINGS}
    )
    loss_decay_gamma: float | None = field(
        default=None, metadata={"help": "Decay of the loss over the block, in slots."}
    )
    loss_decay_gamma_last: float | None = field(
        default=None, metadata={"help": "Gamma at the last step; rises linearly (DFlare)."}
    )
    dpace_alpha: float = field(default=0.5, metadata={"help": "Smoothing of D-PACE."})
    n_sampled_tokens: int | None = field(
        default=None, metadata={"help": "Tokens besides the labels in a sampled softmax."}
    )
    logits_chunk_size: int | None = field(
        default=None, metadata={"help": "Most rows of logits that exist at once."}
    )
    hub_strategy: str = field(
        default="end",
        metadata={"help": "Only `end`: the drafter is pushed when training is over, or later."},
    )
    pad_to_multiple_of: int | None = field(
        default=None, metadata={"help": "Fill up rows to a multiple of this many tokens."}
    )
    ema_decay: float | None = field(
        default=None, metadata={"help": "Decay of a moving average of the weights."}
    )
    export_dtype: str | None = field(
        default=None, metadata={"help": "Dtype of the saved drafter.", "choices": EXPORT_DTYPES}
    )

    def __post_init__(self) -> None:
        """Check the drafter's own arguments."""
        super().__post_init__()
        for name, needed, reason in _WITHOUT_EFFECT:
            if getattr(self, name) != needed:
                raise ValueError(
                    f"`{name}` must be {needed}, got {getattr(self, name)!r}: {reason}. Leave it "
                    "out."
                )
        if self.push_to_hub and self.hub_strategy != HubStrategy.END:
            raise ValueError(
                f"`hub_strategy` must be 'end', got {str(self.hub_strategy)!r}: a push while "
                "training would send checkpoints as they are, not the drafter as it is published. "
                "Push later with `hf-dflash push`, or after training."
            )
        self._check_choice("loss_type", LOSSES)
        self._check_choice("loss_weighting", WEIGHTINGS)
        self._check_choice("export_dtype", (None, *EXPORT_DTYPES))
        self._check_range("n_anchors", 1, None)
        self._check_range("logits_chunk_size", 1, None)
        self._check_range("n_sampled_tokens", 1, None)
        self._check_range("pad_to_multiple_of", 1, None)
        kind = (self.loss_type, self.loss_weighting)
        if self.n_sampled_tokens is not None and kind != ("cross_entropy", "decay"):
            raise ValueError(
                '`n_sampled_tokens` needs `loss_type`="cross_entropy" and `loss_weighting`="decay":'
                " a distribution over part of the vocabulary, or the drafter's confidence in it, is"
                f" another one. Got {kind[0]!r} and {kind[1]!r}."
            )
        self._check_range("ema_decay", 0, 0.99999)
        self._check_range("lk_eta", 0, None)
        self._check_range("on_policy_temperature", 0, None)
        if self.on_policy and self.loss_type == "cross_entropy":
            raise ValueError(
                "`on_policy` needs a distance from the target's distribution, since the rows hold "
                f"no token behind a draft: `loss_type` one of {list(LOSSES[1:])}, got "
                "'cross_entropy'."
            )
        for name in ("loss_decay_gamma", "loss_decay_gamma_last", "dpace_alpha"):
            self._check_range(name, 1e-3, 1 if name == "dpace_alpha" else None)
        if self.loss_weighting == "dpace":
            self._check_dpace()

    def gamma_for(self, block_size: int) -> float:
        """Gamma at the first step."""
        if self.loss_decay_gamma is not None:
            return self.loss_decay_gamma
        return PUBLISHED_GAMMA.get(block_size, max((block_size - 1) / 2, 1.0))

    def _check_choice(self, name: str, choices: tuple[str | None, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise ValueError(f"`{name}` must be one of {list(choices)}, got {value!r}.")

    def _check_range(self, name: str, low: float, high: float | None) -> None:
        value = getattr(self, name)
        if value is not None and (value < low or (high is not None and value > high)):
            upper = "" if high is None else f" and at most {high}"
            raise ValueError(f"`{name}` must be at least {low}{upper}, got {value}.")

    def _check_dpace(self) -> None:
        if self.loss_type != "cross_entropy":
            raise ValueError(
                '`loss_weighting`="dpace" needs `loss_type`="cross_entropy", from which it takes '
                f"the drafter's confidence, got {self.loss_type!r}."
            )
        if self.loss_decay_gamma is not None or self.loss_decay_gamma_last is not None:
            raise ValueError(
                '`loss_decay_gamma` has no meaning with `loss_weighting`="dpace", whose weights '
                "follow the drafter. Leave one of them out."
            )
