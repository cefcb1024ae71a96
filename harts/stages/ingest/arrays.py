"""The ingest stage `arrays`: a step that was written as numpy arrays, of any size."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from harts.errors import InputError
from harts.ir import Columns, CompactTrie, RolloutBatch
from harts.ir.base import Int32, Int64
from harts.ir.rollout_batch import TOKEN_COLUMNS, TRAJECTORY_COLUMNS
from harts.stages.base import Stage
from harts.stages.ingest import values
from harts.stages.ingest.array_files import Array, check_labels, check_sizes, read_files
from harts.stages.ingest.faults import Faults, RecordFaults
from harts.stages.ingest.row import Row, row_faults, rows_of
from harts.stages.ingest.sharing import SharingConfig, ingest


class Arrays(Stage[None, CompactTrie]):
    """Read one step's N trajectories with S tokens in all from numpy arrays, and build their trie.

    The arrays are NAME.npy files of one folder, or lie in one .npz under these names:

    - tokens, int32 [S]: ids of all trajectories, one trajectory after another
    - offset, int64 [N+1]: trajectory i is tokens[offset[i]:offset[i + 1]]; from 0 to S, each at least one token
    - loss_mask, bool or uint8 [S]: 1 on trained tokens; a trajectory's first entry has no effect
    - ids, text [N]: unique names. Absent: t0, t1, ...
    - groups, text or integers [N]: prompt groups. Absent: all trajectories are one group
    - reward, advantage, weight, temperature, float64 [N], and advantages, old_logprobs, ref_logprobs, weights,
      temperatures, float64 [S]: optional, as in records; a NaN reward says unknown

    Other names are metadata. Nothing is cast. Files of a folder are mapped: planning holds none of them in memory that
    the system cannot drop, and they must stay as they are until the step is done. An .npz is read.
    """

    class Config(SharingConfig):
        """The files, and how they become a trie."""

        path: Path
        """A folder of .npy files, or one .npz."""

    config: Config

    def run(self, value: None, /) -> CompactTrie:
        """Read the arrays.

        Raises:
            InputError: the path cannot be read; or all faults of the arrays, or else of the first faulty trajectory,
                each as `path: trajectory NAME: field FIELD: what`.
        """
        return ingest(read_arrays(self.config.path), self.config)


def read_arrays(path: Path) -> RolloutBatch:
    """The trajectories of a folder or an .npz. Errors are those of `Arrays.run`."""
    held = read_files(path)
    faults = Faults(str(path))
    check_sizes(held, faults)
    faults.raise_any()
    names = _names(held, faults)
    groups, group = _groups(held, faults)
    faults.raise_any()
    _check_ascending(str(path), names, held["offset"])
    optional = {field: held[field] for field in (*TRAJECTORY_COLUMNS, *TOKEN_COLUMNS) if field in held}
    mask = {"loss_mask": held["loss_mask"].view(np.bool_)}
    batch = RolloutBatch(str(path), held["tokens"], Columns(names, groups, held["offset"], group, **optional | mask))
    for row in rows_of(batch):
        _check_row(str(path), row)
    return batch


def _names(held: dict[str, Array], faults: Faults) -> tuple[str, ...]:
    """Unique trajectory ids, N of them."""
    if "ids" not in held:
        return tuple(f"t{i}" for i in range(len(held["offset"]) - 1))
    names: list[str] = held["ids"].tolist()
    check_labels("ids", names, faults)
    first: dict[str, int] = {}
    for i, name in enumerate(names):
        if first.setdefault(name, i) != i:
            faults.add("ids", f"entry {i} is {values.shown(name)}, which is taken by entry {first[name]}")
            break
    return tuple(names)


def _groups(held: dict[str, Array], faults: Faults) -> tuple[tuple[str, ...], Int32]:
    """Group names in the order of their first trajectory, and each trajectory's index among them, [N]."""
    if "groups" not in held:
        return ("all",), np.zeros(len(held["offset"]) - 1, dtype=np.int32)
    labels = [str(label) for label in held["groups"].tolist()]
    check_labels("groups", labels, faults)
    number: dict[str, int] = {}
    group = [number.setdefault(label, len(number)) for label in labels]
    return tuple(number), np.array(group, dtype=np.int32)


def _check_ascending(source: str, names: tuple[str, ...], offset: Int64) -> None:
    empty = np.flatnonzero(offset[1:] <= offset[:-1])
    if empty.size:
        i = empty[0]
        raise InputError(
            f"{source}: trajectory {names[i]!r}: field offset: goes from {offset[i]} to {offset[i + 1]}, a trajectory "
            f"must have at least 1 token ({empty.size} of {len(names)} have not)"
        )


def _check_row(source: str, row: Row) -> None:
    """Hold one trajectory to the rules of records."""
    faults = RecordFaults(source, row)
    if row["tokens"].min() < 0:
        faults.read(row, "tokens", values.token_ids, required=True)
    written = row["loss_mask"].view(np.uint8)  # a boolean hides whether its byte is a 1 or a 2
    if written.max() > 1:
        faults.read({"loss_mask": written}, "loss_mask", values.mask, required=True)
    faults.raise_any()
    for field, what in row_faults(row):
        faults.add(field, what)
    faults.raise_any()
