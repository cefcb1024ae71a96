"""One forward pass of a model over the compact rows of one microbatch, and what its layers leave behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from harts.backends.base import FullAttention, LinearAttention
from harts.backends.model.moe import RouterStatistics
from harts.backends.plan_tensors import PlanTensors

ARGUMENT = "tree_call"
"""Keyword by which the call reaches every layer: models hand keywords that they do not know on to their layers."""

CONVOLUTION = "short convolution"
"""What linear attention has beside the delta rule."""


@dataclass(eq=False)
class TreeCall:
    """Reaches the attention of each layer as an argument, so that recomputation sees the same one.

    Graphs of the pass hold it until they are gone, so nothing that holds a graph may stay in it.
    """

    plan: PlanTensors
    linear: LinearAttention
    full: FullAttention
    ran: set[tuple[int, str]] = field(default_factory=set)
    """What ran on the plan: layers, and the kind of their attention or CONVOLUTION."""
    statistics: dict[int, RouterStatistics] = field(default_factory=dict)
    """Of each layer with experts, until the forward pass ends."""
    ended: bool = False
    """Whether the forward pass has ended; what runs then is recomputation."""

    def enter(self, layer: int, kind: str) -> None:
        """Attention or the short convolution of a layer begins."""
        self.ran.add((layer, kind))

    def count(self, layer: int, found: RouterStatistics) -> None:
        """Statistics of a layer; those of recomputation are dropped."""
        if not self.ended:
            self.statistics[layer] = found

    def end(self) -> dict[int, RouterStatistics]:
        """The forward pass has ended: its statistics, which are let go of."""
        found, self.statistics, self.ended = self.statistics, {}, True
        return found


class LayerCall(NamedTuple):
    """A call in one layer, as the functions of its attention get it."""

    call: TreeCall
    layer: int
    """Its index in the model."""


class Slot:
    """Where attention of a layer leaves its call for one part that runs after it, and is given no arguments."""

    call: TreeCall | None = None
    """None after a plain call."""

    def take(self) -> TreeCall | None:
        """The call, for this run of the part alone: what runs by itself later is in none."""
        found, self.call = self.call, None
        return found
