"""The metric for `evaluate`, and that the package takes its own figures from the same file."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import RepoCard
from packaging.requirements import Requirement

from hf_dflash import acceptance_counts, callbacks
from hf_dflash.measurement_summary import acceptance
from hf_dflash.metrics import acceptance_metrics
from hub_stand_in import HubStandIn, Repository
from measurements import run

evaluate = pytest.importorskip("evaluate")
FOLDER = Path(__file__).parents[2] / "metrics" / "acceptance_length"
BLOCK_DRAFTS = 7


@pytest.fixture
def metric(tmp_path: Path) -> Any:
    # Its cache and the copy of the code that `evaluate` imports.
    return evaluate.load(str(FOLDER), cache_dir=str(tmp_path))


def outputs(seed: int) -> tuple[list[list[int]], list[list[int]]]:
    rng = random.Random(seed)
    drafted = [[rng.randint(0, BLOCK_DRAFTS) for _ in range(rng.randint(1, 9))] for _ in range(5)]
    return [[rng.randint(0, n) for n in cycles] for cycles in drafted], drafted


def test_its_arithmetic_is_the_packages_own_file() -> None:
    own = Path(acceptance_counts.__file__)
    assert (FOLDER / own.name).read_bytes() == own.read_bytes(), f"copy {own.name} again"


def test_bench_trainer_and_decoding_callback_call_the_one_definition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A definition of their own would not see that it was changed."""
    changed = dataclasses.replace(
        acceptance_counts.count_acceptance([[1]], [[1]]), macro=7.0, expected=8.0
    )
    for module in ("measurement_summary", "metrics"):
        monkeypatch.setattr(f"hf_dflash.{module}.count_acceptance", lambda *_: changed)
    assert acceptance([run()]).macro == 7.0
    assert acceptance_metrics(torch.ones(1, 1))["acceptance_length"] == 8.0
    # The callback is tested in test_callbacks.py with a target that decodes.
    assert callbacks.count_acceptance is acceptance_counts.count_acceptance


@pytest.mark.parametrize("seed", range(3))
def test_its_figures_are_the_packages_under_the_papers_names(metric: Any, seed: int) -> None:
    accepted, drafted = outputs(seed)
    counts = acceptance_counts.count_acceptance(accepted, drafted)
    assert metric.compute(predictions=accepted, references=drafted) == {
        "acceptance_length": counts.macro,
        "acceptance_length_micro": counts.micro,
        "acceptance_length_expected": counts.expected,
        "n_outputs": counts.n_outputs,
        "n_cycles": counts.n_cycles,
        "histogram": counts.histogram,
        "accepted": counts.accepted,
        "accepted_by_slot": counts.by_slot,
    }


def test_the_trainers_blocks_are_cycles(metric: Any) -> None:
    """Whole blocks and cut ones: the figure has one name and one value in both places."""
    generator = torch.Generator().manual_seed(0)
    right = torch.randint(0, 2, (40, BLOCK_DRAFTS), generator=generator)
    whole = right.cumprod(dim=1).sum(dim=1).tolist()
    found = metric.compute(predictions=[whole], references=[[BLOCK_DRAFTS] * 40])
    ours = acceptance_metrics(right)["acceptance_length"]
    assert found["acceptance_length_expected"] == ours
    assert found["acceptance_length_micro"] == pytest.approx(ours)
    widths = torch.randint(0, BLOCK_DRAFTS + 1, (40,), generator=generator)
    right[torch.arange(BLOCK_DRAFTS) >= widths[:, None]] = -1
    cut = [min(n, width) for n, width in zip(whole, widths.tolist(), strict=True)]
    kept = [(n, width) for n, width in zip(cut, widths.tolist(), strict=True) if width]
    found = metric.compute(predictions=[[n for n, _ in kept]], references=[[w for _, w in kept]])
    assert found["acceptance_length_expected"] == acceptance_metrics(right)["acceptance_length"]
    assert found["acceptance_length_micro"] != found["acceptance_length_expected"]


def test_it_loads_where_this_package_is_not_installed(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['hf_dflash'] = None\n"  # not installed
        "import evaluate\n"
        f"metric = evaluate.load({str(FOLDER)!r}, cache_dir={str(tmp_path / 'cache')!r})\n"
        "print(metric.compute(predictions=[[3, 1], [0]], references=[[3, 3], [3]]))"
    )
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith("HF_") and k != "PYTHONPATH"
    }
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**environment, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
    )
    assert "'acceptance_length': 2.0" in result.stdout, result.stderr


