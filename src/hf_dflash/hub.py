"""Publish a drafter on the Hub: which files of its folder, checked how, in one commit."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, RepoUrl
from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id
from transformers.dynamic_module_utils import get_relative_import_files

from . import modeling_dflash
from .adapter_card import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_WEIGHTS_NAME,
    adapter_with_place,
    check_adapter,
    is_adapter,
    published_adapter_config,
)
from .card_sections import with_place
from .checkpoint_dflash import SAFE_NAMES, weight_files
from .configuration_dflash import AUTO_MAP, DFlashConfig
from .hub_errors import answer_of, is_the_hubs_own, quiet_client, status_of
from .model_card import (
    CARD_NAME,
    EVALUATION_FOLDER,
    CardOptions,
    check_card,
    tells_of_code,
    write_card,
)
from .modeling_dflash import DFlashDraftModel
from .training_comparison import TRAINING_COMPARISON_NAME
from .training_log import TRAINING_LOG_NAME

#: Sent where they are there; the weights and the code are found by the config and the index.
_LICENCES = ("LICENSE*", "NOTICE*")
#: What a drafter says of itself, so those of an earlier one must not stay beside another.
_OF_THE_DRAFTER = ("generation_config.json", TRAINING_LOG_NAME, TRAINING_COMPARISON_NAME)
_DOCUMENTS = (*_OF_THE_DRAFTER, CARD_NAME, *_LICENCES)
_EVIDENCE = tuple(f"{EVALUATION_FOLDER}/*{ending}" for ending in (".json", ".svg", ".png", ".html"))


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """A file that is sent."""

    name: str  # in the repository
    source: Path | bytes  # a file, or the content of one that the folder has otherwise
    size_bytes: int


@dataclass(frozen=True, slots=True)
class FolderContents:
    """What of a folder belongs to the published drafter, and what stays here."""

    files: tuple[PublishedFile, ...]
    left_out: tuple[str, ...]  # a folder as one name that ends with /
    adds_code: bool = False  # the folder has none; the repository gets this package's

    @property
    def size_bytes(self) -> int:
        """Of all files that are sent."""
        return sum(file.size_bytes for file in self.files)


def folder_contents(folder: Path, *, code: bool = True) -> FolderContents:
    """Say which files of a folder are the drafter: those that some loader or reader asks for.

    So a folder of a training run may be given as it is: checkpoints, optimiser states and logs of
    other tools are left out. It may hold an adapter (PEFT) of a drafter instead of a drafter.

    Args:
        folder: Of the drafter; only read.
        code: Publish the code that ``trust_remote_code`` runs. A folder without any (the formats
            that serving engines ask for have none) gets this package's, as `save_pretrained`
            writes it: `auto_map` is added to its config, and nothing else is changed. False: no
            code and no `auto_map`, whatever the folder has.

    Raises:
        FileNotFoundError: The folder or one of the drafter's files is not there.
        ValueError: It has no weights that can be read.
    """
    if is_adapter(folder):
        return _adapter_contents(folder)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"`folder` must hold a drafter (config.json, model.safetensors), but {folder} has no "
            "config.json. Save one with save_pretrained, or give the folder of a training run."
        )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    adds_code = code and not config.get("auto_map")
    names = ["config.json", *_weight_names(folder)]
    names += _code_names(folder, config) if code else []
    names += _names_like(folder, (*_DOCUMENTS, *_EVIDENCE))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder} lacks {missing}, which its config or index asks for. Save the drafter anew "
            "with save_pretrained, which writes its code, too."
        )
    files = {name: _published(name, folder / name) for name in names}
    if adds_code or (not code and config.get("auto_map")):
        files["config.json"] = _published("config.json", _config_text(config, code=code))
    if adds_code:
        files |= {path.name: _published(path.name, path) for path in _own_code()}
    return FolderContents(tuple(files.values()), _others(folder, files), adds_code)


def _adapter_contents(folder: Path) -> FolderContents:
    config = _published(ADAPTER_CONFIG_NAME, published_adapter_config(folder))
    names = [ADAPTER_WEIGHTS_NAME, *_names_like(folder, (CARD_NAME, *_LICENCES, TRAINING_LOG_NAME))]
    files = [config, *(_published(name, folder / name) for name in names)]
    return FolderContents(tuple(files), _others(folder, [file.name for file in files]))


def _names_like(folder: Path, patterns: Iterable[str]) -> list[str]:
    found = (sorted(path for path in folder.glob(p) if path.is_file()) for p in patterns)
    return [path.relative_to(folder).as_posix() for paths in found for path in paths]


def _published(name: str, source: Path | bytes) -> PublishedFile:
    n_bytes = len(source) if isinstance(source, bytes) else source.stat().st_size
    return PublishedFile(name, source, n_bytes)


def _config_text(config: dict[str, Any], *, code: bool) -> bytes:
    """A config as it was, but for `auto_map`."""
    others = {key: value for key, value in config.items() if key != "auto_map"}
    written = {**others, "auto_map": AUTO_MAP} if code else others
    return (json.dumps(written, indent=2) + "\n").encode()


def _own_code() -> list[Path]:
    """The files that `save_pretrained` copies."""
    model = Path(modeling_dflash.__file__)
    return sorted({model, *map(Path, get_relative_import_files(model))})


def _weight_names(folder: Path) -> list[str]:
    files = [path.relative_to(folder).as_posix() for path in weight_files(folder, {})]
    return files if files == [SAFE_NAMES[0]] else [SAFE_NAMES[1], *files]


def _code_names(folder: Path, config: dict[str, Any]) -> list[str]:
    """Files that ``trust_remote_code`` runs, found as transformers finds them."""
    modules = {
        str(reference).split(".")[0]
        for reference in (config.get("auto_map") or {}).values()
        if "--" not in str(reference)  # code of another repository
    }
    names = {f"{module}.py" for module in modules}
    for module in sorted(modules):
        if (folder / f"{module}.py").is_file():
            found = get_relative_import_files(folder / f"{module}.py")
            names |= {Path(file).name for file in found}
    return sorted(names)


def _others(folder: Path, names: Iterable[str]) -> tuple[str, ...]:
    kept = {name.split("/")[0] for name in names}
    others = (path for path in folder.iterdir() if path.name not in kept)
    return tuple(sorted(f"{path.name}/" if path.is_dir() else path.name for path in others))


def check_folder(folder: Path, *, code: bool = True) -> FolderContents:
    """Make sure that what is published loads, and that its card says only what was measured.

    Args:
        folder: Of the drafter.
        code: As for `folder_contents`.

    Raises:
        FileNotFoundError: A file of the drafter is missing.
        ValueError: The drafter does not load strictly, or its card holds a figure without source,
            or tells of code that is not published.
    """
    if is_adapter(folder):
        check_adapter(folder)
        return folder_contents(folder)
    contents = folder_contents(folder, code=code)
    # `AutoModel` reads the config first and then the tensors by it.
    read_first = {"config": DFlashConfig.from_pretrained(folder)} if contents.adds_code else {}
    DFlashDraftModel.from_pretrained(folder, dtype="auto", **read_first)
    check_card(folder)
    if not code and tells_of_code(folder):
        raise ValueError(
            f"`code` is off (--no-code), but {folder / CARD_NAME} tells readers to load the drafter"
            f" with trust_remote_code=True. Write the card again: `hf-dflash card {folder} "
            "--no-code`."
        )
    return contents


def push_folder(
    folder: Path,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    token: str | bool | None = None,
    code: bool = True,
) -> str:
    """Send a checked drafter to the Hub, or an adapter of one, in one commit.

    Readers find the old or the new one whole.

    What an earlier drafter or adapter left there and this one does not have is deleted by the same
    commit, as a reader would take it for this one's: weights, generation_config.json, training
    log, training_runs.json, files in evaluation/, and config.json or an adapter's two files where
    the kind changes. Licences, code and files that no drafter has are left alone.

    A push that was interrupted is begun again by the same call: the Hub keeps large files that
    arrived and does not ask for them twice. A repository that was made for it stays, empty.

    Args:
        folder: Of the drafter.
        repo_id: "organisation/name", or "name" for your own account; made if it is not there.
        private: Whether a new repository is; `None`: as your account has it. With true, nothing is
            sent to a public one that is there already.
        revision: Branch, made if it is not there; or "refs/pr/N" for an open pull request.
        create_pr: Propose the files as a pull request.
        commit_message: Of the commit; "Upload drafter" by default.
        token: Of the Hub; by default the one that `hf auth login` or HF_TOKEN gives.
        code: As for `folder_contents`.

    Returns:
        Address of the repository, or of the pull request.

    Raises:
        ValueError: The folder or an option is not fit to be published.
        ConnectionError: The Hub cannot be reached.
        PermissionError: Not logged in, or not allowed to write.
        RuntimeError: The Hub answered with another error.
    """
    validate_repo_id(repo_id)
    if create_pr and revision is not None:
        raise ValueError(
            f"`revision` must be left out with `create_pr`, whose branch the Hub makes, got "
            f"{revision!r}. To add to an open pull request: revision='refs/pr/N' alone."
        )
    contents = check_folder(folder, code=code)
    api = HfApi(token=token)
    with _plain_errors(repo_id) as push:
        repo = _repository(api, push, private)
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(repo.repo_id, branch=revision, exist_ok=True)
        there = api.list_repo_files(repo.repo_id, revision=revision)
        commit = api.create_commit(
            repo.repo_id,
            [
                *(
                    CommitOperationAdd(file.name, _as_sent(file, repo.repo_id))
                    for file in contents.files
                ),
                *(CommitOperationDelete(name) for name in _outdated(there, contents)),
            ],
            commit_message=commit_message or "Upload drafter",
            revision=revision,
            create_pr=create_pr,
        )
    return commit.pr_url or str(repo)


@dataclass(slots=True)
class _Push:
    """How far a push has come."""

    repo_id: str
    made_repository: bool = False

    @property
    def state(self) -> str:
        """What a push that failed leaves on the Hub."""
        if self.made_repository:
            return (
                f"The repository {self.repo_id} was made for this push and is empty: no file is in "
                f"it. The same command goes on; to be rid of it: `hf repos delete {self.repo_id}`"
            )
        return f"A push is one commit, so no file of {self.repo_id} was changed"


def _repository(api: HfApi, push: _Push, private: bool | None) -> RepoUrl:
    """The repository, made if it is not there."""
    try:
        repo = api.create_repo(push.repo_id, private=private)
    except HfHubHTTPError as error:
        # Without the right to make one, writing into one that is there may be allowed.
        if error.response is None or error.response.status_code not in (403, 409):
            raise
        repo = api.create_repo(push.repo_id, private=private, exist_ok=True)
        if private and not api.model_info(repo.repo_id).private:
            raise ValueError(
                f"`private` is on (--private), but {repo.repo_id} is there already and is public. "
                f"Make it private first: `hf repos settings {repo.repo_id} --private`; or leave "
                f"`private` out. {push.state}."
            ) from error
        return repo
    push.repo_id, push.made_repository = repo.repo_id, True
    return repo


def _as_sent(file: PublishedFile, repo_id: str) -> str | bytes:
    """A file's path or content; a card that left open where to load from gets the repository."""
    if isinstance(file.source, bytes):
        return file.source
    if file.name == CARD_NAME:
        card = file.source.read_bytes().decode()
        return with_place(adapter_with_place(card, repo_id), repo_id).encode()
    return str(file.source)


