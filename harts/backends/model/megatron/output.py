"""Hidden states of all rows, from those of each process after the last layer."""

from __future__ import annotations

from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from harts.backends.model.megatron.call import RowSplit
from harts.backends.model.megatron.processes import Groups


def all_rows(hidden: Tensor, groups: Groups, rows: RowSplit) -> Tensor:
    """[rows of this process, hidden] to [R, hidden] on every process.

    Each process reads log-probs of its vocabulary and its rows from it; the gradients of all are summed.
    """
    if rows.pieces > 1:
        hidden = gather_from_sequence_parallel_region(hidden, group=groups.tp)
    elif groups.tp.size() > 1:
        hidden = copy_to_tensor_model_parallel_region(hidden, group=groups.tp)
    if rows.parts > 1:
        hidden = gather_from_sequence_parallel_region(hidden, group=groups.cp)
    return hidden
