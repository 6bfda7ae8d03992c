"""Propose a block: taps -> context K/V -> one block forward -> drafts and the law they came from.

Letters: N batch (always 1 here), S rows of context, B block size, K drafts, T taps, Ht target
hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as lp
from transformers.generation.candidate_generator import CandidateGenerator

from .target import draft_logits, noise_embeddings
from .verification import DraftLaw, argmax_rows

# Rows of context that are projected at once. Bounds the memory of a long prompt's taps.
_CONTEXT_CHUNK = 1024

# Functions of one row of scores, so all rows can be processed at once, on part of the vocabulary.
_WARPERS = (
    lp.TemperatureLogitsWarper,
    lp.TopKLogitsWarper,
    lp.TopPLogitsWarper,
    lp.MinPLogitsWarper,
    lp.TypicalLogitsWarper,
    lp.EpsilonLogitsWarper,
    lp.EtaLogitsWarper,
    lp.LogitNormalization,
)
# Functions of the ids so far and one row of scores. Anything else may keep a state that drafts,
# most of them never emitted, would spoil: it is applied to the target's rows only.
_PREFIX_PROCESSORS = (
    lp.RepetitionPenaltyLogitsProcessor,
    lp.NoRepeatNGramLogitsProcessor,
    lp.NoBadWordsLogitsProcessor,
    lp.SequenceBiasLogitsProcessor,
    lp.MinLengthLogitsProcessor,
    lp.MinNewTokensLengthLogitsProcessor,
    lp.SuppressTokensLogitsProcessor,
    lp.SuppressTokensAtBeginLogitsProcessor,
    lp.ForcedBOSTokenLogitsProcessor,
    lp.ForcedEOSTokenLogitsProcessor,
    lp.ExponentialDecayLengthPenalty,
    lp.InfNanRemoveLogitsProcessor,
)


@dataclass(frozen=True, slots=True)
class Proposal:
    """What the drafter proposes for one cycle."""

    draft_ids: Tensor  # (K,) int64
    law: DraftLaw | None  # None where the drafts are the drafter's argmax


@dataclass(frozen=True, slots=True)
class DraftingPolicy:
    """How many tokens to draft and how to choose them; design: the drafter's generation config."""

    n_drafts: int  # most drafts a cycle, 1..B - 1
    confidence_threshold: float | None  # drafts from the first less likely one on are not verified
    temperature: float | None  # of the drafter; None: the call's own; 0: the drafter's argmax


