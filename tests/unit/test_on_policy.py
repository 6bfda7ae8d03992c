"""Scores of drafts against a forward of each prefix alone, and the loss against a plain loop."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM, GPTNeoConfig, GPTNeoForCausalLM

from families.zoo import TEXT_TARGETS, VISION_TARGETS, WINDOW
from hf_dflash import on_policy
from hf_dflash.losses import decay_weights, row_chunks
from hf_dflash.on_policy import (
    check_on_policy,
    draft_ids,
    score_drafts,
    slot_draws,
    stop_ids,
    text_cache,
)
from hf_dflash.target_states import run_target
from hf_dflash.trainer import DFlashTrainer
from hf_dflash.training_arguments import DFlashTrainingArguments
from training_pairs import (
    BLOCK,
    batch_of,
    random_ids,
    row_of,
    step_of,
    training_drafter,
    training_target,
)

GAMMA = 1.5


def rows_of_text() -> list[Any]:
    """Of unequal lengths; blocks at the end are cut short, and one row has none at all."""
    rows = [row_of(random_ids(n, seed=n), n_prompt=4) for n in (23, 17, 11)]
    return [*rows, row_of(random_ids(6, seed=1), n_prompt=6)]


def drafts_for(batch: Any, vocab_size: int = 90) -> Tensor:
    n_rows = int(batch["predicts"].sum())
    generator = torch.Generator().manual_seed(5)
    return torch.randint(1, vocab_size, (n_rows,), generator=generator)


def texts_behind(batch: Any, drafts: Tensor) -> list[list[int]]:
    """For each slot that predicts: its block's text up to the anchor, and the drafts before it."""
    table = torch.zeros_like(batch["labels"])
    table[batch["predicts"]] = drafts
    found = []
    for row, block, slot in batch["predicts"].nonzero().tolist():
        anchor = int(batch["anchors"][row, block])
        text = batch["input_ids"][row, : anchor + 1].tolist()
        found.append(text + table[row, block, 1:slot].tolist())
    return found


@torch.no_grad()
def alone(target: Any, texts: list[list[int]]) -> Tensor:
    """The target's last hidden state of each text, by a forward of its own."""
    decoder = target.get_decoder()
    states = [decoder(input_ids=torch.tensor([t])).last_hidden_state[0, -1] for t in texts]
    return torch.stack(states)


def scored(target: Any, batch: Any, drafts: Tensor) -> Any:
    cache = text_cache()
    states = run_target(
        target, [0], batch["input_ids"], batch["document_ids"], keeps_last=True, cache=cache
    )
    scores = score_drafts(target, cache, states.last_hidden_states, batch, drafts)
    assert cache.get_seq_length() == batch["input_ids"].shape[1]  # no draft stays in it
    return scores


MASKED = ["qwen3", "llama", "gemma2", "gemma3", "gpt_oss", "qwen3_moe", "gpt2", "opt", "phi"]


