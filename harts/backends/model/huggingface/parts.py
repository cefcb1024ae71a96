"""Which modules of a model are attention layers, routers, and gates of shared experts."""

from __future__ import annotations

from typing import Any

from torch import nn

from harts.backends.model.huggingface.family import Family
from harts.backends.model.huggingface.functions import AttentionFunctions, delta_rule, tree_conv
from harts.backends.model.invariant import FUNCTIONS

PRODUCTS = {"F": FUNCTIONS}
"""Routers and linear modules call `F.linear`."""
EXPERTS = "experts"
"""Name of the module of a layer's routed experts."""


def is_a(part: Any, cls: str) -> bool:
    """Whether a module is of a class, or of one that a library has made from it, as parametrizations do."""
    return any(each.__name__ == cls for each in type(part).__mro__)


def all_of(part: Any, cls: str) -> list[Any]:
    """All modules of a class in a module."""
    return [each for each in part.modules() if is_a(each, cls)]


def attention_of(part: Any, family: Family) -> list[tuple[Any, dict[str, Any]]]:
    """Attention layers in a module, each with what stands for which global names of its forward."""
    names_of: dict[str, dict[str, Any]] = {
        family.full_layer: {"ALL_ATTENTION_FUNCTIONS": AttentionFunctions},
        family.linear_layer: {family.conv: tree_conv, family.delta_rule: delta_rule},
    }
    return [(each, names) for cls, names in names_of.items() for each in all_of(part, cls)]


def routers_of(module: Any, family: Family) -> list[tuple[int, Any]]:
    """Layer and router of all layers with experts, in order."""
    if family.router is None:
        return []
    return [
        (index, router)
        for index, layer in enumerate(module.model.layers)
        for router in all_of(layer, family.router.cls)
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


def around_routers(module: Any, family: Family) -> list[Any]:
    """Routers, and the parts of layers that hold one."""
    if family.router is None:
        return []
    return [
        part
        for layer in module.model.layers
        for part in layer.modules()
        if part is not layer and all_of(part, family.router.cls)
    ]


def few_outputs(layer: Any, family: Family) -> list[Any]:
    """Routers and gates of shared experts."""
    if family.router is None:
        return []
    gates = [
        part
        for name, part in layer.named_modules()
        if _last(name) == family.router.shared_gate and type(part).forward is nn.Linear.forward
    ]
    return all_of(layer, family.router.cls) + gates


def _last(name: str) -> str:
    return name.rpartition(".")[2]
