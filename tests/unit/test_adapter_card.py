"""Adapters of drafters on a stand-in for the Hub: their card, and that what it says works."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, ModelCard, constants
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_dflash import DFlashDraftModel, cli
from hf_dflash.adapter_card import check_adapter, is_adapter, read_adapter, write_adapter_card
from hf_dflash.hub import check_folder, folder_contents, push_folder
from hf_dflash.model_card import CardOptions
from hf_dflash.trainer import DFlashTrainer
from hf_dflash.training_arguments import DFlashTrainingArguments
from hub_stand_in import TOKEN, HubStandIn, Repository
from saved_pairs import save_target
from training_pairs import generated_rows, training_drafter

pytestmark = [
    # peft 0.21 asks by a name that transformers 5.24 has deprecated.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # huggingface_hub 2.4 sends large files by an argument that its HTTP library has renamed.
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
]

DRAFTER, TARGET, ADAPTER = "someone/drafter", "org/target", "someone/adapter"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    """The stand-in, with this process's client turned to it."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with HubStandIn().running() as running:
        monkeypatch.setattr("hf_dflash.hub.HfApi", partial(HfApi, endpoint=running.url))
        yield running


@pytest.fixture(autouse=True)
def _no_question_to_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT asks it for the drafter's vocabulary, which no adapter here changes."""
    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", lambda *_: False)


def trainer_of(folder: Path, kind: str = "dflash", base: str = DRAFTER) -> DFlashTrainer:
    """A run of three steps on an adapter of ``folder``/drafter."""
    if not (folder / "target").is_dir():
        save_target(folder / "target")
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    training_drafter(target, kind).save_pretrained(folder / "drafter")
    drafter = DFlashDraftModel.from_pretrained(folder / "drafter")
    drafter.config._name_or_path = drafter.name_or_path = base
    model = get_peft_model(drafter, LoraConfig(r=2, target_modules=["q_proj", "v_proj", "fc"]))
    args = DFlashTrainingArguments(
        output_dir=str(folder / "run"),
        max_steps=3,
        learning_rate=0.1,
        n_anchors=8,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    target.config._name_or_path = TARGET
    rows = generated_rows(target, 4, n_new=12)
    trainer = DFlashTrainer(model, target, args, rows)
    trainer.train()
    return trainer


@pytest.fixture
def trained(tmp_path: Path) -> DFlashTrainer:
    return trainer_of(tmp_path)


def planted(hub: HubStandIn, repo_id: str, folder: Path) -> None:
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    hub.repositories[repo_id] = Repository(private=False, branches={"main": files})


def downloaded(hub: HubStandIn, repo_id: str, folder: Path) -> Path:
    folder.mkdir()
    for name, content in hub.files(repo_id).items():
        (folder / name).write_bytes(content)
    return folder


def pushed(trainer: DFlashTrainer, **options: Any) -> None:
    trainer.hub_model_id = ADAPTER
    trainer.push_to_hub("Trained", token=TOKEN, **options)


def test_a_pushed_adapter_has_its_own_card(
    trained: DFlashTrainer, hub: HubStandIn, tmp_path: Path
) -> None:
    pushed(trained)
    files = hub.files(ADAPTER)
    assert set(files) == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "README.md",
        "training_log.json",
    }
    folder = downloaded(hub, ADAPTER, tmp_path / "downloaded")
    card = ModelCard.load(folder / "README.md")
    card.data.to_yaml()
    assert card.data.library_name == "peft"
    assert (card.data.base_model, card.data.base_model_relation) == (DRAFTER, "adapter")
    assert card.data.pipeline_tag == "text-generation"
    assert {"lora", "dflash", f"base_model:adapter:{DRAFTER}"} <= set(card.data.tags)
    assert card.data.eval_results is None
    assert card.text.lstrip().startswith("<!-- written by hf-dflash card")
    assert "# adapter\n" in card.text
    assert f"[{DRAFTER}](https://huggingface.co/{DRAFTER})" in card.text
    assert f"[{TARGET}](https://huggingface.co/{TARGET})" in card.text
    assert "| rank | 2 |" in card.text
    assert "| adapted modules | fc, q_proj, v_proj |" in card.text
    assert "3 steps against org/target" in card.text
    assert "stands for" not in card.text
    assert "More Information Needed" not in card.text
    assert str(tmp_path) not in card.content
    check_adapter(folder)


def code_of(card: str) -> str:
    """All Python of a card, in order."""
    return "\n".join(re.findall(r"```python\n(.*?)```", card, re.DOTALL))


