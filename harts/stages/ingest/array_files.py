"""A step's arrays in a folder of .npy files or in one .npz: their names, and what each must be."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from harts.errors import InputError
from harts.ir.rollout_batch import TOKEN_COLUMNS, TRAJECTORY_COLUMNS
from harts.stages.ingest import values
from harts.stages.ingest.faults import Faults
from harts.stages.ingest.names import misnamed

Array = NDArray[Any]


def read_files(path: Path) -> dict[str, Array]:
    """The arrays of a step by name, each one-dimensional and of its dtype. Those of a folder are mapped, not read.

    Raises:
        InputError: the path cannot be read, or every array that is missing, misnamed, or of another rank or dtype.
    """
    faults = Faults(str(path))
    try:
        names, held = _folder(path) if path.is_dir() else _archive(path)
    except (OSError, EOFError, ValueError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    for name, meant in misnamed(names, tuple(READERS)):
        faults.add(name, f"is unknown; did you mean {meant}?")
    if "reward_known" in names:
        faults.add("reward_known", "is not read from arrays: NaN in reward says that it is unknown")
    found = {name: faults.read(held, name, reader, required=name in REQUIRED) for name, reader in READERS.items()}
    faults.raise_any()
    return {name: array for name, array in found.items() if array is not None}


def _folder(path: Path) -> tuple[list[str], Mapping[str, Array]]:
    names = sorted(file.stem for file in path.glob("*.npy"))
    return names, {name: _mapped(path / f"{name}.npy") for name in names if name in READERS}


def _mapped(path: Path) -> Array:
    try:
        return np.asarray(np.lib.format.open_memmap(path, mode="r"))  # a plain array slices faster than a memmap
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error


def _archive(path: Path) -> tuple[list[str], Mapping[str, Array]]:
    archive = np.load(path, allow_pickle=False)
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise InputError(f"{path}: is one array, must be a folder of .npy files or an .npz")
    with archive:
        return archive.files, {name: np.asarray(archive[name]) for name in archive.files if name in READERS}


def _of(*dtypes: DTypeLike) -> Callable[[Array], Array]:
    """A reader of arrays of these dtypes, of the machine's byte order; nothing is cast."""
    known = [np.dtype(dtype) for dtype in dtypes]

    def read(found: Array) -> Array:
        if found.dtype not in known:
            raise InputError(f"has dtype {found.dtype}, must be {' or '.join(map(str, known))}")
        return _flat(found)

    return read


def _kinds(kinds: str, what: str) -> Callable[[Array], Array]:
    """A reader of arrays whose dtype is of these kinds, of any width."""

    def read(found: Array) -> Array:
        if found.dtype.kind not in kinds:
            raise InputError(f"has dtype {found.dtype}, must be {what}")
        return _flat(found)

    return read


def _flat(found: Array) -> Array:
    if found.ndim != 1:
        raise InputError(f"is an array of shape {found.shape}, must have 1 dimension")
    return found


REQUIRED = ("tokens", "offset", "loss_mask")

READERS: dict[str, Callable[[Array], Array]] = {
    "tokens": _of(np.int32),
    "offset": _of(np.int64),
    "ids": _kinds("U", "text (str)"),
    "groups": _kinds("Uiu", "text (str) or an integer type"),
    **dict.fromkeys((*TRAJECTORY_COLUMNS, *TOKEN_COLUMNS), _of(np.float64)),
    "loss_mask": _of(np.bool_, np.uint8),
}


def check_sizes(held: Mapping[str, Array], faults: Faults) -> None:
    """Hold the arrays' sizes and the ends of `offset` [N+1] against each other."""
    offset, tokens = held["offset"], held["tokens"]
    if len(offset) < 2:
        raise InputError(f"{faults.place}: holds 0 trajectories, a step needs at least 1")
    if offset[0] != 0:
        faults.add("offset", f"entry 0 is {offset[0]}, must be 0")
    if offset[-1] != len(tokens):
        faults.add("offset", f"entry {len(offset) - 1} is {offset[-1]}, must be {len(tokens)}, the number of tokens")
    for field, size, each in _expected(len(offset) - 1, len(tokens)):
        if field in held and len(held[field]) != size:
            faults.add(field, f"has {len(held[field])} entries, expected {size}, one for each {each}")


def _expected(trajectories: int, tokens: int) -> Iterator[tuple[str, int, str]]:
    yield from ((field, trajectories, "trajectory") for field in ("ids", "groups", *TRAJECTORY_COLUMNS))
    yield from ((field, tokens, "token") for field in TOKEN_COLUMNS)


def check_labels(field: str, labels: list[str], faults: Faults) -> None:
    """Every label must be text that is not empty and can be written; the first that is not is a fault."""
    for i, label in enumerate(labels):
        try:
            values.label(label)
        except InputError as error:
            faults.add(field, f"entry {i} {error}")
            return
