"""Why a model cannot run on compact rows, as far as it can be told before it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from harts.backends.model.huggingface.family import Family
from harts.backends.model.huggingface.functions import conv_faults
from harts.backends.model.huggingface.hooks import InvariantForward, TreeForward, not_called
from harts.backends.model.huggingface.parts import (
    PRODUCTS,
    all_of,
    around_routers,
    attention_of,
    few_outputs,
    is_a,
    layers_with_experts,
    routers_of,
)
from harts.errors import BackendError

LENGTH_DEPENDENT = {"dynamic", "longrope"}
"""Kinds of rotary embeddings whose frequencies depend on how long the sequences of a call are."""

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Of a module, in torch."""


def refusals(module: Any, family: Family) -> list[str]:
    """Every reason.

    Args:
        module: the causal language model.
        family: what it is.
    """
    settings = module.config
    found = []
    if getattr(settings, "attention_dropout", 0.0):
        found.append(f"attention_dropout is {settings.attention_dropout}; a shared row has one outcome")
    found += [
        f"rope_type {kind} depends on the longest trajectory of a call; a shared row has one rotation"
        for kind in sorted(_rope_types(settings) & LENGTH_DEPENDENT)
    ]
    found += _own_forwards(module, family) + _compiled(module, family) + _not_called(module, family)
    found += dropout_faults(module) + _convolutions(module, family) + _routers(module, family)
    found += _bypassed(module, "the model")
    return found + head_faults(module.get_output_embeddings())


def raise_faults(faults: list[str]) -> None:
    """Tell faults of a model that has been loaded.

    Raises:
        BackendError: there are some; a line each.
    """
    if faults:
        raise BackendError("\n".join(f"model: {fault}" for fault in faults))


def head_faults(head: Any) -> list[str]:
    """Why an LM head is more than its weight, which is all that is read of it."""
    found = []
    if type(head) is not nn.Linear:
        found.append(f"its LM head is a {type(head).__name__}, not a torch.nn.Linear")
    if getattr(head, "bias", None) is not None:
        found.append("its LM head has a bias")
    return found + _bypassed(head, "its LM head")


def dropout_faults(module: Any) -> list[str]:
    """Which parts drop something: adapters can, that are put into a model after it was loaded."""
    names = [f"{name} (p {part.p})" for name, part in module.named_modules() if isinstance(part, _DropoutNd) and part.p]
    return [f"dropout in {few(names)}; a shared row has one outcome"] if names else []


def _bypassed(part: Any, name: str) -> list[str]:
    """What belongs to calls of a module that is not called: its parts are."""
    found = [f"{name} has a forward of its own, which would not be called"] if "forward" in vars(part) else []
    return found + ([f"{name} has hooks, which would not be called"] if any(vars(part)[each] for each in HOOKS) else [])


def few(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")


def _own_forwards(module: Any, family: Family) -> list[str]:
    """Attention, routers and what holds routers, whose instance has a forward that is not ours."""
    asked = {part for part, _ in attention_of(module, family)} | set(around_routers(module, family))
    names = [
        f"{name} ({type(part).__name__})"
        for name, part in module.named_modules()
        if part in asked and not isinstance(vars(part).get("forward"), TreeForward | InvariantForward | None)
    ]
    return [f"modules with a forward of their own, which does not know the plan: {few(names)}"] if names else []


def _compiled(module: Any, family: Family) -> list[str]:
    hooked = {part for part, _ in _bound(module, family)}
    names = [
        f"{name} ({type(part).__name__})"
        for name, part in module.named_modules()
        if part is not module and _is_compiled(part) and hooked.intersection(part.modules())
    ]
    return [f"compiled modules, through which torch cannot trace a call with a plan: {few(names)}"] if names else []


def _is_compiled(part: Any) -> bool:
    """By its own `compile`, or because it is what `torch.compile` has made of a module."""
    return part._compiled_call_impl is not None or is_a(part, "OptimizedModule")


def _bound(module: Any, family: Family) -> list[tuple[Any, dict[str, Any]]]:
    """Modules that have hooks, and what stands for what in them."""
    layers = module.model.layers
    return attention_of(layers, family) + [(part, PRODUCTS) for part in few_outputs(layers, family)]


def _not_called(module: Any, family: Family) -> list[str]:
    faults = [not_called(type(part).forward, names) for part, names in _bound(module, family)]
    return [fault for fault in dict.fromkeys(faults) if fault is not None]


def _convolutions(module: Any, family: Family) -> list[str]:
    layers: dict[str, list[str]] = {}
    for layer in all_of(module.model.layers, family.linear_layer):
        for fault in conv_faults(layer.conv1d.bias, layer.activation):
            layers.setdefault(fault, []).append(str(layer.layer_idx))
    return [f"the short convolution of layers {few(names)} has {fault}" for fault, names in layers.items()]


def _routers(module: Any, family: Family) -> list[str]:
    if family.router is None:
        return []
    count = Counter(index for index, _ in routers_of(module, family))
    wrong = [str(index) for index in layers_with_experts(module, family) if count[index] != 1]
    return [f"layers {few(wrong)} have experts, but not one {family.router.cls}"] if wrong else []


def _rope_types(settings: Any) -> set[Any]:
    """Of all layers: there is one set of parameters, or one for each kind of layer."""
    told = getattr(settings, "rope_parameters", None) or {}
    return {each.get("rope_type") for each in (told, *told.values()) if isinstance(each, dict)}
