"""What the Hub or the way to it refuses is one line that says what to do, with the real client."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_dflash.hub_errors import is_the_hubs_own
from hf_dflash.model_card import write_card
from hub_stand_in import HubStandIn, Refusal, Repository
from pairs import random_drafter, tiny_target
from saved_pairs import save_target

DATASET = "someone/chats"
#: The command, whose client does not wait between its tries.
PROGRAM = """
import time
time.sleep = lambda _: None
from hf_dflash.cli import main
main()
"""
LATER = r"answered with error 50[03], .*Run the same command later\."


@pytest.fixture
def hub() -> Iterator[HubStandIn]:
    with HubStandIn().running() as running:
        chats = {
            "README.md": b"---\n{}\n---\n",
            "train.jsonl": b'{"prompt": "Hello", "response": "there"}\n',
        }
        running.repositories[f"datasets/{DATASET}"] = Repository(False, {"main": chats})
        yield running


def run(place: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=place,
        env={**clean, "COLUMNS": "100", "HF_HOME": str(place / "home"), **environment},
    )


def assert_one_line(result: subprocess.CompletedProcess[str], pattern: str) -> None:
    assert result.returncode == 2, result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1, result.stderr
    assert re.search(pattern, errors[0]), errors[0]
    for raw in ("Traceback", "<html>", "Retrying", "thrown while", "For more information"):
        assert raw not in result.stderr


# ---- data sets ----


def prepare(place: Path, dataset: str = DATASET, *options: str, **environment: str) -> Any:
    save_target(place / "target")
    words = ["prepare", dataset, "rows.jsonl", "--target", "target", *options]
    return run(place, *words, **environment)


@pytest.mark.parametrize(
    ("refusal", "pattern"),
    [
        (
            Refusal(f"datasets/{DATASET}", 403, "GatedRepo"),
            rf"someone/chats is gated: ask for access at http://\S+/datasets/{DATASET} with your "
            r"account, and log in with `hf auth login`, or set HF_TOKEN\.",
        ),
        (
            Refusal(f"datasets/{DATASET}", 404, "RepoNotFound"),
            r"no dataset someone/chats on the Hub that you may read.*Check the name; if it is priv",
        ),
        (Refusal(f"datasets/{DATASET}", 503), LATER),
        (
            Refusal(f"datasets/{DATASET}/tree", 500),
            LATER,
        ),
    ],
    ids=["gated", "missing", "in trouble", "in trouble for its files"],
)
def test_a_data_set_that_is_refused(
    hub: HubStandIn, tmp_path: Path, refusal: Refusal, pattern: str
) -> None:
    hub.refusals = [refusal]
    assert_one_line(prepare(tmp_path, **hub.environment()), pattern)
    assert not (tmp_path / "rows.jsonl").exists()


def test_a_token_that_is_not_valid(hub: HubStandIn, tmp_path: Path) -> None:
    result = prepare(tmp_path, **hub.environment(HF_TOKEN="hf_wrong"))
    assert_one_line(result, r"does not accept your token.*someone/chats.*HF_TOKEN to a token that")


def test_a_hub_that_is_not_there(tmp_path: Path) -> None:
    with socket.socket() as free:  # nobody listens there
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        result = prepare(tmp_path, HF_ENDPOINT=url)
    assert_one_line(result, rf"The Hub at {url} cannot be reached, .*Connect, or give a file")


def test_a_name_that_no_data_set_can_have(hub: HubStandIn, tmp_path: Path) -> None:
    result = prepare(tmp_path, "no good/name", **hub.environment())
    assert_one_line(result, "no dataset no good/name on the Hub .*nor a file of that name here")


def test_a_split_that_is_not_there_is_told_with_those_that_are(
    hub: HubStandIn, tmp_path: Path
) -> None:
    result = prepare(tmp_path, DATASET, "--split", "tests", **hub.environment())
    assert_one_line(result, r"cannot be read as it was asked for \(ValueError: .*tests.*train")


def test_a_data_set_of_several_configs_is_told_with_them_and_read_by_one(
    hub: HubStandIn, tmp_path: Path
) -> None:
    configs = "".join(
        f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("short", "long")
    )
    files = {
        "README.md": f"---\nconfigs:\n{configs}---\n".encode(),
        "short.jsonl": b'{"prompt": "Hello", "response": "there"}\n',
        "long.jsonl": b'{"prompt": "Hello", "response": "there"}\n' * 3,
    }
    hub.repositories[f"datasets/{DATASET}"] = Repository(False, {"main": files})
    result = prepare(tmp_path, **hub.environment())
    assert_one_line(result, r"Config name is missing.*'short', 'long'")
    result = prepare(tmp_path, DATASET, "--config", "long", **hub.environment())
    assert result.returncode == 0, result.stderr
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 3


def test_trouble_that_passes_is_not_told(hub: HubStandIn, tmp_path: Path) -> None:
    hub.refusals = [Refusal("README.md", 503, times=2)]
    result = prepare(tmp_path, **hub.environment())
    assert result.returncode == 0, result.stderr
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 1
    assert "503" not in result.stderr
    assert hub.refusals[0].times == 0


# ---- a push ----


def push(place: Path, hub: HubStandIn) -> subprocess.CompletedProcess[str]:
    folder = place / "drafter"
    random_drafter(tiny_target()).save_pretrained(folder)
    write_card(folder)
    return run(place, "push", "drafter", "someone/drafter", **hub.environment())


@pytest.mark.parametrize(
    ("at", "is_made"),
    [("repos/create", False), ("preupload", True), ("PUT /large", True), ("/commit/", True)],
)
def test_a_push_that_the_hub_fails_leaves_no_half(
    hub: HubStandIn, tmp_path: Path, at: str, is_made: bool
) -> None:
    hub.refusals = [Refusal(at, 503)]
    made = "someone/drafter was made for this push and is empty" if is_made else "no file of some"
    assert_one_line(push(tmp_path, hub), f"answered with error 503, .*{made}.*Run the same command")
    assert ("someone/drafter" in hub.repositories) == is_made
    assert not is_made or hub.files("someone/drafter") == {}


def test_a_push_goes_on_after_trouble_that_passes(hub: HubStandIn, tmp_path: Path) -> None:
    hub.refusals = [Refusal("preupload", 503, times=2)]
    result = push(tmp_path, hub)
    assert result.returncode == 0, result.stderr
    assert "503" not in result.stderr
    assert hub.refusals[0].times == 0
    assert hub.repositories["someone/drafter"].messages == ["Upload drafter"]


@pytest.mark.parametrize("status", [401, 403])
def test_a_push_that_is_not_allowed(hub: HubStandIn, tmp_path: Path, status: int) -> None:
    hub.refusals = [Refusal("POST", status)]
    assert_one_line(push(tmp_path, hub), "does not let you write there. Log in with `hf auth login")
    assert "someone/drafter" not in hub.repositories


def test_whose_fault_an_answer_is() -> None:
    found = [is_the_hubs_own(status) for status in (None, 400, 404, 429, 500, 503)]
    assert found == [False, False, False, True, True, True]
