"""Hooks of one model instance. Modules, classes and other models of the same process stay as they are."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from harts.backends.model.huggingface.call import LayerCall, Slot, TreeCall
from harts.backends.model.huggingface.family import Family, Router
from harts.backends.model.huggingface.functions import AttentionFunctions, delta_rule, tree_conv
from harts.backends.model.invariant import FUNCTIONS
from harts.backends.model.moe import Routing, statistics
from harts.backends.model.norm import widen
from harts.errors import BackendError

PRODUCTS = {"F": FUNCTIONS}
"""Routers and linear modules call `F.linear`."""
EXPERTS = "experts"
"""Name of the module of a layer's routed experts."""


class TreeForward:
    """Forward of one attention layer: that of its class, in which some global names are ours in calls with a plan."""

    def __init__(self, layer: Any, names: dict[str, Any], slot: Slot) -> None:
        self.layer, self.names, self.slot = layer, names, slot

    def __call__(self, *given: Any, tree_call: TreeCall | None = None, **others: Any) -> Any:
        """What the layer gives."""
        self.slot.call, function = tree_call, type(self.layer).forward
        if tree_call is None:
            return function(self.layer, *given, **others)
        call = LayerCall(tree_call, self.layer.layer_idx)
        return rebound(function, self.names)(self.layer, *given, **others, tree_call=call)


class InvariantForward:
    """Forward of a router or of a gate with few outputs: that of its class, with rows that no others change in calls
    with a plan."""

    def __init__(self, module: Any, slot: Slot) -> None:
        self.module, self.slot = module, slot

    def __call__(self, *given: Any, **others: Any) -> Any:
        """What the module gives."""
        function = type(self.module).forward
        return (function if self.slot.call is None else rebound(function, PRODUCTS))(self.module, *given, **others)


class CountExperts:
    """Forward hook of a router: statistics of the semantic positions in calls with a plan.

    They are computed in recomputation too, which has to save the same tensors.
    """

    def __init__(self, layer: int, router: Router, slot: Slot) -> None:
        self.layer, self.router, self.slot = layer, router, slot

    def __call__(self, _module: Any, _given: Any, output: tuple[Tensor, ...]) -> None:
        """Counts."""
        call = self.slot.call
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

    Raises:
        BackendError: a layer does not call what the family says.
    """
    for index, layer in enumerate(module.model.layers):
        fresh = [(part, names) for part, names in _attention(layer, family) if "forward" not in vars(part)]
        slot = Slot()
        for part, names in fresh:
            rebound(type(part).forward, names)  # raises
            part.forward = TreeForward(part, names, slot)
        if fresh and family.router is not None:
            for router in _of(layer, family.router.cls):
                router.register_forward_hook(CountExperts(index, family.router, slot))
            for part in _few_outputs(layer, family.router):
                rebound(type(part).forward, PRODUCTS)  # raises
                part.forward = InvariantForward(part, slot)


def own_forwards(module: Any, family: Family) -> list[str]:
    """Names of the attention layers whose instance has a forward that is not ours."""
    attention = {part for part, _ in _attention(module, family)}
    return [
        f"{name} ({type(part).__name__})"
        for name, part in module.named_modules()
        if part in attention and not isinstance(vars(part).get("forward"), TreeForward | None)
    ]


def rebound(function: Any, names: dict[str, Any]) -> FunctionType:
    """A copy of a function, without its decorators, in which some global names stand for something else.

    Raises:
        BackendError: the function does not use one of the names.
    """
    bare = inspect.unwrap(function)
    absent = sorted(set(names) - set(bare.__code__.co_names))
    if absent:
        raise BackendError(f"model: {bare.__qualname__} does not call {', '.join(absent)}; its family is not served")
    made = FunctionType(
        bare.__code__, {**bare.__globals__, **names}, bare.__name__, bare.__defaults__, bare.__closure__
    )
    made.__kwdefaults__ = bare.__kwdefaults__
    return made


def routers_of(module: Any, family: Family) -> list[tuple[int, Any]]:
    """Layer and router of all layers with experts, in order."""
    if family.router is None:
        return []
    return [
        (index, router) for index, layer in enumerate(module.model.layers) for router in _of(layer, family.router.cls)
    ]


def layers_with_experts(module: Any, family: Family) -> list[int]:
    """Layers that have routed experts, or a router."""
    if family.router is None:
        return []
    cls = family.router.cls
    return [
        index
        for index, layer in enumerate(module.model.layers)
        if any(is_a(part, cls) or _last(name) == EXPERTS for name, part in layer.named_modules())
    ]


def is_a(part: Any, cls: str) -> bool:
    """Whether a module is of a class, or of one that a library has made from it, as parametrizations do."""
    return any(each.__name__ == cls for each in type(part).__mro__)


def _attention(part: Any, family: Family) -> list[tuple[Any, dict[str, Any]]]:
    """Attention layers in a module, and what stands for what in them."""
    names_of: dict[str, dict[str, Any]] = {
        family.full_layer: {"ALL_ATTENTION_FUNCTIONS": AttentionFunctions},
        family.linear_layer: {family.conv: tree_conv, family.delta_rule: delta_rule},
    }
    return [(each, names) for cls, names in names_of.items() for each in _of(part, cls)]


def _of(layer: Any, cls: str) -> list[Any]:
    return [part for part in layer.modules() if is_a(part, cls)]


def _few_outputs(layer: Any, router: Router) -> list[Any]:
    """Routers and gates of shared experts; those with a forward of their own keep it."""
    gates = [
        part
        for name, part in layer.named_modules()
        if _last(name) == router.shared_gate and type(part).forward is nn.Linear.forward
    ]
    return [part for part in _of(layer, router.cls) + gates if "forward" not in vars(part)]


def _last(name: str) -> str:
    return name.rpartition(".")[2]
