"""Compare decoding with a drafter to plain decoding, and see that the drafter was put to use."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_dflash.provenance import commit_of_checkout, device_name
from made_with import CODE, usual_device
from pairs import ScriptedDrafter

_MIXED = (3, 0, 7, 1, 2, 5, 0, 4, 15, 6)


def mixed(cycle: int) -> int:
    """How many drafts of a cycle are right: none, some and all by turns."""
    return _MIXED[cycle % len(_MIXED)]


def check_made_with(record: dict[str, Any], folder: Path) -> None:
    """A record of this checkout says how it was made, and does not name ``folder``."""
    assert record["command"].startswith("python ")
    assert record["commit"] == commit_of_checkout(CODE)
    assert record["date"].endswith("+00:00")
    assert {*record["versions"]} == {"hf_dflash", "torch", "transformers", "python"}
    assert record["device"] in {device_name(torch.device("cpu")), device_name(usual_device())}
    assert record["threads"] >= 1
    assert str(folder) not in json.dumps(record)


def prompt(n_tokens: int, seed: int = 0, vocab_size: int = 90) -> Tensor:
    """Random token ids (1, n_tokens)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocab_size, (1, n_tokens), generator=generator)


def decode_both(
    target: Any,
    input_ids: Tensor,
    n_right: Callable[[int], int] | None = mixed,
    *,
    block_size: int = 8,
    fresh: Callable[[], dict[str, Any]] = dict,
    **kwargs: Any,
) -> Any:
    """Decode plainly and with a scripted drafter; the ids must be equal.

    Args:
        target: The target.
        input_ids: (1, n), without padding.
        n_right: The drafter's mistakes, see `ScriptedDrafter`.
        block_size: B.
        fresh: Makes further arguments of `generate` that keep a state, for each of both calls.
        **kwargs: Of `generate`.

    Returns:
        What `generate` with the drafter returned, as a dict with statistics.
    """
    plain = target.generate(input_ids, **kwargs, **fresh())
    plain = getattr(plain, "sequences", plain)
    drafter = ScriptedDrafter(target, plain[0].tolist(), n_right, block_size)
    kwargs = {**kwargs, "return_dict_in_generate": True}
    output = target.generate(input_ids, assistant_model=drafter, **kwargs, **fresh())
    assert output.sequences.tolist() == plain.tolist()
    return output


def assert_drafts_mattered(outputs: Iterable[Any], n_prompt: int) -> None:
    """Over all outputs drafts were accepted, drafts were rejected and forwards were saved."""
    outputs = list(outputs)
    statistics = [output.statistics for output in outputs]
    n_accepted = sum(sum(s.n_accepted) for s in statistics)
    n_drafted = sum(sum(s.n_drafted) for s in statistics)
    n_tokens = sum(output.sequences.shape[1] - n_prompt for output in outputs)
    assert 0 < n_accepted < n_drafted
    assert sum(s.target_forwards for s in statistics) < n_tokens


def assert_equal_to_plain(target: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`decode_both` of one prompt, long enough that its drafts must have mattered."""
    output = decode_both(target, input_ids, *args, **kwargs)
    assert_drafts_mattered([output], input_ids.shape[1])
    return output
