"""What goes wrong between here and the Hub, in one line that says what to do."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
)

LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


@contextmanager
def quiet_client() -> Iterator[None]:
    """Keep what the Hub's client logs at each try out of sight: the end is told once."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def answer_of(error: BaseException | None) -> HfHubHTTPError | None:
    """The Hub's answer that an error comes from; the client and `datasets` wrap it."""
    while error is not None and not isinstance(error, HfHubHTTPError):
        error = error.__cause__
    return error


def status_of(answer: HfHubHTTPError | None) -> int | None:
    """HTTP status of an answer."""
    return None if answer is None or answer.response is None else answer.response.status_code


def is_the_hubs_own(status: int | None) -> bool:
    """Whether an answer of the Hub is about itself: too many requests, or a fault of its own."""
    return status is not None and (status == 429 or status >= 500)


@contextmanager
def plain_dataset_errors(repo_id: str, instead: str) -> Iterator[None]:
    """Say in one line why a dataset of the Hub cannot be read.

    `datasets` has its own errors, the client's, fsspec's and httpx's for it, and they change. So
    the Hub is asked once more, whether the dataset is there for this user.

    Args:
        repo_id: Of the dataset.
        instead: What helps where the Hub cannot be reached, a sentence.

    Raises:
        ValueError: There is no such dataset for this user, or nothing of that name can be.
        PermissionError: It is gated, or the token is not valid.
        ConnectionError: The Hub cannot be reached.
        RuntimeError: The Hub is in trouble, or the dataset is there and cannot be read.
    """
    try:
        with quiet_client():
            yield
    except Exception as error:
        _ask_the_hub(repo_id, instead)
        status = status_of(answer_of(error))
        if is_the_hubs_own(status):
            raise RuntimeError(_in_trouble(repo_id, status)) from error
        # Of a dataset with several configs, the second line names them.
        said = " ".join(str(error).splitlines()[:2]).rstrip(".")
        raise RuntimeError(
            f"The dataset {repo_id} is on the Hub, but cannot be read as it was asked for "
            f"({type(error).__name__}: {said}). If the connection broke, run the command again."
        ) from error


def _ask_the_hub(repo_id: str, instead: str) -> None:
    """Raise what keeps this user from the dataset."""
    api = HfApi()
    try:
        api.auth_check(repo_id, repo_type="dataset")
    except GatedRepoError as error:
        raise PermissionError(
            f"The dataset {repo_id} is gated: ask for access at {api.endpoint}/datasets/{repo_id} "
            f"with your account, and {LOGIN}."
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ValueError(
            f"There is no dataset {repo_id} on the Hub that you may read, nor a file of that name "
            f"here. Check the name; if it is private, {LOGIN}."
        ) from error
    except HfHubHTTPError as error:
        status = status_of(error)
        if status in (401, 403):
            raise PermissionError(
                f"{api.endpoint} does not accept your token, so the dataset {repo_id} cannot be "
                f"read: {LOGIN} to a token that is valid."
            ) from error
        raise RuntimeError(_in_trouble(repo_id, status)) from error
    except (HTTPError, OSError) as error:
        raise ConnectionError(
            f"The Hub at {api.endpoint} cannot be reached, so the dataset {repo_id} cannot be "
            f"read. {instead}"
        ) from error


def _in_trouble(repo_id: str, status: int | None) -> str:
    return (
        f"{HfApi().endpoint} answered with error {status}, so the dataset {repo_id} cannot be "
        "read. Run the same command later."
    )
