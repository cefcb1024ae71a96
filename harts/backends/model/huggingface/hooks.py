"""Hooks of one model instance. Modules, classes and other models of the same process stay as they are."""

from __future__ import annotations

import inspect
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from harts.backends.model.huggingface.call import Current
from harts.backends.model.huggingface.family import Family, Router
from harts.backends.model.huggingface.functions import AttentionFunctions, tree_conv, tree_delta_rule
from harts.backends.model.moe import Routing, statistics
from harts.backends.model.norm import widen
from harts.errors import BackendError

_installed: WeakKeyDictionary[Any, Current] = WeakKeyDictionary()


def install(module: Any, family: Family) -> Current:
    """Make a model's layers run on compact rows in calls with a plan; without one they do what they did before.

    The forward of each attention layer is that of its class, in which a few global names stand for our functions.
    Routers get a forward hook. A model that has them already keeps its hooks.

    Args:
        module: the causal language model.
        family: what it is.

    Returns:
        What `TreeCall.current` has to be.
    """
    if module not in _installed:
        current: Current = {}
        modeling = family.modeling
        table = {"ALL_ATTENTION_FUNCTIONS": AttentionFunctions(modeling.ALL_ATTENTION_FUNCTIONS, current)}
        for layer in module.model.layers.modules():
            if type(layer).__name__ == family.full_layer:
                layer.forward = MethodType(rebound(type(layer).forward, table), layer)
            elif type(layer).__name__ == family.linear_layer:
                index, conv, rule = layer.layer_idx, family.conv, family.delta_rule
                names = {
                    conv: tree_conv(index, _function(modeling, conv)),
                    rule: tree_delta_rule(index, _function(modeling, rule), current),
                }
                layer.forward = MethodType(rebound(type(layer).forward, names), layer)
        for index, router in routers_of(module, family):
            router.register_forward_hook(_count(index, current, family.router))
        _installed[module] = current
    return _installed[module]


def _function(modeling: Any, name: str) -> Any:
    found = getattr(modeling, name, None)
    if found is None:
        raise BackendError(f"model: {modeling.__name__} has no {name}; its family is not served")
    return found


def rebound(function: Any, names: dict[str, Any]) -> FunctionType:
    """A copy of a function, under its decorators, in which some global names stand for something else.

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
        (index, part)
        for index, layer in enumerate(module.model.layers)
        for part in layer.modules()
        if type(part).__name__ == family.router.cls
    ]


def _count(layer: int, current: Current, router: Router | None) -> Any:
    """Statistics of the semantic positions; computed in recomputation too, which has to save the same tensors."""

    def hook(module: Any, given: Any, output: tuple[Tensor, ...]) -> None:
        assert router is not None
        call = current.get(layer)
        if call is None:  # a call without a plan
            return
        logits, chosen = widen(output[0]), output[-1]
        scores = logits.softmax(-1) if router.scoring == "softmax" else logits.sigmoid()
        probability = scores / scores.sum(-1, keepdim=True)
        call.count(layer, statistics(logits, Routing(chosen, scores, probability), call.plan.multiplicity))

    return hook
