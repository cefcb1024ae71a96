"""What the tree operator asks of a delta rule: its chunk-parallel work, on one buffer of rows at a time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from harts.backends.linear.sizes import power_of_two
from harts.backends.linear.tree.grid import Grid, Inputs
from harts.backends.linear.tree.launch import Launcher

LOG2_E = math.log2(math.e)
"""Gates are summed in log2."""


class Kept(NamedTuple):
    """What the forward pass keeps for the backward pass, beside the inputs."""

    g: Tensor
    """Gates, cumulative over their chunk, log2, float32: shape of the input g."""
    solve: Tensor
    """(I + A_kk)^-1 of each chunk, [T, HV, 64]."""
    scores: Tensor | None
    """A_qk of each chunk, [T, HV, 64]; none if the rule computes it again."""


class Rows(NamedTuple):
    """What the state recurrence reads."""

    q: Tensor
    """Queries, [T, H or HV, K]."""
    k: Tensor
    """Keys, [T, H or HV, K]; for gates a channel both are decayed already."""
    w: Tensor
    """[T, HV, K]."""
    u: Tensor
    """[T, HV, V]."""


class Backward(NamedTuple):
    """What the state recurrence leaves for the gradients of the inputs."""

    w: Tensor
    """What the recurrence read, [T, HV, K]; free to be overwritten."""
    states: Tensor
    """State before each chunk, [chunks, HV, K, V]."""
    errors: Tensor
    """[T, HV, V]."""
    dstates: Tensor
    """Gradient of the state after each chunk, [chunks, HV, K, V]."""
    do: Tensor
    """[T, HV, V]."""
    de: Tensor
    """Gradient of the errors, [T, HV, V]."""
    dscores: Tensor | None
    """Gradient of the kept scores, float32, [T, HV, 64]."""


class Rule(ABC):
    """A delta rule. Outputs of rows that no chunk covers are left as allocated."""

    scalar_gate: ClassVar[bool]
    """Whether all channels of a head share one gate."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.key_dim, self.value_dim = launcher.head_dims
        self.scale = self.key_dim**-0.5

    @abstractmethod
    def keep(self, x: Inputs, grid: Grid) -> Kept:
        """Cumulative gates, scores and solved systems of all chunks."""

    @abstractmethod
    def state_rows(self, x: Inputs, kept: Kept, grid: Grid, *, with_q: bool) -> Rows:
        """What the recurrence reads; q is needed in the backward pass alone."""

    @abstractmethod
    def outputs(self, x: Inputs, kept: Kept, grid: Grid, states: Tensor, errors: Tensor) -> Tensor:
        """Outputs from the state before each chunk and the errors of its rows, [T, HV, V]."""

    @abstractmethod
    def error_gradients(
        self, x: Inputs, kept: Kept, grid: Grid, errors: Tensor, do: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Gradient of the errors through the outputs of their own chunk, and that of the kept scores."""

    @abstractmethod
    def input_gradients(self, x: Inputs, kept: Kept, grid: Grid, back: Backward, dtype: torch.dtype) -> Inputs:
        """Gradients of the inputs; those of q and k by value head, [T, HV, K].

        Those that plain calls round to the inputs' dtype come in `dtype`, all others in float32.
        """

    def shared(self, x: Inputs, grid: Grid, *names: str) -> dict[str, Any]:
        """Arguments that nearly all kernels take, and the inputs that are named."""
        return {name: getattr(x, name) for name in names} | {
            "cu_seqlens": grid.cu_seqlens,
            "T": grid.rows,
            "H": x.k.shape[1],
            "HV": x.v.shape[1],
            "K": self.key_dim,
            "IS_VARLEN": True,
        }

    @staticmethod
    def block(size: int, most: int) -> int:
        """Block of channels: a power of two from 16 to `most` that covers `size` if it can."""
        return min(max(power_of_two(size), 16), most)