@pytest.mark.parametrize("family", [*MASKED, "qwen2_5_vl", "gemma3_vlm"])
@pytest.mark.parametrize("most", [512, 5])
def test_all_blocks_at_once_are_each_prefix_alone(
    family: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with windows shorter than the text, and in several forwards of few blocks."""
    monkeypatch.setattr(on_policy, "PART_DRAFTS", most)
    target = (TEXT_TARGETS | VISION_TARGETS)[family]()
    batch = batch_of(rows_of_text())
    drafts = drafts_for(batch, 80)
    check_on_policy(target, 23, 60)
    scores = scored(target, batch, drafts)
    expected = alone(target, texts_behind(batch, drafts))
    assert bool(scores.reached.all())
    assert max(map(len, texts_behind(batch, drafts))) > 2 * WINDOW
    torch.testing.assert_close(scores.states, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_both_attentions_take_the_mask(attention: str) -> None:
    target = training_target().double()
    target.set_attn_implementation(attention)
    batch = batch_of(rows_of_text())
    drafts = drafts_for(batch)
    scores = scored(target, batch, drafts)
    expected = alone(target, texts_behind(batch, drafts))
    digits = 1e-12 if attention == "sdpa" else 1e-5  # eager takes its softmax in float32
    torch.testing.assert_close(scores.states, expected, atol=digits, rtol=digits)


def test_only_drafts_that_a_slot_needs_are_run() -> None:
    """Not a block's last draft, nor what is behind the end, nor blocks that are cut short."""
    target = training_target()
    target.generation_config.eos_token_id = [7, 8]
    batch = batch_of([row_of(random_ids(12, seed=3), n_prompt=4)], n_anchors=64)
    predicts = batch["predicts"]
    assert predicts.sum(dim=-1).tolist() == [[3, 3, 3, 3, 3, 2, 1]]
    drafts = torch.full((int(predicts.sum()),), 5)
    drafts[0], drafts[4] = 8, 7  # the first draft of the first block, the second of the second
    parts: list[Any] = []
    forward = on_policy._forward

    def counted(target: Any, cache: Any, part: Any) -> Tensor:
        parts.append(part)
        return forward(target, cache, part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_policy, "_forward", counted)
        scores = scored(target, batch, drafts)
    (part,) = parts
    assert bool(part.is_real.all())
    runs = list(zip(part.block[0].tolist(), part.slot[0].tolist(), strict=True))
    assert runs == [(1, 2), *((b, k) for b in (2, 3, 4) for k in (2, 3)), (5, 2)]
    assert scores.reached.tolist() == [True, False, False, True, True, False] + [True] * 12


# ---- the loss ----

DISTANCES = ("forward_kl", "total_variation", "lk_alpha", "lk_lambda")


def distance(kind: str, p: Tensor, q: Tensor) -> Tensor:
    """The definitions, of one slot."""
    kl, variation = (p * (p / q).log()).sum(), (p - q).abs().sum() / 2
    share = torch.exp(-3.0 * (1 - variation.detach()))
    return {
        "forward_kl": kl,
        "total_variation": variation,
        "lk_alpha": -(1 - variation).log(),
        "lk_lambda": share * kl + (1 - share) * variation,
    }[kind]


def plain_loss(target: Any, drafter: Any, batch: Any, drafts: Tensor, kind: str) -> Tensor:
    """Slot by slot, with a forward of the target for each."""
    step = step_of(target, drafter)
    taps = step.target_states(batch).taps
    hidden = step.hidden_states(drafter, batch, taps).unflatten(1, (-1, BLOCK))
    laws = target.lm_head(alone(target, texts_behind(batch, drafts))).softmax(-1).detach()
    stops = set(stop_ids(target).tolist())
    weights = decay_weights(BLOCK - 1, GAMMA).tolist()
    total, divisor = torch.zeros((), dtype=hidden.dtype), 0.0
    ended = False
    for i, (row, block, slot) in enumerate(batch["predicts"].nonzero().tolist()):
        ended = slot > 1 and (ended or int(drafts[i - 1]) in stops)
        divisor += weights[slot - 1]
        if not ended:
            q = target.lm_head(hidden[row, block, slot]).softmax(-1)
            total = total + weights[slot - 1] * distance(kind, laws[i], q)
    return total / divisor


def pair_and_batch() -> tuple[Any, Any, Any]:
    target = training_target().double()
    return target, training_drafter(target), batch_of(rows_of_text())


@pytest.mark.parametrize("kind", DISTANCES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_loss_and_gradient_are_those_of_a_plain_loop(
    kind: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a draft ends the text; no gradient reaches the target."""
    target, drafter, batch = pair_and_batch()
    drawn: list[Tensor] = []

    def recorded(*args: Any) -> Tensor:
        drawn.append(draft_ids(*args))
        return drawn[-1]

    monkeypatch.setattr("hf_dflash.training_step.draft_ids", recorded)
    step = step_of(
        target, drafter, loss_type=kind, on_policy=True, on_policy_temperature=temperature
    )
    total = step.total_weight(batch["predicts"], GAMMA)
    step.losses(drafter, batch, total, GAMMA, 7)
    (drafts,) = drawn
    # The end is what this drafter drafts somewhere, so that some slots are cut.
    ends = int(drafts[batch["predicts"][..., 1:].flatten(0, 1).nonzero()[:, 1] == 0][0])
    target.generation_config.eos_token_id = ends
    torch.manual_seed(999)  # drafts follow from the batch, not from what was drawn before
    result = step.losses(drafter, batch, total, GAMMA, 7)
    assert torch.equal(drawn[1], drafts)
    expected = plain_loss(target, drafter, batch, drafts, kind)
    assert 0 < int((result.row_losses == 0).sum()) < len(drafts) // 2
    assert float(result.loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-6)

    names = [name for name, _ in drafter.named_parameters()]
    wanted = torch.autograd.grad(expected, list(drafter.parameters()))
    result.loss.backward()
    for name, parameter, gradient in zip(names, drafter.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-6, rtol=1e-5, msg=name)
    assert all(parameter.grad is None for parameter in target.parameters())


def test_chunks_and_parts_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter, batch = pair_and_batch()
    step = step_of(target, drafter, loss_type="lk_alpha", on_policy=True)
    total = step.total_weight(batch["predicts"], GAMMA)
    whole = step.losses(drafter, batch, total, GAMMA, 512)
    monkeypatch.setattr(on_policy, "PART_DRAFTS", 3)
    pieces = step.losses(drafter, batch, total, GAMMA, 2)
    assert float(pieces.loss.detach()) == pytest.approx(float(whole.loss.detach()), abs=1e-6)
    torch.testing.assert_close(pieces.row_losses, whole.row_losses, atol=1e-6, rtol=1e-6)


def test_rows_may_be_divided_otherwise() -> None:
    """Padding, parts and draws of one row are no matter of the rows beside it."""
    target, drafter, _ = pair_and_batch()
    step = step_of(target, drafter, loss_type="lk_lambda", on_policy=True)
    rows = rows_of_text()[:3]
    one = torch.tensor(1.0)
    together = step.losses(drafter, batch_of(rows), one, GAMMA, 99)
    alone = [step.losses(drafter, batch_of([row]), one, GAMMA, 99) for row in rows]
    torch.testing.assert_close(
        together.row_losses, torch.cat([a.row_losses for a in alone]), atol=1e-6, rtol=0
    )


def test_drafts_are_the_drafters_not_the_texts() -> None:
    """A text with other tokens behind every anchor but the last is scored the same there."""
    target, drafter, _ = pair_and_batch()
    ids = random_ids(12, seed=3)
    batches = [batch_of([row_of([*ids[:8], *tail], n_prompt=7)]) for tail in (ids[8:], ids[4:8])]
    step = step_of(target, drafter, loss_type="forward_kl", on_policy=True)
    step.args.on_policy_temperature = 0.0
    losses = [step.losses(drafter, batch, torch.tensor(1.0), GAMMA, 99) for batch in batches]
    assert batches[0]["anchors"][0, 0] == 7
    one, other = (loss.row_losses for loss in losses)
    torch.testing.assert_close(one[:3], other[:3], atol=1e-10, rtol=0)
    assert float((one[3:] - other[3:]).abs().max()) > 1e-2


# ---- drafting ----


def test_drafts_follow_the_drafters_law() -> None:
    """Chi-square at 20 thousand draws; a token without probability is never drawn."""
    logits = torch.tensor([0.0, 2.0, -math.inf, 1.0, -1.0])
    n_rows, temperature = 20_000, 0.7
    hidden = torch.zeros(n_rows, 1)
    ids = draft_ids(
        hidden,
        lambda rows: logits.expand(len(rows), -1),
        row_chunks(n_rows, 999),
        temperature,
        torch.rand(n_rows, generator=torch.Generator().manual_seed(0)),
    )
    expected = (logits / temperature).softmax(-1) * n_rows
    counts = torch.bincount(ids, minlength=5)
    assert counts[2] == 0
    seen = expected > 0
    chi_square = float(((counts - expected)[seen] ** 2 / expected[seen]).sum())
    assert chi_square < 16.27  # 99.9 % of the law with 3 degrees of freedom


def test_drafts_depend_on_no_chunk_and_follow_the_draws() -> None:
    hidden = torch.randn(50, 6, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(6, 30, generator=torch.Generator().manual_seed(2))

    def ids(chunk: int, temperature: float, seed: int = 0) -> list[int]:
        draws = torch.rand(50, generator=torch.Generator().manual_seed(seed))
        chunks = row_chunks(50, chunk)
        return draft_ids(hidden, lambda r: r @ weight, chunks, temperature, draws).tolist()

    assert ids(50, 1.0) == ids(7, 1.0) != ids(50, 1.0, seed=1)
    assert ids(50, 0.0) == ids(7, 0.0, seed=1) == (hidden @ weight).argmax(-1).tolist()


@pytest.mark.parametrize(("draw", "token"), [(0.0, 1), (1 - 2.0**-24, 2)])
def test_the_ends_of_the_draws_take_tokens_that_have_a_probability(draw: float, token: int) -> None:
    logits = torch.tensor([[-math.inf, 1.0, 2.0, -math.inf]])
    draws = torch.tensor([draw])
    ids = draft_ids(torch.zeros(1, 1), lambda _: logits, [slice(0, 1)], 1.0, draws)
    assert ids.tolist() == [token]


def test_logits_that_are_not_finite_still_draft_tokens() -> None:
    """So that the loss tells of them, as without drafts, and not the target's embedding."""
    logits = torch.full((1, 4), math.nan)
    ids = draft_ids(torch.zeros(1, 1), lambda _: logits, [slice(0, 1)], 1.0, torch.tensor([0.5]))
    assert 0 <= int(ids) < 4


def test_what_a_row_draws_depends_on_no_other_row() -> None:
    """So rows may be divided otherwise between processes, batches and accumulation."""
    rows = rows_of_text()[:2]
    alone = [slot_draws(batch_of([row]), 42) for row in rows]
    batch = batch_of(rows, keeps_slots=True)
    assert torch.equal(slot_draws(batch, 42), torch.cat(alone))
    assert not torch.equal(slot_draws(batch, 43), torch.cat(alone))
    assert len(set(torch.cat(alone).tolist())) == int(batch["predicts"].sum())
    assert 0 < float(torch.cat(alone).min()) < float(torch.cat(alone).max()) < 1


def test_no_rows_draft_nothing() -> None:
    ids = draft_ids(torch.zeros(0, 3), lambda rows: rows, [], 1.0, torch.zeros(0))
    assert ids.tolist() == []


# ---- what is refused ----


def test_where_generation_ends() -> None:
    assert stop_ids(SimpleNamespace()).tolist() == []
    config = SimpleNamespace(eos_token_id=3)
    assert stop_ids(SimpleNamespace(generation_config=config)).tolist() == [3]


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("lfm2", "layers that keep a state"),
        ("mistral", "cannot mask the window of 8 tokens of `MistralForCausalLM`"),
        ("bloom", "`BloomForCausalLM`: its (forward on .* fails|states differ)"),
    ],
)
def test_a_target_that_takes_no_mask_is_refused(family: str, reason: str) -> None:
    if family == "bloom":
        config = BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4)
        target: Any = BloomForCausalLM(config).eval()
    else:
        target = TEXT_TARGETS[family]()
    with pytest.raises(NotImplementedError, match=reason):
        check_on_policy(target, 23, 60)