def test_the_code_of_the_card_loads_merges_and_decodes(
    trained: DFlashTrainer, hub: HubStandIn, tmp_path: Path
) -> None:
    """In a process of its own, which knows the three repositories by their names only."""
    pushed(trained)
    planted(hub, TARGET, tmp_path / "target")
    planted(hub, DRAFTER, tmp_path / "drafter")
    code = code_of(hub.files(ADAPTER)["README.md"].decode())
    assert "merge_and_unload" in code
    place = tmp_path / "reader"
    place.mkdir()
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment = hub.environment(HF_HOME=str(tmp_path / "cache"))
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code + "\nprint(len(output[0]))"],
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
        env={**clean, **environment},
    )
    assert result.returncode == 0, result.stderr
    merged = DFlashDraftModel.from_pretrained(place / "merged-drafter")
    base = DFlashDraftModel.from_pretrained(tmp_path / "drafter")
    adapter = trained.model.base_model.model.layers[0].self_attn.q_proj
    weight = base.layers[0].self_attn.q_proj.weight
    assert not torch.equal(merged.layers[0].self_attn.q_proj.weight, weight)
    torch.testing.assert_close(
        merged.layers[0].self_attn.q_proj.weight, weight + adapter.get_delta_weight("default")
    )
    assert re.search(r"^\d+$", result.stdout, re.M)
    loads = CliRunner().invoke(cli.app, ["doctor", str(place / "merged-drafter")])
    assert "vllm serve" in loads.output


def test_a_drafter_on_this_machine_is_not_named_by_its_path(
    hub: HubStandIn, tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path, "dflare", base=str(tmp_path / "drafter"))
    pushed(trainer)
    card = ModelCard(hub.files(ADAPTER)["README.md"].decode())
    assert card.data.base_model is None
    assert "the DFlare drafter drafter, trained for" in card.text
    assert 'from_pretrained("<drafter>", dtype="float32")' in card.text
    assert "`<drafter>` stands for the folder or repository of the drafter." in card.text
    assert {"dflare", "arxiv:2606.02091"} <= set(card.data.tags)
    config = json.loads(hub.files(ADAPTER)["adapter_config.json"])
    assert config["base_model_name_or_path"] == "drafter"
    assert str(tmp_path) not in str(hub.files(ADAPTER))


def test_a_saved_adapter_has_no_form_of_another_tool(trained: DFlashTrainer) -> None:
    folder = Path(str(trained.args.output_dir))
    trained.save_model()
    assert is_adapter(folder)
    assert not (folder / "README.md").exists()
    (folder / "README.md").write_text("my own\n")
    trained.save_model()
    assert (folder / "README.md").read_text() == "my own\n"
    with pytest.raises(ValueError, match=r"was not written by `hf-dflash card`: it is yours"):
        trained.create_model_card()


