"""Read prepared rows from disk when they are asked for: a data set of any size in no memory."""

from array import array
from pathlib import Path

from .data import ChatRows, columns_of, load_rows, row_of
from .loss_mask import EncodedRow


class RowFile:
    """Rows of a ``.jsonl`` file that ``hf-dflash prepare`` wrote; a trainer's data set.

    Only where each row starts is kept, 8 bytes a row, so that every process on a node can have
    its own.

    Args:
        path: The file.
    """

    def __init__(self, path: Path):
        self.path = path
        self._starts = array("Q", [0])
        with path.open("rb") as file:
            for line in file:
                self._starts.append(self._starts[-1] + len(line))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return columns_of(self.row(index))

    def row(self, index: int) -> EncodedRow:
        """Read a row."""
        number = range(len(self))[index]
        # Opened anew: a file position would be shared with forked worker processes.
        with self.path.open("rb") as file:
            file.seek(self._starts[number])
            line = file.readline()
        return row_of(line, f"{self.path}, line {number + 1}")


def open_rows(path: Path) -> ChatRows | RowFile:
    """Open prepared rows; gzipped ones, which cannot be read from the middle, are loaded.

    Raises:
        ValueError: If there is no such file, it holds no row, or gzipped rows are not whole.
    """
    if not path.is_file():
        raise ValueError(
            f"There are no prepared rows at {path}. Make them with `hf-dflash prepare`."
        )
    rows = load_rows(path) if path.suffix == ".gz" else RowFile(path)
    if not len(rows):
        raise ValueError(f"{path} is empty. Make rows of chats with `hf-dflash prepare`.")
    return rows