def test_a_window_longer_than_the_texts_is_no_window() -> None:
    target = TEXT_TARGETS["mistral"]()
    target.config.sliding_window = 24
    check_on_policy(target, 23, 60)
    batch = batch_of(rows_of_text())
    drafts = drafts_for(batch)
    expected = alone(target, texts_behind(batch, drafts))
    torch.testing.assert_close(scored(target, batch, drafts).states, expected, atol=1e-5, rtol=1e-5)
    target.config.sliding_window = 23
    with pytest.raises(NotImplementedError, match=r"window of 23 tokens .* got texts of 23"):
        scored(target, batch, drafts)


def test_a_kernel_without_masks_is_refused() -> None:
    target = training_target()
    target.config._attn_implementation = "flash_attention_2"
    with pytest.raises(NotImplementedError, match="='flash_attention_2', which takes no mask"):
        check_on_policy(target, 23, 60)


@pytest.mark.parametrize("is_nested", [False, True])  # as Gemma 3's are, by kind of layer
def test_angles_that_depend_on_the_length_are_refused(is_nested: bool) -> None:
    target = training_target()
    rope = {"rope_type": "dynamic", "factor": 2.0}
    target.config.rope_parameters = {"full_attention": rope} if is_nested else rope
    with pytest.raises(NotImplementedError, match=r"rotary embeddings \(dynamic\)"):
        check_on_policy(target, 23, 60)


