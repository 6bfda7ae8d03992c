"""The chain decode loop: draft a block, verify it in one target forward, keep the agreed prefix.

Plain decoding emits one token a forward; here each forward emits the accepted drafts and one token
more. What each token is chosen from, and everything that looks at it (processors, criteria,
streamers, records), sees exactly what it would see in plain decoding, in the same order.

Letters: n committed tokens, K drafts of a cycle, S rows of a forward, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from .drafting import DFlashCandidateGenerator, DraftingPolicy, Proposal
from .few_rows import quick_few_rows
from .outputs_dflash import CACHE_NAME, DecodingStatistics, StepRecords
from .target import TargetTaps, forget_past, refuse_recurrent, roll_back, roll_back_to, text_config
from .verification import Verification, argmax_rows, sample_or_accept, verify_greedy


class ChainDecoding:
    """One call of `generate` with a drafter.

    Args:
        target: The target model.
        drafter: The drafter.
        input_ids: (1, n) int64, the prompt.
        policy: How to draft.
        call: The other arguments of transformers' decoding methods: ``generation_config``,
            ``logits_processor``, ``stopping_criteria``, ``streamer``.
        model_kwargs: Inputs of the target's forward, its cache among them.
    """

    def __init__(
        self,
        target: Any,
        drafter: Any,
        input_ids: Tensor,
        *,
        policy: DraftingPolicy,
        call: dict[str, Any],
        model_kwargs: dict[str, Any],
    ) -> None:
        self.target, self.drafter, self.policy = target, drafter, policy
        self.config = call["generation_config"]
        self.processors = call["logits_processor"]
        self.criteria = call["stopping_criteria"]
        self.streamer = call.get("streamer")
        self.model_kwargs = model_kwargs
        layer_types = getattr(text_config(target), "layer_types", None)
        self.records = StepRecords(self.config, layer_types)
        self.statistics = DecodingStatistics()
        self.finished = False
        self._ids = input_ids  # (1, capacity); grows by doubling
        self._n = input_ids.shape[1]
        self._position = 0  # position id of the anchor
        self._n_slots = 0  # slots of the target's cache that hold committed tokens
        kinds = {type(c) for c in self.criteria}
        self._vectorises = (
            not self.config.do_sample
            and len(self.processors) == 0
            and kinds <= {MaxLengthCriteria, EosTokenCriteria}
        )
        # A caller's own length criterion takes the place of the one of the generation config.
        lengths = [c.max_length for c in self.criteria if type(c) is MaxLengthCriteria]
        self._max_length = min(lengths, default=self.config.max_length)
        stops = [c.eos_token_id for c in self.criteria if type(c) is EosTokenCriteria]
        self._stop_ids = torch.cat(stops).to(input_ids.device) if stops else None

    @property
    def ids(self) -> Tensor:
        """Committed tokens (1, n), the prompt included."""
        return self._ids[:, : self._n]

    def run(self) -> Any:
        """Decode to the end; returns what `generate` returns."""
        try:
            with TargetTaps(self.target, self.drafter.config.target_layer_ids) as taps:
                self._run_prompt(taps)
                with (
                    self.target._optimize_model_for_decode(),
                    quick_few_rows(self.target, self.drafter),
                ):
                    while not self.finished:
                        self._run_cycle(taps)
        except BaseException:
            # The caller may go on with this cache: no draft may stay in it.
            if self._n_slots:
                roll_back_to(self.model_kwargs[CACHE_NAME], self._n_slots)
            raise
        finally:
            forget_past(self.model_kwargs[CACHE_NAME])
        self._keep_context()
        if self.streamer is not None:
            self.streamer.end()
        self.statistics.draft_forwards = self.generator.n_forwards
        sequences = self.ids.clone()
        if not self.records.returns_dict:
            return sequences
        return self.records.output(sequences, self.model_kwargs[CACHE_NAME], self.statistics)

    def _run_prompt(self, taps: TargetTaps) -> None:
        """Forward the prompt, or what of it a cache from an earlier turn does not hold."""
        cache = self.model_kwargs[CACHE_NAME]
        mask = self.model_kwargs.get("attention_mask")
        n_past = int(cache.get_seq_length())
        self.generator = DFlashCandidateGenerator(
            self.drafter,
            self.target,
            logits_processor=self.processors,
            do_sample=self.config.do_sample,
            policy=self.policy,
            cache=_context_of_earlier_turns(cache, self.drafter, n_past),
        )
        with taps.recording():
            outputs = self.target._prefill(self.ids, self.config, self.model_kwargs)
        refuse_recurrent(cache)
        self.statistics.target_forwards += 1
        prompt = taps.take()
        n_slots = n_past + prompt[0].shape[1]
        attended = _attended(mask, n_slots, self.ids.device)
        positions = attended.cumsum(dim=0) - 1
        # Padding never enters the context, so the drafter needs no mask.
        rows = attended[n_past:].bool()
        self.generator.add_context(
            [tap[:, rows.to(tap.device)] for tap in prompt], positions[n_past:][rows][None]
        )
        self._position = int(positions[-1]) + 1
        # Only now: a window that recorded its past would keep the whole prompt.
        cache.activate_past_recording()
        self._n_slots = n_slots
        self.records.add_prompt(outputs)
        emitted = self._emit(outputs.logits[0, -1:], None)
        self._commit(outputs, emitted, n_drafts=0)
        self._stream(emitted)

    def _run_cycle(self, taps: TargetTaps) -> None:
        """Draft, verify, commit."""
        proposal = None
        max_drafts = min(self.policy.n_drafts, self._max_length - self._n - 1)
        if max_drafts > 0:
            proposal = self.generator.propose(self.ids, self._position, max_drafts)
        n_drafts = 0 if proposal is None else proposal.draft_ids.shape[0]
        with taps.recording():
            outputs = self._verify(proposal, n_drafts)
        emitted = self._emit(outputs.logits[0, -n_drafts - 1 :], proposal)
        n_emitted = emitted.emitted_ids.shape[0]
        self.records.add_block(outputs, n_emitted, self.model_kwargs[CACHE_NAME])
        # Rows of the anchor and of the emitted drafts; the last emitted token has none yet.
        stop = self._position + n_emitted
        positions = torch.arange(self._position, stop, device=self.drafter.device)
        self.generator.add_context([tap[:, :n_emitted] for tap in taps.take()], positions[None])
        self._position += n_emitted
        self._commit(outputs, emitted, n_drafts=n_drafts)
        self._n_slots += n_emitted
        self.statistics.n_accepted.append(emitted.n_accepted)
        self.statistics.n_drafted.append(n_drafts)
        self._stream(emitted)

    def _verify(self, proposal: Proposal | None, n_drafts: int) -> Any:
        """One target forward over the anchor and the drafts."""
        model_kwargs = self.model_kwargs
        if proposal is not None and n_drafts > 0:
            self._write(proposal.draft_ids)
            model_kwargs = self.target._update_model_kwargs_for_generation(
                {}, dict(model_kwargs), num_new_tokens=n_drafts
            )
        inputs = self.target.prepare_inputs_for_generation(
            self._ids[:, : self._n + n_drafts],
            next_sequence_length=n_drafts + 1,
            is_first_iteration=False,
            **model_kwargs,
        )
        if inputs["input_ids"].shape[1] != n_drafts + 1:
            raise NotImplementedError(
                f"`{type(self.target).__name__}.prepare_inputs_for_generation` must pass the last "
                f"`next_sequence_length`={n_drafts + 1} tokens on, got "
                f"{inputs['input_ids'].shape[1]}. Use plain generate()."
            )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = n_drafts + 1
        self.statistics.target_forwards += 1
        return self.target(**inputs, return_dict=True)

    def _emit(self, logits: Tensor, proposal: Proposal | None) -> Verification:
        """Choose tokens from the rows (K + 1, V) as far as the drafts agree; put them into ids."""
        logits = logits.to(self.ids.device)
        if not self._vectorises:
            return self._emit_in_order(logits, proposal)
        target_ids = argmax_rows(logits)
        draft_ids = target_ids[:0] if proposal is None else proposal.draft_ids
        emitted = verify_greedy(draft_ids, target_ids, self._stop_ids)
        n_emitted = emitted.emitted_ids.shape[0]
        if self.records.wants_rows:
            # A copy: a view would keep the rows of rejected drafts alive.
            for row in logits[:n_emitted].to(torch.float32, copy=True).split(1):
                self.records.add_row(row, row)
        self._write(emitted.emitted_ids)
        self._n += n_emitted
        self.finished = emitted.stopped or self._n >= self._max_length
        return emitted

    def _emit_in_order(self, logits: Tensor, proposal: Proposal | None) -> Verification:
        """Token by token: processors and criteria may keep a state, so they see what is emitted."""
        draft_ids = [] if proposal is None else proposal.draft_ids.tolist()
        start, n_accepted = self._n, 0
        for i, row in enumerate(logits.split(1)):
            raw = row.to(torch.float32, copy=True)
            scores = self.processors(self.ids, raw)
            self.records.add_row(raw, scores)
            draft_id = draft_ids[i] if i < len(draft_ids) else None
            token, accepted = self._choose(scores[0], draft_id, proposal, i)
            n_accepted += accepted
            self._write(torch.tensor([token], device=self._ids.device))
            self._n += 1
            self.finished = bool(self.criteria(self.ids, self.records.scores).all())
            if self.finished or not accepted:
                break
        emitted = self._ids[0, start : self._n].clone()
        return Verification(emitted, n_accepted, self.finished)

    def _choose(
        self, scores: Tensor, draft_id: int | None, proposal: Proposal | None, row: int
    ) -> tuple[int, bool]:
        if not self.config.do_sample:
            token = int(scores.argmax())
            return token, token == draft_id
        law = None if proposal is None else proposal.law
        return sample_or_accept(scores.softmax(dim=-1), draft_id, law, row)

    def _commit(self, outputs: Any, emitted: Verification, *, n_drafts: int) -> None:
        """Roll the target's cache back to the tokens kept and bring its inputs up to date."""
        n_emitted = emitted.emitted_ids.shape[0]
        self.model_kwargs = self.target._update_model_kwargs_for_generation(
            outputs, self.model_kwargs, num_new_tokens=n_emitted
        )
        roll_back(self.model_kwargs[CACHE_NAME], n_drafts + 1 - n_emitted)

    def _write(self, token_ids: Tensor) -> None:
        """Put tokens (m,) behind the committed ones, without committing them."""
        stop = self._n + token_ids.shape[0]
        if stop > self._ids.shape[1]:
            grown = self._ids.new_zeros(1, max(2 * self._ids.shape[1], stop))
            grown[:, : self._n] = self.ids
            self._ids = grown
        self._ids[0, self._n : stop] = token_ids

    def _stream(self, emitted: Verification) -> None:
        if self.streamer is None:
            return
        token_ids = emitted.emitted_ids.cpu()
        if hasattr(self.streamer, "put_cycle"):
            self.streamer.put_cycle(token_ids, emitted.n_accepted)
        else:
            for token_id in token_ids.split(1):
                self.streamer.put(token_id)

    def _keep_context(self) -> None:
        """Leave the drafter's context with the target's cache, for the next turn of a chat."""
        cache = self.model_kwargs[CACHE_NAME]
        self.generator.flush_context()
        self.generator.cache.end_slot = int(cache.get_seq_length())
        cache.dflash_context = (self.drafter.context_key, self.generator.cache)


def _context_of_earlier_turns(cache: Any, drafter: Any, n_past: int) -> Any | None:
    """The drafter's context that an earlier call left with this cache, cut to what it still holds.

    It is taken off the cache: a call that is interrupted leaves a context that does not fit.
    """
    key, context = vars(cache).pop("dflash_context", (None, None))
    if key != drafter.context_key or n_past == 0:
        return None
    context.drop(max(context.end_slot - n_past, 0))
    return context


def _attended(mask: Tensor | None, n_slots: int, device: torch.device) -> Tensor:
    """Which of the first ``n_slots`` slots hold a token: (n_slots,) int64, 0 for padding."""
    if mask is None:
        return torch.ones(n_slots, dtype=torch.long, device=device)
    return mask[0, :n_slots].long()
