"""Pushing to a stand-in for the Hub, in a process of its own: the client is the real one."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, constants
from safetensors.torch import load_file
from typer.testing import CliRunner

from hf_dflash import cli
from hf_dflash.configuration_dflash import AUTO_MAP
from hf_dflash.doctor import LOADS, examine
from hf_dflash.hub import FolderContents, check_folder, folder_contents, push_folder
from hf_dflash.model_card import CardOptions, check_card, write_card
from hf_dflash.publish_commands import size_text
from hub_stand_in import TOKEN, HubStandIn, Refusal, Repository
from pairs import random_drafter, tiny_target
from published_folders import angelslim, flat, modelopt, native, zlab

# huggingface_hub 2.4 sends large files by an argument that its HTTP library has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

#: The code that `trust_remote_code` runs; what it must be is tested with the layering.
CODE = {"modeling_dflash.py", "configuration_dflash.py", "verification.py"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    random_drafter(tiny_target()).save_pretrained(folder)
    write_card(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A drafter within all that a training run leaves around it."""
    place = tmp_path / "run"
    place.mkdir()
    for path in saved.iterdir():
        (place / path.name).write_bytes(path.read_bytes())
    (place / "checkpoint-10").mkdir()
    (place / "checkpoint-10" / "optimizer.pt").write_bytes(b"0" * 100)
    (place / "training_args.bin").write_bytes(b"0")
    (place / "my_script.py").write_text("print(1)\n")
    (place / "LICENSE").write_text("Apache\n")
    return place


@pytest.fixture
def hub() -> Iterator[HubStandIn]:
    with HubStandIn().running() as running:
        yield running