def test_a_sharded_target_is_refused() -> None:
    target = training_target()
    target.lm_head.weight.device_mesh = "a mesh, as parameters of FSDP2 have"
    with pytest.raises(NotImplementedError, match="spread by `shard_target`"):
        check_on_policy(target, 23, 60)


def test_a_target_that_ignores_the_mask_is_found_out() -> None:
    target = training_target()
    forward = target.model.forward

    def deaf(*args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        del attention_mask
        return forward(*args, **kwargs)

    target.model.forward = deaf
    with pytest.raises(NotImplementedError, match=r"its states differ by .* from those of each"):
        check_on_policy(target, 23, 60)


def sees_other_blocks(mask: Tensor, n_text: int) -> Tensor:
    """Every draft also sees those of the blocks before."""
    n_drafts = mask.shape[-2]
    before = torch.arange(n_drafts)[:, None] // 2 > torch.arange(n_drafts) // 2
    return mask | torch.cat([torch.zeros(n_drafts, n_text, dtype=torch.bool), before], dim=1)


def sees_no_draft_before(mask: Tensor, n_text: int) -> Tensor:
    """Every draft sees the text and itself."""
    n_drafts = mask.shape[-2]
    itself = torch.eye(n_drafts, dtype=torch.bool)
    return mask & torch.cat([torch.ones(n_drafts, n_text, dtype=torch.bool), itself], dim=1)


@pytest.mark.parametrize("wrong", [sees_other_blocks, sees_no_draft_before])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_target_that_changes_the_mask_is_found_out(
    wrong: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = training_target(dtype=dtype)
    check_on_policy(target, 23, 60)
    forward = target.model.forward

    def altered(*args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        if attention_mask is not None:
            n_text = attention_mask.shape[-1] - attention_mask.shape[-2]
            attention_mask = wrong(attention_mask, n_text)
        return forward(*args, attention_mask=attention_mask, **kwargs)

    monkeypatch.setattr(target.model, "forward", altered)
    with pytest.raises(NotImplementedError, match=r"its states differ by .* from those of each"):
        check_on_policy(target, 23, 60)


def test_windows_and_positions_that_only_the_longest_row_meets() -> None:
    """GPT-Neo's own band goes by the number of a key, and its table has so many columns."""
    config = GPTNeoConfig(
        vocab_size=96,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=40,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    target = GPTNeoForCausalLM(config).eval()
    check_on_policy(target, 12, 20)
    with pytest.raises(NotImplementedError, match=r"differ by .* 6 drafts behind 50 tokens"):
        check_on_policy(target, 50, 6)
    with pytest.raises(NotImplementedError, match=r"on 60 drafts behind 23 tokens fails"):
        check_on_policy(target, 23, 60)


def test_packed_rows_are_refused() -> None:
    target, drafter, _ = pair_and_batch()
    ids = random_ids(20, seed=1)
    batch = batch_of([row_of(ids, document_ids=[1] * 10 + [2] * 10)])
    step = step_of(target, drafter, loss_type="forward_kl", on_policy=True)
    with pytest.raises(NotImplementedError, match="`on_policy` needs rows of one text each"):
        step.losses(drafter, batch, torch.tensor(1.0), GAMMA, 99)


@pytest.mark.parametrize("is_evaluation", [False, True])
def test_packed_rows_are_refused_before_the_first_step(tmp_path: Path, is_evaluation: bool) -> None:
    target = training_target()
    plain = [row_of(random_ids(20, seed=1))]
    packed = [row_of(random_ids(20, seed=1), document_ids=[1] * 10 + [2] * 10)]
    args = DFlashTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], loss_type="lk_alpha", on_policy=True
    )
    rows = (plain, {"part": packed}) if is_evaluation else (packed, None)
    with pytest.raises(NotImplementedError, match=r"rows of one text each, .* got packed ones"):
        DFlashTrainer(training_drafter(target), target, args, *rows)


@pytest.mark.parametrize(
    ("columns", "got"),
    [
        ({"document_ids": [1] * 10 + [2] * 10}, "packed ones"),
        ({"attention_mask": [0] * 3 + [1] * 17}, "padding at the left"),
        ({"attention_mask": [0] * 20}, "none"),
        (None, "none"),
    ],
)
def test_any_row_that_is_not_one_text_is_told_before_the_first_step(
    columns: Any, got: str, tmp_path: Path
) -> None:
    target = training_target()
    good = row_of(random_ids(20, seed=1), attention_mask=[1] * 18 + [0] * 2)
    empty = {"input_ids": [], "loss_mask": []}
    bad = empty if columns is None else row_of(random_ids(20, seed=2), **columns)
    args = DFlashTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], loss_type="lk_alpha", on_policy=True
    )
    DFlashTrainer(training_drafter(target), target, args, [good, good])
    with pytest.raises(NotImplementedError, match=rf"train_dataset\[1\]: .* one text.* got {got}"):
        DFlashTrainer(training_drafter(target), target, args, [good, bad])


def test_bad_arguments_are_refused() -> None:
    target, drafter, _ = pair_and_batch()
    with pytest.raises(ValueError, match=r"`on_policy` needs a distance .* got 'cross_entropy'"):
        step_of(target, drafter, on_policy=True)
    with pytest.raises(ValueError, match="`on_policy_temperature` must be at least 0, got -1"):
        step_of(target, drafter, on_policy=True, loss_type="lk_alpha", on_policy_temperature=-1.0)
