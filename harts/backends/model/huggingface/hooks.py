"""Hooks of one model instance. Modules, classes and other models of the same process stay as they are."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

from torch import Tensor

from harts.backends.model.huggingface.call import LayerCall, Slot, TreeCall
from harts.backends.model.huggingface.family import Family, Router
from harts.backends.model.huggingface.parts import PRODUCTS, all_of, attention_of, few_outputs, routers_of
from harts.backends.model.moe import Routing, statistics
from harts.backends.model.norm import widen
from harts.errors import BackendError


class TreeForward:
    """Forward of one attention layer: that of its class, in which some global names are ours in calls with a plan."""

    def __init__(self, layer: Any, names: dict[str, Any], slots: list[Slot]) -> None:
        self.layer, self.names, self.slots = layer, names, slots

    def __call__(self, *given: Any, tree_call: TreeCall | None = None, **others: Any) -> Any:
        """What the layer gives."""
        self.leave(tree_call)
        function = type(self.layer).forward
        if tree_call is None:
            return function(self.layer, *given, **others)
        call = LayerCall(tree_call, self.layer.layer_idx)
        return rebound(function, self.names)(self.layer, *given, **others, tree_call=call)

    def leave(self, call: TreeCall | None) -> None:
        """For all parts of the layer that run in the same call."""
        for slot in self.slots:
            slot.call = call


class InvariantForward:
    """Forward of a router or of a gate with few outputs: that of its class, with rows that no others change in calls
    with a plan."""

    def __init__(self, module: Any, slot: Slot) -> None:
        self.module, self.slot = module, slot

    def __call__(self, *given: Any, **others: Any) -> Any:
        """What the module gives."""
        function = type(self.module).forward
        return (function if self.slot.take() is None else rebound(function, PRODUCTS))(self.module, *given, **others)


class CountExperts:
    """Forward hook of a router: statistics of the semantic positions in calls with a plan.

    They are computed in recomputation too, which has to save the same tensors.
    """

    def __init__(self, layer: int, router: Router, slot: Slot) -> None:
        self.layer, self.router, self.slot = layer, router, slot

    def __call__(self, _module: Any, _given: Any, output: tuple[Tensor, ...]) -> None:
        """Counts."""
        call = self.slot.take()
        if call is None:
            return
        logits, chosen = widen(output[0]), output[-1]
        scores = logits.softmax(-1) if self.router.scoring == "softmax" else logits.sigmoid()
        probability = scores / scores.sum(-1, keepdim=True)
        call.count(self.layer, statistics(logits, Routing(chosen, scores, probability), call.plan.multiplicity))


def install(module: Any, family: Family) -> None:
    """Make a model's layers run on compact rows in calls with a plan; without one they do what they did before.

    Layers that have our hooks keep them, also those that came with a copy. Layers with a forward of their own keep it.

    Args:
        module: the causal language model.
        family: what it is.
    """
    for index, layer in enumerate(module.model.layers):
        fresh = [(part, names) for part, names in attention_of(layer, family) if "forward" not in vars(part)]
        slots: list[Slot] = []
        for part, names in fresh:
            part.forward = TreeForward(part, names, slots)
        if fresh and family.router is not None:
            for part in (each for each in few_outputs(layer, family) if "forward" not in vars(each)):
                slots.append(Slot())
                part.forward = InvariantForward(part, slots[-1])
            for router in all_of(layer, family.router.cls):
                slots.append(Slot())
                router.register_forward_hook(CountExperts(index, family.router, slots[-1]))


def count_last(module: Any, family: Family) -> None:
    """Put our hooks of routers behind those that came after them, which may choose other experts."""
    for _, router in routers_of(module, family):
        hooks = router._forward_hooks
        for number in [number for number, hook in hooks.items() if isinstance(hook, CountExperts)]:
            hooks.move_to_end(number)


def empty(module: Any, family: Family) -> None:
    """Take back the calls that a pass has left where no part has run."""
    for part, _ in attention_of(module, family):
        if isinstance(forward := vars(part).get("forward"), TreeForward):
            forward.leave(None)


def rebound(function: Any, names: dict[str, Any]) -> FunctionType:
    """A copy of a function, without its decorators, in which some global names stand for something else.

    Raises:
        BackendError: the function does not use one of the names.
    """
    if fault := not_called(function, names):
        raise BackendError(f"model: {fault}")
    bare = inspect.unwrap(function)
    made = FunctionType(
        bare.__code__, {**bare.__globals__, **names}, bare.__name__, bare.__defaults__, bare.__closure__
    )
    made.__kwdefaults__ = bare.__kwdefaults__
    return made


def not_called(function: Any, names: dict[str, Any]) -> str | None:
    """Why some global names cannot stand for something else in a function: it does not use them."""
    bare = inspect.unwrap(function)
    absent = sorted(set(names) - set(bare.__code__.co_names))
    return f"{bare.__qualname__} does not call {', '.join(absent)}; its family is not served" if absent else None
