import json
from types import SimpleNamespace

import pytest

import equality
from checks import check_made_with
from equality import failures, open_record, summarise
from near_tie import Difference, cycle_of


def _row(kind="list", *, n_tokens=10, forwards=5, n_accepted=(1, 1, 1, 2), near_tie=None):
    difference = None if near_tie is None else {"is_near_tie": near_tie}
    return {
        "kind": kind,
        "n_tokens": n_tokens,
        "target_forwards": forwards,
        "n_accepted": list(n_accepted),
        "identical": difference is None,
        "difference": difference,
    }


def test_summary_counts_tokens_forwards_and_differences_per_kind():
    rows = [_row(), _row("chat", forwards=10, n_accepted=[0] * 9, near_tie=True)]
    summary = summarise(rows)
    assert summary["tokens_per_forward"] == round(20 / 15, 3)
    assert summary["mismatch_rate"] == 0.5
    assert summary["n_no_near_tie"] == 0
    assert summary["kinds"]["list"]["acceptance_length"] == 2.25
    assert summary["kinds"]["chat"]["acceptance_length"] == 1.0
    assert summary["kinds"]["chat"]["n_identical"] == 0


@pytest.mark.parametrize(
    ("dtype", "rows", "n_failures"),
    [
        ("float32", [_row()], 0),
        ("float32", [_row(forwards=8)], 1),  # 1.25 tokens a forward
        ("float32", [_row(near_tie=True)], 1),
        ("bfloat16", [_row(near_tie=True, forwards=8)], 0),
        ("bfloat16", [_row(near_tie=False)], 1),
    ],
)
def test_what_breaks_the_promise(dtype, rows, n_failures):
    assert len(failures(dtype, summarise(rows))) == n_failures


def test_an_interrupted_run_goes_on(tmp_path):
    path = tmp_path / "equality.json"
    assert open_record(path, {"threads": 1})["rows"] == {}
    made = {"threads": 1, "command": "python benchmarks/equality.py", "date": "2026-01-02"}
    left = {"provenance": made, "summary": {}, "rows": {"float32": [_row()]}}
    path.write_text(json.dumps(left), "utf-8")
    assert open_record(path, {**made, "command": "the same --again", "date": "2026-01-03"}) == left


@pytest.mark.parametrize(
    "there",
    [{"threads": 2, "commit": "0" * 40}, {"threads": 1, "commit": "1" * 40}, {"threads": 1}],
)
def test_a_run_of_another_kind_is_not_continued(tmp_path, there):
    path = tmp_path / "equality.json"
    now = {"threads": 1, "commit": "0" * 40}
    left = {"provenance": there, "summary": {}, "rows": {}}
    path.write_text(json.dumps(left), "utf-8")
    with pytest.raises(RuntimeError, match=r"`--out` .*equality.json was made with other code, "):
        open_record(path, now)


def test_the_record_says_how_it_was_made(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "prompts.jsonl").write_text("")
    args = SimpleNamespace(max_new_tokens=9, drafter=tmp_path, prompts=tmp_path / "prompts.jsonl")
    made = equality._provenance(args, tmp_path)
    check_made_with(made, tmp_path)
    assert [*made["sha256"]] == ["target", "drafter", "prompts"]


@pytest.mark.parametrize(
    ("distance", "rounding", "is_near_tie"),
    [(0.0, 0.0, True), (0.25, 0.125, True), (0.3, 0.1, False)],
)
def test_a_near_tie_is_within_the_rounding_of_both_logits(distance, rounding, is_near_tie):
    difference = Difference(1, 5, 6, 0.1, 0.1, 0.1, distance=distance, rounding=rounding)
    assert difference.is_near_tie is is_near_tie


def test_a_token_is_found_in_its_cycle():
    cycles = [[4], [5, 6, 7], [8]]
    assert cycle_of(3, cycles, [7, 7]) == (1, 8)
    assert cycle_of(4, cycles, [7, 2]) == (4, 3)
    with pytest.raises(IndexError, match=r"`index` 5 is in no cycle; 5 tokens"):
        cycle_of(5, cycles, [7, 7])
