from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_dflash.benchmark_journal import Journal
from hf_dflash.measurement import Measurement
from measurements import measurement, pair_of_runs, provenance

PLAN = replace(measurement(), runs=[])
FIRST, SECOND = pair_of_runs(), pair_of_runs(3.0, prompt_index=1)


def journal(tmp_path: Path, plan: Measurement = PLAN) -> Journal:
    return Journal(tmp_path / "bench.json.rank0.jsonl", plan, start_s=0.0)


def test_what_was_measured_is_there_again(tmp_path: Path) -> None:
    kept = journal(tmp_path)
    kept.append(FIRST)
    kept.append(SECOND)
    again = journal(tmp_path)
    assert again.done == {("gsm8k", 0): FIRST, ("gsm8k", 1): SECOND} == kept.done
    again.remove()
    assert not journal(tmp_path).done


def test_the_seconds_of_all_sittings_are_summed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([7.0, 12.5])
    monkeypatch.setattr("hf_dflash.benchmark_journal.time.perf_counter", lambda: next(now))
    path = tmp_path / "bench.json.rank0.jsonl"
    kept = Journal(path, PLAN, start_s=2.0)
    kept.append(FIRST)
    assert kept.wall_s == 5.0
    again = Journal(path, PLAN, start_s=12.0)  # the time between the sittings is nobody's
    assert again.wall_s == 5.0
    again.append(SECOND)
    assert again.wall_s == 5.5
    assert journal(tmp_path).wall_s == 5.5


@pytest.mark.parametrize("n_bytes_kept", [1, 50, -1])
def test_half_a_line_is_measured_again(tmp_path: Path, n_bytes_kept: int) -> None:
    kept = journal(tmp_path)
    kept.append(FIRST)
    whole = kept.path.read_bytes()
    kept.append(SECOND)
    second_line = kept.path.read_bytes()[len(whole) :]
    kept.path.write_bytes(whole + second_line[:n_bytes_kept])
    again = journal(tmp_path)
    assert [*again.done] == [("gsm8k", 0)]
    again.append(SECOND)
    assert [*journal(tmp_path).done] == [("gsm8k", 0), ("gsm8k", 1)]


def test_half_a_first_line_is_a_new_journal(tmp_path: Path) -> None:
    path = journal(tmp_path).path
    path.write_bytes(path.read_bytes()[:20])
    assert journal(tmp_path).done == {}
    assert journal(tmp_path).done == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"provenance": provenance(dtype="bfloat16")}, r"dtype: float32 there, bfloat16 now"),
        ({"provenance": provenance(threads=2)}, r"threads: 1 there, 2 now"),
        ({"provenance": provenance(commit=None)}, r"commit: 0{40} there, None now"),
        # Changed in another way since, or begun by a version that did not look.
        ({"provenance": provenance(code_sha256="a1b2")}, r"code_sha256: None there, a1b2 now"),
        (
            {
                "provenance": provenance(
                    drafter=replace(PLAN.provenance.drafter, policy={"num_assistant_tokens": 2})
                )
            },
            r"drafter's policy: \{\} there, \{'num_assistant_tokens': 2\} now",
        ),
        ({"settings": replace(PLAN.settings, temperature=1.0)}, r"temperature: 0\.0 there, 1\.0"),
        ({"settings": replace(PLAN.settings, block_sizes=[4])}, r"block_sizes: \[\] there, \[4\]"),
        ({"prompts": {"gsm8k": [["another"]]}}, r"prompts: .* there, .*another.* now"),
        (
            {"prompt_options": {"gsm8k": [{"enable_thinking": True}, {}, {}]}},
            r"prompt_options: \{\} there, .*'enable_thinking': True.* now",
        ),
    ],
)
def test_another_configuration_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    kept = journal(tmp_path)
    kept.append(FIRST)
    with pytest.raises(ValueError, match=rf"holds another measurement \({message}.*\)\. Use the"):
        journal(tmp_path, replace(PLAN, **changes))
    assert journal(tmp_path).done == {("gsm8k", 0): FIRST}


def test_command_date_and_what_the_clock_chose_may_differ(tmp_path: Path) -> None:
    journal(tmp_path).append(FIRST)
    later = provenance(
        command="hf-dflash bench again", date="2027-01-01T00:00:00+00:00", few_rows=[2, 3]
    )
    again = journal(tmp_path, replace(PLAN, provenance=later))
    assert again.done
    assert again.plan == PLAN, "the measurement began when it began"
    again.append(SECOND)
    assert again.few_rows == [None, [2, 3]], "each prompt knows how it was measured"
    assert journal(tmp_path).few_rows == [None, [2, 3]]


def test_a_commit_that_changed_no_code_may_lie_between(tmp_path: Path) -> None:
    plan = replace(PLAN, provenance=provenance(code_sha256="a1b2"))
    journal(tmp_path, plan).append(FIRST)
    later = provenance(code_sha256="a1b2", commit="1" * 40)
    again = journal(tmp_path, replace(PLAN, provenance=later))
    assert again.done
    assert again.plan == plan, "the commit is the first sitting's"
    later = provenance(code_sha256="c3d4", commit="1" * 40)
    with pytest.raises(ValueError, match=r"\(code_sha256: a1b2 there, c3d4 now\)"):
        journal(tmp_path, replace(PLAN, provenance=later))


def test_a_run_that_measured_nothing_binds_no_other(tmp_path: Path) -> None:
    journal(tmp_path)
    other = replace(PLAN, settings=replace(PLAN.settings, repeats=2))
    journal(tmp_path, other).append(FIRST)
    assert journal(tmp_path, other).done


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    kept = journal(tmp_path)
    kept.append(FIRST)
    kept.path.write_text(kept.path.read_text().replace('"runs": [{', '"runs": [{{'))
    with pytest.raises(ValueError, match=r"rank0\.jsonl, line 2: not JSON .*Delete the file"):
        journal(tmp_path)


def test_a_full_disk_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = journal(tmp_path)
    kept.append(FIRST)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            kept.append(SECOND)
    assert ("gsm8k", 1) not in kept.done
    assert journal(tmp_path).done[("gsm8k", 0)] == FIRST
