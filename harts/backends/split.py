"""How the work of one model is split over processes; in one process it is not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch.distributed import ProcessGroup


class HeadSplit(NamedTuple):
    """The LM head's rows, split over the processes of a group in the order of their token ids."""

    group: ProcessGroup
    first: int
    """Token id of this process's first row. It may have fewer rows than others, or none."""


@dataclass(frozen=True)
class Split:
    """What this process computes of a step."""

    replica: int = 0
    """Replica whose microbatches it computes."""
    replicas: int = 1
    """Replicas of the model; each computes other microbatches."""
    head: HeadSplit | None = None
    """None: it has the whole LM head."""
    positions: ProcessGroup | None = None
    """Processes that share the log-probs of a microbatch, each computes those of some rows; None: it computes all."""
    has_output: bool = True
    """Whether hidden states come out of the model here. It is false on all but the last pipeline stage."""
    leads: bool = True
    """Of the processes that have the same output, one leads: its numbers are those that count in sums."""
    row_multiple: int = 1
    """Rows of a layout have to be a multiple of it."""