class DFlashCandidateGenerator(CandidateGenerator):
    """Proposes blocks for one call of `generate`; holds the drafter's context of that call.

    Our decode loop calls `add_context` and `propose`. Transformers' stock assisted loop calls
    `get_candidates`, which does both with what that loop provides.

    Args:
        drafter: The drafter.
        target: The target model.
        logits_processor: Those of the call. The drafter's laws are taken after them, as far as
            they are functions of ids and scores alone.
        do_sample: Whether the call samples.
        policy: How many drafts; a full block if `None`.
        cache: A context to go on with, from an earlier call.
    """

    requires_model_outputs = True
    # All layers: which index selects which layer has changed between transformers releases.
    model_kwargs_overrides: dict[str, Any] = {"output_hidden_states": True}  # noqa: RUF012

    def __init__(
        self,
        drafter: Any,
        target: Any,
        *,
        logits_processor: Sequence[Any] = (),
        do_sample: bool = False,
        policy: DraftingPolicy | None = None,
        cache: Any | None = None,
    ) -> None:
        self.drafter = drafter
        self.target = target
        self.policy = policy or DraftingPolicy(drafter.config.block_size - 1, None, None)
        self.cache = drafter.new_cache() if cache is None else cache
        self.n_forwards = 0
        self._samples = do_sample and self.policy.temperature != 0.0
        self._processors = self._draft_processors(logits_processor)
        self._masks = torch.full((1, self.policy.n_drafts), drafter.config.mask_token_id)
        self._taps: list[Tensor] = []  # of tokens committed but not yet projected
        self._positions = torch.empty(1, 0, dtype=torch.long, device=drafter.device)

    def add_context(self, taps: Sequence[Tensor], position_ids: Tensor) -> None:
        """Take the taps of newly committed tokens; few are kept for the next draft forward.

        Args:
            taps: T tensors (1, S, Ht).
            position_ids: (1, S) int64.
        """
        self.flush_context()
        self._taps = [tap.to(self.drafter.device, self.drafter.dtype) for tap in taps]
        self._positions = position_ids.to(self.drafter.device)
        n_rows = position_ids.shape[1]
        if n_rows > self.drafter.config.block_size:
            self.flush_context()

    def flush_context(self) -> None:
        """Project every tap that is still waiting."""
        for start in range(0, self._positions.shape[1], _CONTEXT_CHUNK):
            rows = slice(start, start + _CONTEXT_CHUNK)
            piece = torch.cat([tap[:, rows] for tap in self._taps], dim=-1)
            self.drafter.extend_context(piece, self._positions[:, rows], self.cache)
        self._taps, self._positions = [], self._positions[:, :0]

    def propose(self, prefix_ids: Tensor, anchor_position: int, max_drafts: int) -> Proposal:
        """Draft up to ``max_drafts`` tokens after the anchor, the last of ``prefix_ids``.

        Args:
            prefix_ids: (1, n) int64, every committed token.
            anchor_position: Position id of the anchor.
            max_drafts: At least 1.
        """
        n_drafts = min(max_drafts, self.policy.n_drafts)
        logits = self._draft(prefix_ids[:, -1:], anchor_position, n_drafts)
        if not self._samples and not self._processors:
            proposal = Proposal(argmax_rows(logits), None)
        elif all(type(p) in _WARPERS for p in self._processors):
            proposal = _sample_rows(logits, self._processors)
        else:
            proposal = self._choose_in_order(prefix_ids, logits)
        if self.policy.confidence_threshold is not None:
            proposal = _confident_part(proposal, logits, self.policy.confidence_threshold)
        return proposal

    def _draft(self, anchor_id: Tensor, anchor_position: int, n_drafts: int) -> Tensor:
        """One block forward; logits (K, V) of the mask slots."""
        drafter = self.drafter
        self._masks = self._masks.to(anchor_id.device)  # once: it stays there
        noise = noise_embeddings(
            self.target,
            torch.cat([anchor_id, self._masks[:, :n_drafts]], dim=1),
            drafter.config.input_embedding_scale,
        ).to(drafter.device, drafter.dtype)
        block = torch.arange(anchor_position, anchor_position + n_drafts + 1, device=noise.device)
        if self._taps:
            context = torch.cat(self._taps, dim=-1)
        else:
            width = len(drafter.config.target_layer_ids) * drafter.config.target_hidden_size
            context = noise.new_empty(1, 0, width)
        hidden = drafter(
            noise_embeds=noise,
            context_hidden_states=context,
            position_ids=torch.cat([self._positions.to(block.device), block[None]], dim=1),
            cache=self.cache,
        ).last_hidden_state
        self._taps, self._positions = [], self._positions[:, :0]
        self.n_forwards += 1
        return draft_logits(self.target, hidden[:, 1:], drafter.config)[0].to(anchor_id.device)

    def _choose_in_order(self, prefix_ids: Tensor, logits: Tensor) -> Proposal:
        """Choose draft after draft: a processor may look at the drafts before."""
        n_drafts, prefix = logits.shape[0], prefix_ids.shape[1]
        ids = torch.cat([prefix_ids, prefix_ids.new_empty(1, n_drafts)], dim=1)
        probs = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        for i in range(n_drafts):  # each row's input holds the choice before it
            scores = logits[i : i + 1].to(torch.float32, copy=True)
            for processor in self._processors:
                scores = processor(ids[:, : prefix + i], scores)
            if self._samples:
                # After a draft that cannot be, every token may be forbidden: any law will do.
                probs[i] = scores[0].softmax(dim=-1).nan_to_num(1 / scores.shape[1])
                ids[0, prefix + i] = torch.multinomial(probs[i], 1)[0]
            else:
                ids[0, prefix + i] = scores[0].argmax()
        draft_ids = ids[0, prefix:]
        if not self._samples:
            return Proposal(draft_ids, None)
        return Proposal(draft_ids, DraftLaw(None, probs, _pick(probs, draft_ids)))

    def _draft_processors(self, processors: Sequence[Any]) -> list[Any]:
        known = [p for p in processors if type(p) in _WARPERS + _PREFIX_PROCESSORS]
        if not self._samples:  # warpers keep the order of scores, and cost a sort of each row
            return [p for p in known if type(p) not in _WARPERS]
        if self.policy.temperature is None:
            return known
        own = lp.TemperatureLogitsWarper(self.policy.temperature)
        return [own, *(p for p in known if type(p) is not lp.TemperatureLogitsWarper)]

    def get_candidates(  # type: ignore[override]  # transformers passes these by name
        self,
        input_ids: Tensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any | None = None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Serve transformers' stock assisted loop.

        Args:
            input_ids: (1, n) int64, committed tokens.
            model_kwargs: The loop's; ``attention_mask`` tells padding.
            model_outputs: Of the target's last forward, with ``hidden_states`` of all layers.
            is_first_iteration: Before the prompt's forward: nothing is proposed.
            n_last_matches: Drafts accepted in the last cycle.

        Returns:
            (1, n + K) ids with the drafts, and (1, K, V) logarithms of their laws when sampling.

        Raises:
            ValueError: The target's outputs hold no hidden states.
        """
        if is_first_iteration:
            return input_ids, None
        hidden_states = getattr(model_outputs, "hidden_states", None)
        if hidden_states is None:
            raise ValueError(
                "`model_outputs` must hold the hidden states of all layers. Call the target with "
                "`model_kwargs_overrides` of this generator."
            )
        n_new = input_ids.shape[1] - 1 if self.cache.n_context == 0 else n_last_matches + 1
        mask = (model_kwargs or {}).get("attention_mask")
        attended = torch.ones_like(input_ids) if mask is None else mask[:, : input_ids.shape[1]]
        positions = attended.cumsum(dim=1) - 1
        new = slice(input_ids.shape[1] - 1 - n_new, input_ids.shape[1] - 1)
        rows = attended[0, new].bool()
        taps = [hidden_states[i + 1][:, :n_new] for i in self.drafter.config.target_layer_ids]
        self.add_context([tap[:, rows.to(tap.device)] for tap in taps], positions[:, new][:, rows])
        proposal = self.propose(input_ids, int(positions[0, -1]), self.policy.n_drafts)
        ids = torch.cat([input_ids, proposal.draft_ids[None]], dim=1)
        return ids, self._log_laws(proposal)

    def _log_laws(self, proposal: Proposal) -> Tensor | None:
        if proposal.law is None or len(proposal.draft_ids) == 0:
            return None
        vocab_size = self.drafter.config.vocab_size
        rows = [proposal.law.dense(i, vocab_size) for i in range(len(proposal.draft_ids))]
        return torch.stack(rows).log()[None]

    def update_candidate_strategy(
        self, input_ids: Tensor, scores: Tensor, num_matches: int
    ) -> None:
        """Nothing to adapt: the number of drafts is constant."""


def _sample_rows(logits: Tensor, warpers: Sequence[Any]) -> Proposal:
    """Draw every draft at once, looking only at the tokens that a top-k leaves.

    q may be any law as long as the drafts are drawn from it, so ties at the k-th place need not
    be treated as the target's own processors treat them.
    """
    scores, token_ids = logits.float(), None
    top_k = [w.top_k for w in warpers if type(w) is lp.TopKLogitsWarper]
    if top_k and min(top_k) < scores.shape[1]:
        scores, token_ids = scores.topk(min(top_k), dim=-1)
    for warper in warpers:
        scores = warper(None, scores)
    probs = scores.softmax(dim=-1)
    choice = torch.multinomial(probs, 1)
    draft_probs = probs.gather(1, choice)[:, 0]
    draft_ids = choice if token_ids is None else token_ids.gather(1, choice)
    return Proposal(draft_ids[:, 0], DraftLaw(token_ids, probs, draft_probs))


def _confident_part(proposal: Proposal, logits: Tensor, threshold: float) -> Proposal:
    """Keep the drafts before the first slot whose likeliest token is below ``threshold``.

    Where drafts are drawn, the slot's law decides and never the draft that was drawn from it: to
    drop unlikely draws is to draw from another law than the q that verification divides by, and
    the output would no longer follow p.
    """
    law = proposal.law
    if law is None:
        confidence = _pick(logits.float().softmax(dim=-1), proposal.draft_ids)
    else:
        confidence = law.probs.amax(dim=-1)
    n_kept = int((confidence >= threshold).cumprod(dim=0).sum())
    if law is not None:
        ids = None if law.token_ids is None else law.token_ids[:n_kept]
        law = DraftLaw(ids, law.probs[:n_kept], law.draft_probs[:n_kept])
    return Proposal(proposal.draft_ids[:n_kept], law)


def _pick(probs: Tensor, ids: Tensor) -> Tensor:
    return probs.gather(1, ids[:, None])[:, 0]