@pytest.fixture
def client(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> HubStandIn:
    """The stand-in, with this process's client turned to it."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    api = partial(HfApi, endpoint=hub.url)
    monkeypatch.setattr("hf_dflash.hub.HfApi", api)
    return hub


def push(folder: Path, **options: Any) -> str:
    return push_folder(folder, "someone/drafter", **{"token": TOKEN, **options})


def run_program(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own: the client reads its environment once."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**clean, "COLUMNS": "100", **environment},
    )


def run_cli(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_program("-m", "hf_dflash.cli", *arguments, **environment)


def names_of(folder: Path) -> set[str]:
    return {file.name for file in folder_contents(folder).files}


def assert_one_line_error(result: subprocess.CompletedProcess[str], pattern: str) -> None:
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error:")]
    assert result.returncode == 2, result.stderr
    assert len(lines) == 1, result.stderr
    assert re.search(pattern, lines[0]), lines[0]


# ---- which files ----


def test_the_drafter_is_sent_and_the_rest_of_its_folder_is_not(folder: Path) -> None:
    contents = folder_contents(folder)
    assert {"config.json", "model.safetensors", "README.md", "LICENSE"} <= names_of(folder)
    assert names_of(folder) >= CODE
    assert contents.left_out == ("checkpoint-10/", "my_script.py", "training_args.bin")
    assert contents.size_bytes == sum((folder / name).stat().st_size for name in names_of(folder))


def test_measurements_and_pictures_are_sent(folder: Path) -> None:
    (folder / "evaluation").mkdir()
    for name in ("bench.json", "speedup.svg", "scratch.txt"):
        (folder / "evaluation" / name).write_text("")
    assert {"evaluation/bench.json", "evaluation/speedup.svg"} <= names_of(folder)
    assert "evaluation/scratch.txt" not in names_of(folder)


def test_sharded_weights_are_sent_with_their_index(tmp_path: Path) -> None:
    random_drafter(tiny_target()).save_pretrained(tmp_path, max_shard_size="30KB")
    names = {name for name in names_of(tmp_path) if "safetensors" in name}
    assert "model.safetensors.index.json" in names
    assert len(names) > 2


def test_code_of_another_repository_is_not_looked_for(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "org/name--modeling_dflash.DFlashDraftModel"}
    (folder / "config.json").write_text(json.dumps(config))
    assert not CODE & names_of(folder)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", r"`folder` must hold a drafter .* has no config\.json"),
        ("modeling_dflash.py", r"lacks \['modeling_dflash\.py'\], which its config or index asks"),
    ],
)
def test_a_folder_that_lacks_a_file(folder: Path, missing: str, message: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(FileNotFoundError, match=message):
        folder_contents(folder)


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        folder_contents(folder)


def test_a_drafter_that_does_not_load_strictly_is_not_published(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 3
    config["layer_types"] = ["full_attention"] * 3
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"must be exactly those its config\.json asks for"):
        check_folder(folder)


# ---- pushing ----


def test_a_push_sends_everything_in_one_commit(folder: Path, hub: HubStandIn) -> None:
    result = run_cli("push", str(folder), "someone/drafter", "--private", **hub.environment())
    assert result.returncode == 0, result.stderr
    assert f"Published at {hub.url}/someone/drafter" in result.stdout
    assert set(hub.files("someone/drafter")) == names_of(folder)
    sent = hub.files("someone/drafter")
    differing = {name for name, c in sent.items() if (folder / name).read_bytes() != c}
    assert differing == {"README.md"}, "the card gets the name that it is loaded by"
    assert hub.repositories["someone/drafter"].private
    assert hub.repositories["someone/drafter"].messages == ["Upload drafter"]


def test_readers_of_a_pushed_card_can_load_by_it(
    folder: Path, client: HubStandIn, tmp_path: Path
) -> None:
    before = write_card(folder, options=CardOptions(target="org/target-135M")).read_text()
    assert "# DFlash drafter for target-135M\n" in before
    push(folder)
    card = client.files("someone/drafter")["README.md"].decode()
    assert card.count('from_pretrained("someone/drafter"') == 1
    assert card.count("<drafter>") == 0 < before.count("<drafter>")
    assert "stands for" not in card
    assert (folder / "README.md").read_text() == before
    downloaded = shutil.copytree(folder, tmp_path / "downloaded")
    (downloaded / "README.md").write_text(card)
    check_card(downloaded)
    again = write_card(downloaded).read_text()
    assert again == card, "a card that is written again keeps the name"


def test_a_card_of_ones_own_is_sent_as_it_is(folder: Path, client: HubStandIn) -> None:
    card = b"---\nlicense: mit\n---\r\n# Mine, loaded by `<drafter>`\r\n"
    (folder / "README.md").write_bytes(card)
    push(folder)
    assert client.files("someone/drafter")["README.md"] == card


def test_what_was_pushed_loads_from_there(folder: Path, client: HubStandIn, tmp_path: Path) -> None:
    push(folder)
    program = (
        "import sys, torch; from transformers import AutoModel;"
        "sys.modules['hf_dflash'] = None;"  # not installed
        "drafter = AutoModel.from_pretrained('someone/drafter', trust_remote_code=True);"
        "print(type(drafter).__name__, drafter.config.block_size)"
    )
    environment = client.environment(HF_HOME=str(tmp_path / "home"))
    result = run_program("-c", program, **environment)
    assert result.stdout.split() == ["DFlashDraftModel", "8"], result.stderr


# ---- the code ----


def as_published(contents: FolderContents, place: Path) -> Path:
    place.mkdir()
    for file in contents.files:
        content = file.source if isinstance(file.source, bytes) else file.source.read_bytes()
        (place / file.name).write_bytes(content)
    return place


def test_a_folder_without_code_is_published_with_it(client: HubStandIn, tmp_path: Path) -> None:
    """As engines' formats have it: config and weights alone."""
    bare = zlab(tmp_path / "bare")
    card = write_card(bare, options=CardOptions(name="someone/drafter"))
    assert "    trust_remote_code=True,\n" in card.read_text()
    before = {path.name: path.read_bytes() for path in bare.iterdir()}
    push(bare)
    sent = client.files("someone/drafter")
    assert {path.name: path.read_bytes() for path in bare.iterdir()} == before
    config = json.loads(sent["config.json"])
    assert config.pop("auto_map") == AUTO_MAP
    assert config == json.loads(before["config.json"])
    rest = before.keys() - {"config.json"}
    assert {name: sent[name] for name in rest} == {name: before[name] for name in rest}
    random_drafter(tiny_target()).save_pretrained(tmp_path / "saved")
    code = {path.name: path.read_bytes() for path in (tmp_path / "saved").glob("*.py")}
    assert {name: sent[name] for name in sent.keys() - before.keys()} == code
    environment = client.environment(HF_HOME=str(tmp_path / "home"))
    result = run_program("-c", LOADED_WITHOUT_THIS_PACKAGE, "someone/drafter", **environment)
    assert result.stdout.split() == ["someone/drafter", "DFlashDraftModel", total_of(bare)], (
        result.stderr
    )


#: Loads drafters as their cards say where this package is not installed, and adds up the weights.
LOADED_WITHOUT_THIS_PACKAGE = """
import sys, torch
from transformers import AutoModel
sys.modules["hf_dflash"] = None
for name in sys.argv[1:]:
    drafter = AutoModel.from_pretrained(name, dtype="auto", trust_remote_code=True)
    total = sum(tensor.double().abs().sum() for tensor in drafter.state_dict().values())
    print(name, type(drafter).__name__, f"{float(total):.6f}")
"""


def total_of(folder: Path) -> str:
    tensors = load_file(folder / "model.safetensors").values()
    return f"{float(sum(tensor.double().abs().sum() for tensor in tensors)):.6f}"


def test_every_format_that_is_read_loads_by_the_added_code(tmp_path: Path) -> None:
    folders = [
        write(tmp_path / write.__name__) for write in (zlab, flat, modelopt, angelslim, native)
    ]
    folders.append(angelslim(tmp_path / "dflare", "dflare"))
    published = []
    for folder in folders:
        write_card(folder)
        contents = check_folder(folder)
        assert contents.adds_code
        published.append(as_published(contents, tmp_path / f"published_{folder.name}"))
        # No other engine sees a difference.
        assert states_of(published[-1]) == states_of(folder) | {"trust_remote_code": LOADS}
    served = {engine for engine, state in states_of(published[0]).items() if state == LOADS}
    assert served == {"hf-dflash", "trust_remote_code", "vllm", "sglang", "llama.cpp"}
    result = run_program(
        "-c", LOADED_WITHOUT_THIS_PACKAGE, *map(str, published), HF_HOME=str(tmp_path / "home")
    )
    assert [line.split()[2] for line in result.stdout.splitlines()] == [
        total_of(folder) for folder in folders
    ], result.stderr


def states_of(folder: Path) -> dict[str, str]:
    return {verdict.engine: verdict.state for verdict in examine(folder).verdicts}


def test_without_code_nothing_points_to_it(folder: Path, client: HubStandIn) -> None:
    write_card(folder, options=CardOptions(code=False))
    config = (folder / "config.json").read_bytes()
    push(folder, code=False)
    sent = client.files("someone/drafter")
    assert not [name for name in sent if name.endswith(".py")]
    assert "auto_map" not in json.loads(sent["config.json"])
    assert (folder / "config.json").read_bytes() == config


def test_a_bare_folder_stays_bare_if_asked(tmp_path: Path) -> None:
    bare = zlab(tmp_path / "bare")
    contents = folder_contents(bare, code=False)
    assert {file.source for file in contents.files} == set(bare.iterdir())


def test_a_card_must_not_promise_code_that_is_left_out(folder: Path) -> None:
    result = CliRunner().invoke(
        cli.app, ["push", str(folder), "someone/drafter", "--dry-run", "--no-code"]
    )
    assert result.exit_code == 2
    assert "`code` is off (--no-code), but" in result.stderr
    with pytest.raises(ValueError, match=r"Write the card again: .*--no-code"):
        check_folder(folder, code=False)


def test_a_dry_run_lists_the_added_code(tmp_path: Path) -> None:
    bare = zlab(tmp_path / "bare")
    write_card(bare)
    arguments = ["push", str(bare), "someone/drafter", "--dry-run"]
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.stderr
    assert all(name in result.stdout for name in CODE)
    assert "The code for trust_remote_code=True is added" in result.stdout
    assert not list(bare.glob("*.py"))


# ---- what is on the Hub already, and what goes wrong ----


def test_a_branch_is_made_and_a_message_kept(folder: Path, client: HubStandIn) -> None:
    push(folder, revision="b16", commit_message="Better drafts")
    repository = client.repositories["someone/drafter"]
    assert repository.branches["main"] == {}
    assert set(repository.branches["b16"]) == names_of(folder)
    assert repository.messages == ["Better drafts"]
    assert not repository.private


def test_a_public_repository_gets_nothing_that_was_to_be_private(
    folder: Path, client: HubStandIn
) -> None:
    client.repositories["someone/drafter"] = Repository(private=False)
    for refusal in ([], [Refusal("POST /api/repos/create", 403, times=1)]):
        client.refusals = refusal
        with pytest.raises(
            ValueError,
            match=r"`private` is on .* is public.*hf repos settings someone/drafter --pr",
        ):
            push(folder, private=True)
    assert client.files("someone/drafter") == {}
    client.repositories["someone/drafter"].private = True
    push(folder, private=True)
    assert set(client.files("someone/drafter")) == names_of(folder)


def test_a_pull_request_leaves_the_main_branch_alone(folder: Path, client: HubStandIn) -> None:
    assert push(folder, create_pr=True).endswith("/discussions/1")
    repository = client.repositories["someone/drafter"]
    assert repository.branches["main"] == {}
    assert set(repository.branches["refs/pr/1"]) == names_of(folder)


def test_a_push_that_broke_off_goes_on_where_it_stopped(folder: Path, client: HubStandIn) -> None:
    client.breaks_at = "POST .*/commit/"
    empty = (
        r"broke .*The repository someone/drafter was made for this push and is empty.*The same "
        r"command goes on; to be rid of it: `hf repos delete someone/drafter`"
    )
    with pytest.raises(ConnectionError, match=empty):
        push(folder)
    assert client.files("someone/drafter") == {}
    assert len(client.large_files) == 1  # the weights have arrived, and no commit shows them
    client.requests[:] = []
    with pytest.raises(ConnectionError, match=r"broke .*no file of someone/drafter was changed"):
        push(folder)  # not made by this one
    client.breaks_at = None
    push(folder)
    assert set(client.files("someone/drafter")) == names_of(folder)
    assert not [request for request in client.requests if request.startswith("PUT")]


def test_a_repository_of_ones_own_account_is_named_in_full(
    folder: Path, client: HubStandIn
) -> None:
    client.breaks_at = "POST .*/commit/"
    with pytest.raises(ConnectionError, match=r"`hf repos delete someone/mine`"):
        push_folder(folder, "mine", token=TOKEN)


def test_what_did_not_change_is_not_sent_again(folder: Path, client: HubStandIn) -> None:
    push(folder)
    push(folder)
    assert len(client.repositories["someone/drafter"].messages) == 1


def test_parts_of_an_earlier_drafter_do_not_stay(folder: Path, client: HubStandIn) -> None:
    push(folder)
    old = {"model-00001-of-00002.safetensors", "model.safetensors.index.json", "evaluation/a.json"}
    # transformers takes a repository with an adapter's config for that of its base.
    old |= {"adapter_config.json", "adapter_model.safetensors"}
    old |= {"generation_config.json", "training_log.json", "training_runs.json"}
    (folder / "generation_config.json").unlink(missing_ok=True)
    others = {
        "notes.md",
        "NOTICE",
        "LICENSE-MODEL",
        "target/model.safetensors",
        "for_target/adapter_model.safetensors",
    }
    client.files("someone/drafter").update(dict.fromkeys(old | others, b"0"))
    push(folder)
    assert set(client.files("someone/drafter")) == names_of(folder) | others
    assert len(client.repositories["someone/drafter"].messages) == 2


def test_a_folder_of_licences_is_no_missing_file(folder: Path) -> None:
    (folder / "LICENSES").mkdir()
    assert "LICENSES/" in folder_contents(folder).left_out


def test_no_network_is_one_line(folder: Path) -> None:
    with socket.socket() as free:  # nobody listens there
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        result = run_cli("push", str(folder), "someone/drafter", HF_ENDPOINT=url, HF_TOKEN=TOKEN)
    assert_one_line_error(result, f"The Hub at {url} cannot be reached.*`--dry-run` needs no")
    assert "Traceback" not in result.stderr


def test_offline_mode_is_told(
    folder: Path, client: HubStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match=r"cannot be reached.*offline mode"):
        push(folder)
    assert client.requests == []


@pytest.mark.parametrize("token", ["wrong", False])
def test_a_wrong_or_missing_token_says_how_to_log_in(
    folder: Path, client: HubStandIn, token: Any
) -> None:
    with pytest.raises(PermissionError, match="Log in with `hf auth login`, or set HF_TOKEN"):
        push(folder, token=token)
    assert client.repositories == {}


def test_a_token_that_must_be_there_and_is_not(
    folder: Path, client: HubStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: None)
    with pytest.raises(PermissionError, match="Log in with `hf auth login`"):
        push(folder, token=True)
    assert client.requests == []


def test_an_error_of_the_hub_is_told(folder: Path, client: HubStandIn) -> None:
    with pytest.raises(RuntimeError, match=r"The Hub refused the push: .*someone/drafter was made"):
        push(folder, revision="refs/pr/9")
    with pytest.raises(RuntimeError, match=r"The Hub refused the push: .*no file of someone/dra"):
        push(folder, revision="refs/pr/9")
    assert client.files("someone/drafter") == {}


def test_a_drafter_that_is_refused_asks_the_hub_nothing(folder: Path, client: HubStandIn) -> None:
    card = folder / "README.md"
    card.write_text(card.read_text() + "\nIt is 3.1x as fast.\n")
    with pytest.raises(ValueError, match=r"a figure without a source in line .*3\.1x as fast"):
        push(folder)
    assert client.requests == []


def test_a_dry_run_shows_files_and_card_and_asks_the_hub_nothing(
    folder: Path, client: HubStandIn
) -> None:
    arguments = ["push", str(folder), "someone/drafter", "--dry-run"]
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.stderr
    for shown in ("model.safetensors", "kB", "Stays here: checkpoint-10/", "library_name: transf"):
        assert shown in result.stdout
    assert "Not measured yet" in result.stdout
    assert "Nothing was sent" in result.stdout
    assert "the push deletes those of its weights, configs" in result.stdout
    assert client.requests == []


def test_a_push_of_no_folder() -> None:
    result = CliRunner().invoke(cli.app, ["push", "/no/where", "someone/drafter"])
    assert result.exit_code == 2
    assert "`folder` must be the folder of a drafter, but there is no" in result.stderr


def test_a_bad_repository_name(folder: Path) -> None:
    with pytest.raises(ValueError, match="Repo id must"):
        push_folder(folder, "no good name")


def test_a_branch_and_a_pull_request_exclude_each_other(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"`revision` must be left out with `create_pr`.*'b'"):
        push(folder, revision="b", create_pr=True)


def test_a_model_pushes_itself_with_a_card(client: HubStandIn) -> None:
    drafter = random_drafter(tiny_target())
    url = drafter.push_to_hub("someone/drafter", private=True, token=TOKEN)
    assert url == f"{client.url}/someone/drafter"
    files = client.files("someone/drafter")
    assert set(files) >= {"README.md", "config.json", "model.safetensors", *CODE}
    assert b"# drafter" in files["README.md"]


def test_without_this_package_a_travelled_class_pushes_as_transformers_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "hf_dflash.hub", None)
    asked: list[Any] = []
    monkeypatch.setattr(
        "transformers.PreTrainedModel.push_to_hub",
        lambda _, repo_id, **options: asked.append((repo_id, options)) or "there",
    )
    assert random_drafter(tiny_target()).push_to_hub("someone/drafter", private=True) == "there"
    assert asked == [("someone/drafter", {"private": True})]


def test_sizes_are_written_as_the_hub_writes_them() -> None:
    sizes = [size_text(n) for n in (12, 999, 1000, 24_651_000, 1_070_000_000, 2 * 10**15)]
    assert sizes == ["12 B", "999 B", "1 kB", "24.7 MB", "1.07 GB", "2e+03 TB"]