def _outdated(there: Iterable[str], contents: FolderContents) -> list[str]:
    """Files of an earlier drafter or adapter, to be taken for this one's."""
    sent = {file.name for file in contents.files}
    # A loader would take a drafter with an adapter's config for the adapter, and the reverse.
    adapter = ("config.json", ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME)
    old = (*SAFE_NAMES, "model-*-of-*.safetensors", *adapter, *_OF_THE_DRAFTER, *_EVIDENCE)
    return [
        name
        for name in there
        if name not in sent
        and any(name.count("/") == p.count("/") and PurePosixPath(name).match(p) for p in old)
    ]


def push_model(drafter: Any, repo_id: str, **options: Any) -> str:
    """Save a drafter to a temporary folder with a card and push it; what its `push_to_hub` does.

    Args:
        drafter: A `DFlashDraftModel`.
        repo_id: As for `push_folder`.
        **options: Of `push_folder`.
    """
    with tempfile.TemporaryDirectory() as folder:
        drafter.save_pretrained(folder)
        write_card(Path(folder), options=CardOptions(name=repo_id))
        return push_folder(Path(folder), repo_id, **options)


@contextmanager
def _plain_errors(repo_id: str) -> Iterator[_Push]:
    """Say in one line what went wrong on the way, and what it leaves there."""
    endpoint = HfApi().endpoint
    push = _Push(repo_id)
    try:
        with quiet_client():
            yield push
    except (LocalTokenNotFoundError, HTTPError, OSError, RuntimeError) as error:
        raise _plain_error(error, endpoint, push.state) from error


def _plain_error(error: Exception, endpoint: str, state: str) -> Exception:
    answer = answer_of(error)
    status = status_of(answer)
    if isinstance(error, LocalTokenNotFoundError) or status in (401, 403):
        return PermissionError(f"{_login_hint(endpoint)} {state}.")
    if is_the_hubs_own(status):
        return RuntimeError(
            f"{endpoint} answered with error {status}, which is not about this push. {state}. Run "
            "the same command later: large files that arrived are not sent twice."
        )
    if answer is not None:
        said = " ".join((answer.server_message or "no reason given").split()).rstrip(".")
        return RuntimeError(f"The Hub refused the push: {said} (error {status}). {state}.")
    reason = error.__cause__ or error  # the client wraps what happened to a large file
    return ConnectionError(
        f"The Hub at {endpoint} cannot be reached, or the connection broke "
        f"({str(reason) or type(reason).__name__}). {state}. Run the same command when it can be: "
        "large files that arrived are not sent twice. `--dry-run` needs no network."
    )


def _login_hint(endpoint: str) -> str:
    return (
        f"{endpoint} does not let you write there. Log in with `hf auth login`, or set HF_TOKEN to "
        "a token that may write."
    )
