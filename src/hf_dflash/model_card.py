"""The model card of a drafter: generated, with measured figures only, and checked before a push.

Figures come from files that lie in the drafter's folder and are published with it: measurements of
``hf-dflash bench`` in ``evaluation/``, and the training log. See `card_blocks`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from .card_blocks import block_text, blocks_of, write_block
from .card_figures import figure_without_source, number_out_of_place
from .card_results import eval_results, plain_result
from .card_sections import (
    PAPERS,
    PLACE_OF_CARD,
    REMOTE_CODE_CALL,
    USED_NAMES,
    details_section,
    introduction,
    is_repository,
    limits_section,
    usage_section,
    weights_of,
)
from .configuration_dflash import AUTO_MAP, DFlashConfig
from .findings import ARCHITECTURES, short_name
from .measurement import Measurement, read_measurement, write_whole
from .old_card import GENERATED, check_notes, known_notes, notes_section, of_old, old_card
from .provenance import drafting_policy, sha256_of_weights
from .training_comparison import TRAINING_COMPARISON_NAME
from .training_log import TRAINING_LOG_NAME, read_training_log

CARD_NAME = "README.md"
EVALUATION_FOLDER = "evaluation"
_UNKNOWN_TARGET = "<target>"
#: All that is in them is made from files of the folder.
GENERATED_SECTIONS = ("Measured", "Use", "Training", "Limits", "Details")


@dataclass(frozen=True, slots=True)
class CardOptions:
    """What a card says that no file of the folder tells.

    Attributes:
        name: What the drafter is loaded by, a repository or a path; by default as the card that
            is there has it, else a placeholder that `push_folder` fills in.
        target: Repository of the target; by default the one that the measurements, the training
            log or the card that is there name.
        licence: As the Hub writes it, "apache-2.0"; by default that of the card that is there.
        notes: Markdown of your own, such as where the data are from, without figures of speed; by
            default the notes of the card that is there.
        overwrite: Replace a card without this generator's mark.
        code: Tell how to load it with ``trust_remote_code``; a push adds the code for it.
    """

    name: str | None = None
    target: str | None = None
    licence: str | None = None
    notes: str | None = None
    overwrite: bool = False
    code: bool = True


@dataclass(frozen=True, slots=True)
class Sources:
    """Files of a folder that hold figures, relative to it, and what they say."""

    measurements: dict[str, Measurement] = field(default_factory=dict)
    training_log: str | None = None
    comparison: str | None = None
    head: Measurement | None = None  # of the first headline


def write_card(
    folder: Path,
    *,
    benches: Sequence[Path] = (),
    training_log: Path | None = None,
    options: CardOptions | None = None,
) -> Path:
    """Write README.md into a drafter's folder, and the files that its figures are of.

    Args:
        folder: Of the drafter.
        benches: Files of `hf-dflash bench`, copied to ``evaluation/``. Without any, those that
            are there already.
        training_log: Copied to training_log.json; by default the one that is there.
        options: What no file tells.

    Returns:
        Path of the card.

    Raises:
        ValueError: A measurement is of another drafter, the card that is there has no mark of
            this generator, or the notes hold a figure.
        OSError: A file cannot be read or written.
    """
    options = options or CardOptions()
    card_path = folder / CARD_NAME
    old = old_card(card_path, overwrite=options.overwrite)
    config = DFlashConfig.from_pretrained(folder)
    check_notes(options.notes)
    _check_names(benches)
    given = {bench.name for bench in benches}
    kept = [path for path in _measurement_files(folder) if path.name not in given]
    for path in (*benches, *kept):
        _check_same_drafter(read_measurement(path), path, folder)
    for bench in benches:
        _copy(bench, folder / EVALUATION_FOLDER / bench.name)
    if training_log is not None:
        read_training_log(training_log)
        _copy(training_log, folder / TRAINING_LOG_NAME)
    sources = sources_of(folder)
    target = options.target or _known_target(folder, sources, old)
    options = replace(
        options, name=options.name or _known_name(old), notes=options.notes or known_notes(old)
    )
    data = _metadata(folder, config, sources, old, options, target)
    body = _body(folder, config, sources, options, target)
    write_whole(card_path, f"---\n{data.to_yaml()}\n---\n\n{GENERATED}\n\n{body}")
    return card_path


def sources_of(folder: Path) -> Sources:
    """Read the files of a folder that figures may be of.

    Raises:
        ValueError: One of them is not what its place says.
    """
    paths = _measurement_files(folder)
    measurements = {f"{EVALUATION_FOLDER}/{path.name}": read_measurement(path) for path in paths}
    head = next(iter(measurements.values()), None)
    names = (TRAINING_LOG_NAME, TRAINING_COMPARISON_NAME)
    log, comparison = (name if (folder / name).is_file() else None for name in names)
    return Sources(measurements, log, comparison, head)


def _measurement_files(folder: Path) -> list[Path]:
    return sorted((folder / EVALUATION_FOLDER).glob("*.json"))


def check_card(folder: Path) -> None:
    """Make sure that a card holds no figure but those of the files beside it.

    Raises:
        FileNotFoundError: There is no card.
        ValueError: A figure has no source, or is not what its source says.
    """
    path = folder / CARD_NAME
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no {CARD_NAME}. Write one: `hf-dflash card {folder}`."
        )
    card = ModelCard.load(path)
    again = (
        "It was edited, or another version of hf-dflash wrote it. Write the card again: "
        f"`hf-dflash card {folder}`."
    )
    for block in blocks_of(card.content):
        if not (folder / block.source).is_file():
            raise ValueError(f"{path} has figures of {block.source}, which is not there. {again}")
        if block.text.strip() != block_text(folder, block.kind, block.source):
            raise ValueError(f"{path} says something else than {block.source} does. {again}")
    sources = sources_of(folder)
    for source, measurement in sources.measurements.items():
        _check_same_drafter(measurement, folder / source, folder)
    results = [plain_result(result) for result in card.data.eval_results or []]
    expected = [plain_result(result) for result in eval_results(sources.measurements)]
    unknown = [result for result in results if result not in expected]
    if unknown:
        raise ValueError(
            f"{path} has a result in its metadata that no file in {EVALUATION_FOLDER}/ gives: "
            f"{unknown[0]['metric_type']} {unknown[0]['metric_value']} on "
            f"{unknown[0]['dataset_name']}. {again}"
        )
    _check_text(folder, path.read_text(encoding="utf-8"), sources.head)


def _check_text(folder: Path, card: str, head: Measurement | None) -> None:
    """Refuse numbers that neither the config, the weights, a measurement nor the log gives."""
    known = _generated_lines(folder, card, head)
    line = figure_without_source(card, known)
    if line is None and GENERATED in card:
        line = number_out_of_place(card, GENERATED_SECTIONS, known)
    if line is not None:
        raise ValueError(
            f"{folder / CARD_NAME} has a figure without a source in line {line[0]}: {line[1]!r}. "
            "Measure with `hf-dflash bench`, write the card from its file (`hf-dflash card "
            "--bench`), and keep figures out of your own text. Numbers that are no measurement "
            "may stand under Notes (`--notes`). A line that you did not write is of another "
            f"version of hf-dflash: write the card again, `hf-dflash card {folder}`."
        )


def _generated_lines(folder: Path, card: str, head: Measurement | None) -> set[str]:
    """What is written for this drafter, under the names that the card has for it and its target."""
    name, target = (
        found.group(1) if (found := pattern.search(card)) else None for pattern in USED_NAMES
    )
    config = DFlashConfig.from_pretrained(folder)
    known_target = None if target == _UNKNOWN_TARGET else target
    bodies = [
        _body(folder, config, Sources(head=head), CardOptions(name=name, code=code), known_target)
        for code in (True, False)
    ]
    return {line.strip() for body in bodies for line in body.splitlines()}


def _metadata(
    folder: Path,
    config: DFlashConfig,
    sources: Sources,
    old: ModelCard | None,
    options: CardOptions,
    target: str | None,
) -> ModelCardData:
    on_hub = target is not None and is_repository(target)
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        license=options.licence or of_old(old, "license"),
        base_model=target if on_hub else None,
        # Of the Hub's kinds the one for weights that are used on top of their base model.
        base_model_relation="adapter" if on_hub else None,
        tags=[
            config.architecture,
            "speculative-decoding",
            "block-diffusion",
            "draft-model",
            PAPERS[config.architecture],
        ],
        **_model_index(options.name or folder.absolute().name, sources),
    )


def _model_index(name: str, sources: Sources) -> dict[str, Any]:
    results = eval_results(sources.measurements)
    return {"model_name": name, "eval_results": results} if results else {}


def _body(
    folder: Path,
    config: DFlashConfig,
    sources: Sources,
    options: CardOptions,
    target: str | None,
) -> str:
    measured = [write_block(folder, "measured", source) for source in sources.measurements]
    records = (("trained", sources.training_log), ("compared", sources.comparison))
    trained = [write_block(folder, kind, name) for kind, name in records if name]
    parts = [
        f"# {_title(config, options, target)}\n",
        introduction(config, target),
        "## Measured\n",
        *(measured or ["Not measured yet.\n"]),
        usage_section(
            config,
            options.name or PLACE_OF_CARD,
            target or _UNKNOWN_TARGET,
            has_code=options.code and not _has_other_code(folder),
            head=sources.head,
        ),
        "## Training\n",
        *(trained or ["How it was trained is not recorded here.\n"]),
        limits_section(config),
        details_section(config, weights_of(folder)),
    ]
    return "\n".join([*parts, *notes_section(options.notes)])


def _title(config: DFlashConfig, options: CardOptions, target: str | None) -> str:
    """Not the folder's name: a card must be right wherever its folder is copied to."""
    if options.name and options.name != PLACE_OF_CARD:
        return short_name(options.name)
    of_target = f" for {short_name(target)}" if target else ""
    return f"{ARCHITECTURES[config.architecture]} drafter{of_target}"