def test_the_commands_write_show_and_push_the_card(
    trained: DFlashTrainer, hub: HubStandIn, tmp_path: Path
) -> None:
    trained.save_model()
    folder = Path(str(trained.args.output_dir))
    (tmp_path / "notes.md").write_text("Trained on poems.\n")
    words = ["card", str(folder), "--license", "mit", "--notes", str(tmp_path / "notes.md")]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.output
    before = (folder / "README.md").read_text()
    assert "`<adapter>` stands for the folder or repository that this card lies in." in before
    result = CliRunner().invoke(cli.app, ["push", str(folder), ADAPTER, "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "The adapter can be read, and its card was checked." in result.output
    push_folder(folder, ADAPTER, token=TOKEN)
    place = downloaded(hub, ADAPTER, tmp_path / "downloaded")
    card = ModelCard.load(place / "README.md")
    assert (card.data.license, ADAPTER in card.text) == ("mit", True)
    assert "stands for" not in card.text
    assert card.text.endswith("## Notes\n\nTrained on poems.\n")
    check_folder(place)
    assert write_adapter_card(place).read_text() == card.content, "name, licence, notes are kept"


def test_a_folder_holds_a_drafter_or_an_adapter_on_the_hub_and_never_both(
    trained: DFlashTrainer, hub: HubStandIn, tmp_path: Path
) -> None:
    """transformers takes a drafter that lies beside an adapter's config for the adapter's base."""
    pushed(trained)
    CliRunner().invoke(cli.app, ["card", str(tmp_path / "drafter")])
    push_folder(tmp_path / "drafter", ADAPTER, token=TOKEN)
    names = set(hub.files(ADAPTER))
    assert not {name for name in names if name.startswith("adapter_")}
    assert "model.safetensors" in names
    pushed(trained)
    names = set(hub.files(ADAPTER))
    assert not {"config.json", "model.safetensors"} & names


def test_names_of_another_card_are_not_kept(trained: DFlashTrainer) -> None:
    trained.save_model()
    folder = Path(str(trained.args.output_dir))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Model Card for Model ID\n")
    text = write_adapter_card(folder, CardOptions(overwrite=True)).read_text()
    assert "Model ID" not in text
    assert "# LORA adapter of a DFlash drafter\n" in text


def test_without_a_log_nothing_is_told_of_the_training(trained: DFlashTrainer) -> None:
    trained.save_model()
    folder = Path(str(trained.args.output_dir))
    (folder / "training_log.json").unlink()
    card = write_adapter_card(folder).read_text()
    assert "How it was trained is not recorded here." in card
    assert "`<target>` stands for the folder or repository of the target." in card
    assert "dflash\n" not in card, "no file tells the architecture"
    assert "DFlash drafter" not in card
    check_adapter(folder)


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        ("card", ValueError, r"is not the card that is made of the files beside it: it was edited"),
        ("tags", ValueError, r"is not the card that is made of the files beside it"),
        ("log", ValueError, r"is not the card that is made of the files beside it"),
        ("no card", FileNotFoundError, r"has no README\.md.*write its card: `hf-dflash card"),
        ("no weights", FileNotFoundError, r"has no adapter_model\.safetensors.*save_pretrained"),
        ("cut weights", ValueError, r"adapter_model\.safetensors"),
        ("config", ValueError, r"adapter_config\.json must be JSON written by PEFT"),
        ("kind", ValueError, r"adapter_config\.json must be an adapter's config of PEFT"),
        ("notes", ValueError, r"`notes` must not hold figures"),
    ],
)
def test_what_is_not_fit_to_be_pushed(
    trained: DFlashTrainer, edit: str, error: type[Exception], message: str
) -> None:
    trained.save_model()
    folder = Path(str(trained.args.output_dir))
    trained.create_model_card(model_name=ADAPTER, license="mit")
    check_folder(folder)
    card, weights = folder / "README.md", folder / "adapter_model.safetensors"
    config, log = folder / "adapter_config.json", folder / "training_log.json"
    match edit:
        case "card":
            card.write_text(card.read_text().replace("Not measured:", "Twice as fast:"))
        case "tags":
            card.write_text(card.read_text().replace("- lora\n", "- best\n"))
        case "log":
            log.write_text(log.read_text().replace('"n_steps": 3', '"n_steps": 4'))
        case "no card":
            card.unlink()
        case "no weights":
            weights.unlink()
        case "cut weights":
            weights.write_bytes(weights.read_bytes()[:-8])
        case "config":
            config.write_text("{")
        case "kind":
            config.write_text("{}")
        case "notes":
            card.write_text(card.read_text() + "\n## Notes\n\nIt is 3 times faster.\n")
    with pytest.raises(error, match=message):
        check_folder(folder)


def test_measurements_are_of_a_whole_drafter(trained: DFlashTrainer, tmp_path: Path) -> None:
    trained.save_model()
    (tmp_path / "bench.json").write_text("{}")
    words = ["card", str(trained.args.output_dir), "--bench", str(tmp_path / "bench.json")]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 2
    assert "`--bench` and `--training-log` are of a whole drafter" in " ".join(
        result.output.split()
    )


def test_the_drafter_is_known_by_its_repository_wherever_it_was_loaded_from(
    trained: DFlashTrainer,
) -> None:
    trained.save_model()
    folder = Path(str(trained.args.output_dir))
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    cached = "/home/me/.cache/hub/models--org--drafter/snapshots/1cfa9a72"
    path.write_text(json.dumps({**config, "base_model_name_or_path": cached}))
    assert read_adapter(folder).drafter == "org/drafter"
    sent = {file.name: file.source for file in folder_contents(folder).files}
    assert json.loads(sent["adapter_config.json"])["base_model_name_or_path"] == "org/drafter"


def test_an_adapter_is_written_whole_or_not_at_all(
    trained: DFlashTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained.save_model()
    trained.create_model_card(model_name=ADAPTER)
    folder = Path(str(trained.args.output_dir))
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def full_disk(place: Any, *_: Any, **__: Any) -> None:
        Path(place).mkdir(exist_ok=True)
        for name in ("README.md", "adapter_model.safetensors"):
            (Path(place) / name).write_text("half")
        raise OSError("No space left on device")

    monkeypatch.setattr(trained.model, "save_pretrained", full_disk)
    with pytest.raises(OSError, match="No space left"):
        trained.save_model()
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == before


def test_an_adapter_of_something_else_is_refused(trained: DFlashTrainer) -> None:
    trained.save_model()
    folder = Path(str(trained.args.output_dir))
    log, path = folder / "training_log.json", folder / "adapter_config.json"
    kept = log.read_text()
    log.write_text(kept.replace('"dflash"', '"dbeam"'))
    with pytest.raises(ValueError, match="`architecture` must be one of dflash, dflare, got 'dbe"):
        read_adapter(folder)
    log.write_text(kept)
    assert read_adapter(folder).architecture == "dflash"
    other = {"base_model_class": "LlamaModel", "parent_library": "transformers"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_mapping": other}))
    with pytest.raises(ValueError, match=r"must be of an adapter of a drafter, .* is LlamaModel"):
        read_adapter(folder)
