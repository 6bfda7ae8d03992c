"""The target's taps of a whole data set on disk, so that the target runs once and not every epoch.

Letters: S tokens a row, T taps, Ht target hidden size.
"""

from __future__ import annotations

import json
import logging
import shutil
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from .blocks import PADDING
from .collator import read_row
from .target import check_pair, decoder_layers
from .target_states import run_target

logger = logging.getLogger(__name__)

MANIFEST = "taps.json"
DTYPES = ("bfloat16", "float16", "float32", "float8")
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8": 1}
_FLOAT8_MAX = 448.0  # of e4m3
_MOST_OFF = 0.1  # float8 is off by 3 %, half precision by less
_CHECKED_TOKENS = 256  # of a row that is run again; the target may be on the host still


@dataclass(frozen=True, slots=True)
class CachedRow:
    """Where the taps of a row are."""

    shard: int
    n_tokens: int
    checksum: int  # of its token ids


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What a cache holds, written beside its shards."""

    target_layer_ids: list[int]
    target_hidden_size: int
    dtype: str
    rows: list[CachedRow]

    @property
    def n_bytes(self) -> int:
        """Of all shards."""
        return sum(row.n_tokens for row in self.rows) * self.bytes_per_token

    @property
    def bytes_per_token(self) -> int:
        """Of the taps, and in float8 of their scales."""
        n_taps = len(self.target_layer_ids)
        scales = 4 * n_taps if self.dtype == "float8" else 0
        return n_taps * self.target_hidden_size * _BYTES[self.dtype] + scales


def plan_cache(
    config: Any, rows: Any, dtype: str = "bfloat16", shard_bytes: int = 2 * 2**30
) -> CacheLayout:
    """Lay out a cache, to see its size before anything is written.

    Args:
        config: The drafter's: which layers are tapped.
        rows: With ``input_ids``.
        dtype: Of the taps: "bfloat16", "float16", "float32", or "float8" with a scale for each
            token and tap.
        shard_bytes: Most bytes of a file.

    Raises:
        ValueError: The dtype is another.
    """
    if dtype not in DTYPES:
        raise ValueError(f"`dtype` must be one of {list(DTYPES)}, got {dtype!r}.")
    layout = CacheLayout(list(config.target_layer_ids), config.target_hidden_size, dtype, [])
    shard = n_bytes = 0
    for i in range(len(rows)):
        ids = torch.as_tensor(rows[i]["input_ids"]).long()
        size = len(ids) * layout.bytes_per_token
        if n_bytes and n_bytes + size > shard_bytes:
            shard, n_bytes = shard + 1, 0
        n_bytes += size
        layout.rows.append(CachedRow(shard, len(ids), _checksum(ids)))
    return layout


def write_taps(
    target: Any,
    config: Any,
    rows: Any,
    folder: Path,
    *,
    dtype: str = "bfloat16",
    shard_bytes: int = 2 * 2**30,
    tokens_at_once: int = 16384,
) -> CacheLayout:
    """Run the target over a data set and keep its taps.

    Shards get their names when they are complete, and the cache its manifest at the end. Started
    again, it goes on after the last complete shard.

    Args:
        target: The target model.
        config: The drafter's.
        rows: With ``input_ids``, and what else `DFlashCollator` takes.
        folder: Where to.
        dtype: See `plan_cache`.
        shard_bytes: Most bytes of a file.
        tokens_at_once: Most tokens of a forward, padding included; a longer row runs alone.

    Raises:
        ValueError: The drafter is another target's, the folder holds another cache, or hidden
            states are too large for float16.
        RuntimeError: The disk is too small.
    """
    check_pair(target, config)
    layout = plan_cache(config, rows, dtype, shard_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free + sum(p.stat().st_size for p in folder.glob("taps-*"))
    n_tokens = sum(row.n_tokens for row in layout.rows)
    logger.info(
        "Taps of %d rows: %.2f GiB in %s (layers %s of %d tokens); %.2f GiB are free.",
        len(layout.rows),
        layout.n_bytes / 2**30,
        folder,
        layout.target_layer_ids,
        n_tokens,
        free / 2**30,
    )
    if layout.n_bytes > free:
        raise RuntimeError(
            f"The disk of `folder` is too small: the taps take {layout.n_bytes / 2**30:.2f} GiB, "
            f"{free / 2**30:.2f} GiB are free. Cache fewer rows, in float8, or train online."
        )
    with tqdm(total=n_tokens, desc="Taps", unit=" tokens", unit_scale=True) as bar:
        for shard in sorted({row.shard for row in layout.rows}):
            path = folder / _shard_name(shard)
            _write_shard(target.eval(), layout, rows, path, tokens_at_once, bar)
    part = folder / (MANIFEST + ".part")
    part.write_text(json.dumps(asdict(layout)), encoding="utf-8")
    part.replace(folder / MANIFEST)
    return layout


def _write_shard(
    target: Any, layout: CacheLayout, rows: Any, path: Path, tokens_at_once: int, bar: tqdm[Any]
) -> None:
    shard = int(path.stem.split("-")[1])
    members = [i for i, row in enumerate(layout.rows) if row.shard == shard]
    fingerprint = json.dumps([layout.target_layer_ids, layout.dtype, _sums(layout, members)])
    if path.exists():
        with safe_open(path, framework="pt") as file:
            if file.metadata()["fingerprint"] == fingerprint:
                got = _unpacked(file, str(members[0]), layout.dtype)
                _check_row(target, layout, rows[members[0]], got, f"{path}, row {members[0]}")
                bar.update(_n_tokens(layout, members))
                return
        raise ValueError(
            f"{path} holds taps of other rows or layers. Give `folder` an empty folder."
        )
    tensors: dict[str, Tensor] = {}
    for batch in _batches(layout, members, tokens_at_once):
        for i, taps in zip(batch, _run_rows(target, layout, rows, batch), strict=True):
            tensors |= _packed(str(i), taps, layout)
        bar.update(_n_tokens(layout, batch))
    part = path.with_suffix(".part")
    save_file(tensors, part, metadata={"fingerprint": fingerprint})
    part.replace(path)


def _n_tokens(layout: CacheLayout, members: Sequence[int]) -> int:
    return sum(layout.rows[i].n_tokens for i in members)


def _sums(layout: CacheLayout, members: Sequence[int]) -> list[int]:
    return [layout.rows[i].checksum for i in members]


def _batches(
    layout: CacheLayout, members: Sequence[int], tokens_at_once: int
) -> Iterator[list[int]]:
    """Rows to run together, of similar lengths."""
    batch: list[int] = []
    for i in sorted(members, key=lambda i: -layout.rows[i].n_tokens):
        if batch and layout.rows[batch[0]].n_tokens * (len(batch) + 1) > tokens_at_once:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _run_rows(
    target: Any, layout: CacheLayout, rows: Any, batch: Sequence[int]
) -> Iterator[Tensor]:
    """Taps (S, T * Ht) of each row, on the host."""
    columns = [read_row(rows[i]) for i in batch]
    shape = (len(batch), max(1, *(len(row["input_ids"]) for row in columns)))
    ids, documents = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    for n, row in enumerate(columns):
        ids[n, : len(row["input_ids"])] = row["input_ids"]
        documents[n, : len(row["input_ids"])] = row["document_ids"]
    taps = run_target(target, layout.target_layer_ids, ids, documents).taps
    for n, row in enumerate(columns):
        yield taps[n, : len(row["input_ids"])]


def _packed(name: str, taps: Tensor, layout: CacheLayout) -> dict[str, Tensor]:
    if layout.dtype != "float8":
        kept = taps.to(getattr(torch, layout.dtype)).contiguous()
        if layout.dtype == "float16" and bool(kept.isinf().any()):
            raise ValueError(
                f"`dtype`='float16' holds numbers up to 65504, but row {name} has hidden states of "
                f"{float(taps.abs().max()):.0f}. Take bfloat16, or float8, which is scaled."
            )
        return {name: kept}
    parts = taps.float().unflatten(-1, (len(layout.target_layer_ids), -1))  # (S, T, Ht)
    scales = parts.abs().amax(dim=-1).clamp(min=1e-12) / _FLOAT8_MAX
    small = (parts / scales[..., None]).to(torch.float8_e4m3fn)
    return {name: small.flatten(1).contiguous(), f"{name}.scale": scales.contiguous()}


def _unpacked(file: Any, name: str, dtype: str) -> Tensor:
    taps: Tensor = file.get_tensor(name)
    if dtype != "float8":
        return taps
    scales = file.get_tensor(f"{name}.scale")
    return (taps.float().unflatten(-1, (scales.shape[1], -1)) * scales[..., None]).flatten(1)


class CachedTaps(Dataset[dict[str, Any]]):
    """Rows with their taps from a cache, for `DFlashTrainer` in place of the rows alone.

    Args:
        rows: The data set that was cached.
        folder: Of the cache.
        config: The drafter's.

    Raises:
        ValueError: The cache is not complete, or of other rows or layers.
    """

    def __init__(self, rows: Any, folder: Path, config: Any) -> None:
        if not (folder / MANIFEST).is_file():
            raise ValueError(
                f"`folder` must hold a complete cache, but {folder} has no {MANIFEST}. Run "
                "`write_taps`; it goes on where it stopped."
            )
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        cached = [CachedRow(**row) for row in content.pop("rows")]
        self.layout = CacheLayout(rows=cached, **content)
        wanted = (list(config.target_layer_ids), config.target_hidden_size, len(rows))
        got = (self.layout.target_layer_ids, self.layout.target_hidden_size, len(cached))
        if wanted != got:
            raise ValueError(
                "The cache must hold the drafter's `target_layer_ids`, hidden size and rows "
                f"{wanted}, got {got}. Write it anew."
            )
        self.rows = rows
        self.folder = folder
        self._files: dict[int, Any] = {}  # opened by the process that reads

    def __len__(self) -> int:
        return len(self.rows)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}

    def __getitem__(self, index: int) -> dict[str, Any]:
        row, cached = self.rows[index], self.layout.rows[index]
        if _checksum(torch.as_tensor(row["input_ids"]).long()) != cached.checksum:
            raise ValueError(
                f"Row {index} has other `input_ids` than when its taps were cached. Write the "
                "cache anew."
            )
        if cached.shard not in self._files:
            path = self.folder / _shard_name(cached.shard)
            self._files[cached.shard] = safe_open(path, framework="pt")
        taps = _unpacked(self._files[cached.shard], str(index), self.layout.dtype)
        return {**row, "taps": taps}


def check_taps(target: Any, cached: CachedTaps) -> None:
    """Refuse a cache that another target made: the first row is run again and compared.

    Args:
        target: The target that training runs with, where it will run.
        cached: The rows with their taps.

    Raises:
        ValueError: The target's hidden states are others.
    """
    where = f"{cached.folder}, row 0"
    _check_row(target, cached.layout, cached.rows[0], cached[0]["taps"], where)


def drop_layers(target: Any) -> None:
    """Free the target's decoder layers, which training on cached taps does not run.

    Embeddings, final norm and head stay: drafter and loss use them.

    Args:
        target: A target that nothing else will run; see `check_taps` before.
    """
    first = decoder_layers(target)[0]
    for module in target.modules():
        if isinstance(module, nn.ModuleList) and len(module) and module[0] is first:
            del module[:]
            target.has_dropped_layers = True
            return


def _check_row(target: Any, layout: CacheLayout, row: Any, got: Tensor, where: str) -> None:
    columns = {name: column[:_CHECKED_TOKENS] for name, column in read_row(row).items()}
    got = got[:_CHECKED_TOKENS]
    ids, documents = columns["input_ids"][None], columns["document_ids"][None]
    states = run_target(target, layout.target_layer_ids, ids, documents)
    exact, is_real = states.taps[0].float(), columns["document_ids"] != PADDING
    # Token by token: the first one's states, far larger than the others', say little of the target.
    off = float(((got.float() - exact).norm(dim=-1) / exact.norm(dim=-1))[is_real].mean())
    if not off < _MOST_OFF:
        raise ValueError(
            f"The cache is of another target: the hidden states in {where} differ by {off:.0%} "
            "from this one's. Write it anew, or load the target that made it."
        )


def _shard_name(shard: int) -> str:
    return f"taps-{shard:05d}.safetensors"


def _checksum(ids: Tensor) -> int:
    return zlib.crc32(ids.numpy().tobytes())
