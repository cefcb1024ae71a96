"""Grow the columns of a batch trajectory by trajectory, as typed arrays: no token is ever a Python object for long."""

from __future__ import annotations

from array import array

import numpy as np

from harts.ir import Columns, RolloutBatch
from harts.ir.rollout_batch import TOKEN_COLUMNS, TRAJECTORY_COLUMNS
from harts.ir.runs import offsets
from harts.stages.ingest.faults import RecordFaults
from harts.stages.ingest.row import Row

OPTIONAL = tuple(field for field in (*TRAJECTORY_COLUMNS, *TOKEN_COLUMNS) if field != "loss_mask")


class GrowingColumns:
    """The rows so far. The first row says which optional columns there are."""

    def __init__(self) -> None:
        self.place: dict[str, str] = {}
        """Where each trajectory came from, by its id, in order."""
        self._length: array[int] = array("q")
        self._groups: dict[str, int] = {}
        self._group: array[int] = array("i")
        self._tokens: array[int] = array("i")
        self._mask = bytearray()
        self._floats: dict[str, array[float]] = {}

    def __len__(self) -> int:
        return len(self.place)

    def check(self, row: Row, faults: RecordFaults) -> None:
        """Note where a row disagrees with those before it."""
        name = row.get("id")
        if name in self.place:
            faults.add("id", f"is taken by {self.place[name]}")
        if not self.place:
            return
        first = next(iter(self.place))
        for field in OPTIONAL:
            if field in self._floats and field not in row:
                faults.add(field, f"is missing, the first trajectory {first!r} holds it: all must, or none")
            if field in row and field not in self._floats:
                faults.add(field, f"is given, the first trajectory {first!r} does not hold it: all must, or none")

    def add(self, row: Row, where: str) -> None:
        """Take over a row without faults."""
        if not self.place:
            self._floats = {field: array("d") for field in OPTIONAL if field in row}
        self.place[row["id"]] = where
        self._length.append(len(row["tokens"]))
        self._group.append(self._groups.setdefault(row["group"], len(self._groups)))
        self._tokens.frombytes(row["tokens"].tobytes())
        self._mask += row["loss_mask"].tobytes()
        for field, column in self._floats.items():
            if field in TOKEN_COLUMNS:
                column.frombytes(row[field].tobytes())
            else:
                column.append(row[field])

    def finish(self, source: str) -> RolloutBatch:
        """The batch, without a copy of what was grown."""
        columns = Columns(
            names=tuple(self.place),
            groups=tuple(self._groups),
            offset=offsets(np.frombuffer(self._length, dtype=np.int64)),
            group=np.frombuffer(self._group, dtype=np.int32),
            loss_mask=np.frombuffer(self._mask, dtype=np.bool_),
            **{field: np.frombuffer(column, dtype=np.float64) for field, column in self._floats.items()},
        )
        return RolloutBatch(source, np.frombuffer(self._tokens, dtype=np.int32), columns)