def run_with_the_hub(
    hub: HubStandIn, place: Path, program: str
) -> subprocess.CompletedProcess[str]:
    """Where nothing of this repository can be found but what the Hub gives."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and k != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['hf_dflash'] = None\n" + program],
        capture_output=True,
        text=True,
        check=False,
        cwd=place,
        env={**clean, **hub.environment(HF_HOME=str(place / "home"))},
    )


def test_it_loads_from_a_space_of_the_hub(tmp_path: Path) -> None:
    """The folder, uploaded as it is: the client asks for a script of the repository's name."""
    files = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.is_file()}
    with HubStandIn().running() as hub:
        hub.repositories["spaces/someone/acceptance_length"] = Repository(False, {"main": files})
        program = (
            "import evaluate\n"
            "metric = evaluate.load('someone/acceptance_length')\n"
            "print(metric.compute(predictions=[[3, 1], [0]], references=[[3, 3], [3]]))"
        )
        result = run_with_the_hub(hub, tmp_path, program)
        asked = {request.rpartition("/")[2] for request in hub.requests}
    assert "'acceptance_length': 2.0" in result.stdout, result.stderr
    assert asked == {"acceptance_length.py", "acceptance_counts.py"}


def test_its_card_has_what_a_space_of_a_metric_needs() -> None:
    """The Hub shows it by title and sdk, and `evaluate` lists it by its tags."""
    card = RepoCard.load(FOLDER / "README.md", repo_type="space")
    data = card.data.to_dict()
    assert data["title"] == "Acceptance length"
    assert data["sdk"] == "gradio"
    assert (FOLDER / data["app_file"]).is_file()
    assert {"evaluate", "metric"} <= {*data["tags"]}
    (line,) = (FOLDER / "requirements.txt").read_text().splitlines()
    needed = Requirement(line)
    assert needed.name == "evaluate"
    assert needed.specifier.contains(evaluate.__version__)
    script = (FOLDER / "acceptance_length.py").read_text()
    imported = {
        name.partition(".")[0] for name in re.findall(r"^(?:import|from) (\w[\w.]*)", script, re.M)
    }
    assert imported - {*sys.stdlib_module_names} == {"evaluate", "datasets"}  # it brings datasets


def test_the_page_of_the_space_starts(tmp_path: Path) -> None:
    """As the Hub does, in the folder; its widget is for `gradio`, which the Hub installs."""
    page = tmp_path / "space"
    shutil.copytree(FOLDER, page)
    program = (
        "import evaluate.utils, runpy\n"
        "evaluate.utils.launch_gradio_widget = lambda metric: print(type(metric).__name__)\n"
        "runpy.run_path('app.py', run_name='__main__')"
    )
    with HubStandIn().running() as hub:
        result = run_with_the_hub(hub, page, program)
    assert result.stdout.split() == ["AcceptanceLength"], result.stderr


def test_outputs_come_in_batches_and_may_have_no_cycle(metric: Any) -> None:
    metric.add_batch(predictions=[[3, 1], []], references=[[3, 3], []])
    metric.add(prediction=[0], reference=[3])
    found = metric.compute()
    assert found["acceptance_length"] == pytest.approx(2.0)
    assert found["accepted"] == pytest.approx(4 / 9)
    assert found["n_outputs"] == 2


def test_no_cycle_at_all_is_an_error(metric: Any) -> None:
    with pytest.raises(ValueError, match="`predictions` must hold at least one cycle"):
        metric.compute(predictions=[[], []], references=[[], []])


@pytest.mark.parametrize("drafted", [[[3]], [[3, 0]]])
def test_drafts_that_do_not_fit_are_refused(metric: Any, drafted: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"`references` must hold the drafts .*for \[3, 1\]"):
        metric.compute(predictions=[[3, 1]], references=drafted)


def test_the_folder_is_one_of_the_hub() -> None:
    front = (FOLDER / "README.md").read_text().split("---")[1]
    assert "sdk: gradio" in front
    assert "- evaluate" in front
    assert {p.name for p in FOLDER.iterdir() if p.is_file()} == {
        "README.md",
        "acceptance_counts.py",
        "acceptance_length.py",
        "app.py",
        "requirements.txt",
    }