def _has_other_code(folder: Path) -> bool:
    """Whether ``trust_remote_code`` runs another project's code, which has its own way of use."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return bool(raw.get("auto_map")) and raw["auto_map"] != AUTO_MAP


def tells_of_code(folder: Path) -> bool:
    """Whether a card tells readers to load the drafter by code of its repository."""
    text = (folder / CARD_NAME).read_text(encoding="utf-8")
    return REMOTE_CODE_CALL in text


def _known_target(folder: Path, sources: Sources, old: ModelCard | None) -> str | None:
    """A repository if one is named anywhere: readers cannot load a folder of this machine."""
    log = sources.training_log
    known = [
        *(measurement.provenance.target.name for measurement in sources.measurements.values()),
        read_training_log(folder / log).target if log else None,
        of_old(old, "base_model"),
    ]
    names = [name for name in known if name]
    return next((name for name in names if is_repository(name)), names[0] if names else None)


def _known_name(old: ModelCard | None) -> str | None:
    """What the card that is there loads the drafter by, if that is more than a folder's name."""
    found = None if old is None else USED_NAMES[0].search(old.content)
    return found.group(1) if found and "/" in found.group(1) else None


def _check_names(benches: Sequence[Path]) -> None:
    names = [bench.name for bench in benches]
    if len(set(names)) < len(names):
        raise ValueError(
            f"`benches` must differ in their names, which they keep in {EVALUATION_FOLDER}/, got "
            f"{names}. Rename one after its machine or dtype."
        )


