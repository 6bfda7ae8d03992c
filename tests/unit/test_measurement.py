from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hf_dflash.measurement import (
    Measurement,
    Seconds,
    Variant,
    read_measurement,
    spell,
    write_measurement,
)
from measurements import measurement, pair_of_runs, run


def written(tmp_path: Path, whole: Measurement | None = None) -> Path:
    path = tmp_path / "bench.json"
    write_measurement(whole or measurement(), path)
    return path


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    whole = measurement([*pair_of_runs(), run(block_size=4, identical=False, first_difference=3)])
    assert read_measurement(written(tmp_path, whole)) == whole


def test_the_file_holds_the_summary_for_other_programs(tmp_path: Path) -> None:
    document = json.loads(written(tmp_path).read_text())
    assert document["schema"] == 1
    plain, drafted = document["summary"]["overall"]
    assert plain["speedup"] is None
    assert drafted["speedup"]["median"] == pytest.approx(2.0)
    assert document["summary"]["slices"]["dataset"]["gsm8k"] == [plain, drafted]


def test_a_summary_that_was_edited_is_not_believed(tmp_path: Path) -> None:
    path = written(tmp_path)
    document = json.loads(path.read_text())
    document["summary"]["overall"][1]["speedup"]["median"] = 99.0
    path.write_text(json.dumps(document))
    assert read_measurement(path).summary.overall[1].speedup.median == pytest.approx(2.0)


def test_a_truncated_file_is_named_with_the_place(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_text(path.read_text()[:500])
    with pytest.raises(
        ValueError, match=r"bench\.json must be a JSON file .* not whole: .* line 1"
    ):
        read_measurement(path)


@pytest.mark.parametrize("content", ["[]", "{}", '{"schema": 2}'])
def test_another_schema_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"with `schema` 1, got (None|2)\. Measure again"):
        read_measurement(path)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("runs", 0, "turn"), "0", r"\.runs\[0\]\.turn: must be int, got '0'"),
        (("runs", 0, "token_ids", 2), None, r"\.runs\[0\]\.token_ids\[2\]: must be int"),
        (("runs", 1, "method"), "magic", r"\.runs\[1\]\.method: must be .*, got 'magic'"),
        (("runs", 1, "seconds"), 1.0, r"\.runs\[1\]\.seconds: must be an object"),
        (("runs", 1, "n_accepted"), 3, r"\.runs\[1\]\.n_accepted: must be list"),
        (("provenance", "when"), 1, r"missing \[\], unknown \['when'\]"),
        (("prompts", "gsm8k", 0), "text", r"\.prompts\.gsm8k\[0\]: must be list"),
    ],
)
def test_a_field_of_another_type_is_named(
    tmp_path: Path, place: tuple[Any, ...], value: Any, message: str
) -> None:
    path = written(tmp_path)
    document = json.loads(path.read_text())
    part = document
    for step in place[:-1]:
        part = part[step]
    part[place[-1]] = value
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=message):
        read_measurement(path)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    path = written(tmp_path)
    document = json.loads(path.read_text())
    del document["runs"][1]["seconds"]["decode"]
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"runs\[1\]\.seconds: .* missing \['decode'\]"):
        read_measurement(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": []}, "`token_ids` must hold a token"),
        ({"seconds": Seconds(-0.1, 0.0, 1.0)}, "`seconds` must not be negative"),
        ({"seconds": Seconds(0.1, float("nan"), 1.0)}, "`seconds` must not be negative"),
        ({"seconds": Seconds(0.1, 0.0, 0.0)}, "decoding more than one token takes some"),
        (
            {
                "seconds": Seconds(0.0, 0.0, 0.0),
                "token_ids": [5],
                "n_accepted": [],
                "n_drafted": [],
            },
            "`seconds` must not be negative",
        ),
        ({"n_drafted": [7, 7]}, "must have one number a cycle each"),
        ({"n_drafted": None}, "must have one number a cycle each"),
        ({"n_accepted": [7, 0, 2]}, "must lie between 0 and `n_drafted`"),
        ({"method": "plain", "n_accepted": [0], "n_drafted": [0]}, "must be null where nothing"),
        (
            {"rejected_ids": [[], [1, 2], []]},
            "`rejected_ids` must hold, for each cycle, the drafts",
        ),
        ({"identical": False}, "`first_difference` must be there exactly where"),
        ({"first_difference": 3}, "`first_difference` must be there exactly where"),
        ({"rounding": 0.1}, "`rounding` must not be negative, and be there only where"),
        ({"prompt_index": 3}, "must answer one of `prompts`, got turn 0 of prompt 3"),
        ({"turn": 2}, "must answer one of `prompts`, got turn 2 of prompt 0"),
    ],
)
def test_a_run_that_contradicts_itself_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    whole = measurement([run(), run(repeat=1, **changes)])
    with pytest.raises(ValueError, match=rf"measurement: `runs\[1\]`.*{message}"):
        write_measurement(whole, tmp_path / "bench.json")
    assert list(tmp_path.iterdir()) == []


def test_options_of_prompts_are_read_back_and_must_be_as_many(tmp_path: Path) -> None:
    options = {"gsm8k": [{"enable_thinking": True}, {}, {"style": "dry", "depth": 2}]}
    write_measurement(measurement(prompt_options=options), tmp_path / "bench.json")
    assert read_measurement(tmp_path / "bench.json").prompt_options == options
    short = measurement(prompt_options={"gsm8k": [{}]})
    with pytest.raises(ValueError, match=r"`prompt_options` must be as many as the 3 .*, got 1"):
        write_measurement(short, tmp_path / "other.json")


def test_two_runs_of_the_same_thing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`runs` must differ .*'gsm8k', 0, 0, .* twice"):
        write_measurement(measurement([run(), run()]), tmp_path / "bench.json")


def test_a_full_disk_leaves_the_file_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path)
    before = path.read_text()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    longer = measurement(pair_of_runs() + pair_of_runs(repeat=1))
    with pytest.raises(OSError, match="No space left"):
        write_measurement(longer, path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_prompt_of_a_run_is_its_turn() -> None:
    whole = measurement([run(prompt_index=2, turn=1)])
    assert whole.prompt_of(whole.runs[0]) == "gsm8k 2, turn 2"


def test_records_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        run().turn = 1  # type: ignore[misc]


def test_labels_tell_variants_apart() -> None:
    assert Variant("plain").label == "plain"
    assert Variant("stock_dflash", block_size=8).label == "stock dflash, block 8"


def test_tokens_are_spelled_as_they_stand_within_a_text() -> None:
    class Tokenizer:
        """Drops the space of a text's first token, as sentence pieces do."""

        def decode(self, ids: list[int]) -> str:
            return "".join({1: " one", 2: " two", 3: "!"}[i] for i in ids).lstrip()

    runs = [run(token_ids=[1, 2], rejected_ids=[[3], [], []])]
    assert spell(Tokenizer(), runs) == {"1": " one", "2": " two", "3": "!"}


def test_rejected_drafts_and_spellings_are_read_back(tmp_path: Path) -> None:
    rejected = [[], [9] * 7, []]
    whole = measurement([*pair_of_runs(rejected_ids=None)[:1], run(rejected_ids=rejected)])
    whole = dataclasses.replace(whole, token_texts={"9": " nine"})
    assert read_measurement(written(tmp_path, whole)) == whole
