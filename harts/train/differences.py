"""How far the results of one step are from those of the same step computed another way."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from harts.ir.base import Float64
from harts.train.totals import StepResult


@dataclass(frozen=True)
class Differences:
    """One step's results against another's."""

    logprobs: float
    """Largest absolute difference, nats."""
    logprobs_relative: float
    """The same over the largest log-prob."""
    entropy: float | None
    """Largest absolute difference, nats; None if it is not restored."""
    loss: float
    """Absolute difference over max(1, |loss|)."""
    router: float | None
    """Largest relative difference of a router loss; None without MoE."""
    gradients: dict[str, float]
    """|a - b| / |b| of each parameter's gradient, Euclidean norms."""
    moved: tuple[int, int] | None
    """Assignments to experts that went elsewhere, out of how many; None without MoE."""

    @property
    def equal_load(self) -> bool | None:
        """Whether every expert has the same load; None without MoE."""
        return None if self.moved is None else self.moved[0] == 0

    @property
    def worst_gradient(self) -> tuple[str, float]:
        """Name and relative error of the parameter whose gradient is farthest off; a NaN is farthest."""
        return max(self.gradients.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])

    def faults(self, tolerance: float) -> list[str]:
        """Everything that is farther off than allowed, a NaN included, one sentence each."""
        name, gradient = self.worst_gradient
        measured = {
            "log-probs differ by": self.logprobs,
            "entropies differ by": self.entropy,
            "losses differ by": self.loss,
            "router losses differ by a relative": self.router,
            f"the gradient of {name} differs by a relative": gradient,
        }
        far = {what: value for what, value in measured.items() if value is not None and not value <= tolerance}
        found = [f"{what} {value:.2e}, allowed is {tolerance:.0e}" for what, value in far.items()]
        if self.moved is not None and self.moved[0]:
            found.append(
                f"expert loads differ: {self.moved[0]} of {self.moved[1]} assignments moved "
                "(rounding can decide between nearly equal experts: if it is only that, float64 agrees)"
            )
        return found


def differences(ours: StepResult, theirs: StepResult, gradients: dict[str, float]) -> Differences:
    """Measure one step; `gradients` are those of `gradient_errors`."""
    logprobs = _largest_difference(ours.logprobs, theirs.logprobs)
    entropy = None
    if ours.entropy is not None and theirs.entropy is not None:
        entropy = _largest_difference(ours.entropy, theirs.entropy)
    router = None
    if ours.router_z is not None and theirs.router_z is not None:
        pairs = ((ours.router_z, theirs.router_z), (ours.router_balance, theirs.router_balance))
        router = max(relative(abs((a or 0.0) - (b or 0.0)), abs(b or 0.0)) for a, b in pairs)
    moved = None
    if ours.expert_load is not None and theirs.expert_load is not None:
        apart = (ours.expert_load - theirs.expert_load).abs().sum()
        moved = math.ceil(float(apart) / 2), round(float(theirs.expert_load.sum()))
    return Differences(
        logprobs=logprobs,
        logprobs_relative=relative(logprobs, float(np.nan_to_num(np.abs(theirs.logprobs)).max(initial=0.0))),
        entropy=entropy,
        loss=abs(ours.loss - theirs.loss) / max(1.0, abs(theirs.loss)),
        router=router,
        gradients=gradients,
        moved=moved,
    )


def gradient_errors(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """|a - b| / |b| of each parameter, computed in float64."""
    errors = {}
    for name, theirs_grad in theirs.items():
        a, b = ours[name].double(), theirs_grad.double()
        errors[name] = relative(float((a - b).norm()), float(b.norm()))
    return errors


def relative(difference: float, size: float) -> float:
    """Difference over size; 0 of 0 is 0."""
    if size:
        return difference / size
    return math.inf if difference else 0.0


def _largest_difference(ours: Float64, theirs: Float64) -> float:
    """NaN if only one of two values is; positions that neither side has are equal."""
    apart = np.abs(ours - theirs)
    apart[np.isnan(ours) & np.isnan(theirs)] = 0.0
    return float(apart.max(initial=0.0))
