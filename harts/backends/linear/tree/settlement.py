"""Which rows get their values from gathered copies, and in what order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from harts.backends.placing import place
from harts.ir.base import Int64
from harts.ir.runs import offsets


class Settlement(NamedTuple):
    """Rows whose value is elsewhere or has to be added to; see `settle_rows_kernel`. A rows, J replays."""

    row: Tensor
    """Each row once, [A]."""
    own: Tensor
    """Head row that holds it, -1 is none, [A]."""
    offset: Tensor
    """Replays of each row, [A + 1]."""
    source: Tensor
    """Head row of each replay, rising within a row, [J]."""


def settlement(row: Int64, owned: Int64, replayed: Int64, device: torch.device) -> Settlement:
    """The settlement of head rows that are `owned` and that are `replayed`; head row x is a copy of row[x]."""
    affected, index = np.unique(np.concatenate([row[owned], row[replayed]]), return_inverse=True)
    own = np.full(len(affected), -1, dtype=np.int64)
    own[index[: len(owned)]] = owned
    target = index[len(owned) :]
    counts = np.bincount(target, minlength=len(affected))
    columns = affected, own, offsets(counts), replayed[np.argsort(target, kind="stable")]
    return Settlement(*(place(each, device) for each in columns))
