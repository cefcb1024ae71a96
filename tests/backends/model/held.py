"""Whether what a pass has made is gone when its outputs are."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from harts.backends.base import Model
from harts.backends.plan_tensors import PlanTensors


class _Saved:
    """A tensor that a graph has saved."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # an output with its graph would hold itself


def held_after_a_pass(model: Model, plan_of: Callable[[int], PlanTensors], *, balanced: bool) -> list[str]:
    """Run two microbatches, forward and backward, and tell what is left of the first one: layers may know the last.

    Args:
        model: on the host.
        plan_of: makes the plan of a seed.
        balanced: whether the loss has the routers' balance in it.
    """
    plan, saved = _run(model, plan_of(1), balanced)
    _run(model, plan_of(2), balanced)
    gc.collect()
    assert saved
    found = ["the plan"] if plan() is not None else []
    return found + [f"a tensor {tuple(each.tensor.shape)}" for each in (ref() for ref in saved) if each is not None]


def _run(model: Model, plan: PlanTensors, balanced: bool) -> tuple[weakref.ref[PlanTensors], list[weakref.ref[_Saved]]]:
    saved: list[weakref.ref[_Saved]] = []

    def pack(tensor: Tensor) -> Any:
        made = _Saved(tensor)
        saved.append(weakref.ref(made))
        return made

    with saved_tensors_hooks(pack, lambda made: made.tensor):
        out = model.forward(plan)
        loss = out.hidden.square().sum()
        if balanced and out.router_balance is not None:
            loss = loss + out.router_balance
        loss.backward()
    return weakref.ref(plan), saved