def _check_same_drafter(measurement: Measurement, path: Path, folder: Path) -> None:
    got, own = measurement.provenance.drafter, sha256_of_weights(str(folder))
    if own != got.sha256:
        raise ValueError(
            f"`benches` must be of the drafter in {folder}, but {path} measured {got.name} with "
            f"other weights (sha256 {got.sha256[:12]}..., here {own[:12]}...). Measure this one: "
            f"`hf-dflash bench`. Files of other weights must not lie in {EVALUATION_FOLDER}/."
        )
    taps = list(DFlashConfig.from_pretrained(folder).target_layer_ids)
    policy = _policy_of(folder)
    if got.policy != policy or got.target_layer_ids not in ([], taps):
        raise ValueError(
            f"`benches` must be of the drafter in {folder} as it is, but {path} measured it with "
            f"the drafting policy {got.policy} and `target_layer_ids` {got.target_layer_ids}, here "
            f"{policy} and {taps}. Measure this one: `hf-dflash bench`."
        )


def _policy_of(folder: Path) -> dict[str, int | float]:
    if not (folder / GENERATION_CONFIG_NAME).is_file():
        return {}
    return drafting_policy(GenerationConfig.from_pretrained(folder))


def _copy(source: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    if source.resolve() != place.resolve():
        shutil.copyfile(source, place)
