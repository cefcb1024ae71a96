"""Gradient checkpointing of a model's layers: what `recompute` asks for, and what the caller has asked for."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from harts.backends.model.huggingface.family import Family
from harts.backends.model.huggingface.parts import routers_of
from harts.backends.model.huggingface.wide import recomputation
from harts.backends.model.moe import RouterStatistics
from harts.errors import BackendError


def enable(module: Any) -> None:
    """Checkpoint every layer, without reentrance; nothing if this has been done."""
    if not _enabled(module):
        module.activation_checkpointing_enable(recomputation(module.dtype))


def check_training(module: Any) -> None:
    """Checkpointed layers have to be in training mode: in eval mode transformers keeps what they save.

    Raises:
        BackendError: gradients are enabled, and layers are in eval mode.
    """
    layers = module.model.layers
    idle = sum(not layer.training for layer in layers)
    if idle and torch.is_grad_enabled():
        raise BackendError(
            f"model: recompute is full, but {idle} of {len(layers)} layers are in eval mode, where transformers "
            "recomputes none; call model.train()"
        )


def check_graphs(counted: dict[int, RouterStatistics], module: Any, family: Family) -> None:
    """A layer that runs without a graph, as reentrant checkpointing runs it, has router losses without gradients.

    Args:
        counted: statistics of each layer with experts.
        module: the model that they are of.
        family: what it is.

    Raises:
        BackendError: gradients are enabled, and statistics have none though the router or what is before it is trained.
    """
    router_of, trained, lost = dict(routers_of(module, family)), _trained(module.get_input_embeddings()), []
    for index, layer in enumerate(module.model.layers):
        if index in counted and not counted[index].z.requires_grad and (trained or _trained(router_of[index])):
            lost.append(str(index))
        trained = trained or _trained(layer)
    if lost and torch.is_grad_enabled():
        raise BackendError(
            f"model: router statistics of layers {', '.join(lost)} have no gradient, though what they are made from is "
            "trained; checkpoint with use_reentrant=False"
        )


def faults(module: Any, family: Family, recompute: str) -> list[str]:
    """What is wrong with the checkpointing that a model has when it is handed over."""
    layers = module.model.layers
    own = [layer for layer in layers if layer.gradient_checkpointing]
    if not own:
        return []
    if recompute == "full":
        if _enabled(module):
            return []
        has = f"it checkpoints {len(own)} of {len(layers)} layers in a way of its own"
        return [f"recompute is full, but {has}; set recompute: none, which keeps it, or disable it"]
    if module.dtype == torch.float64:
        return ["it is float64, and its own checkpointing computes layers again in float32; set recompute: full"]
    if family.router is not None and any(_reentrant(layer._gradient_checkpointing_func) for layer in own):
        return ["its checkpointing is reentrant, which drops gradients of router losses; set use_reentrant=False"]
    return []


def _trained(module: Any) -> bool:
    return any(each.requires_grad for each in module.parameters())


def _enabled(module: Any) -> bool:
    layers = module.model.layers
    functions = [layer._gradient_checkpointing_func for layer in layers if layer.gradient_checkpointing]
    asked = partial(checkpoint, **recomputation(module.dtype))
    return len(functions) == len(layers) and all(_told(function) == _told(asked) for function in functions)


def _told(function: Any) -> tuple[Any, Any]:
    """Two partial functions are equal in nothing else."""
    return getattr(function, "func", None), getattr(function, "keywords", None)


def _reentrant(function: Any) -> bool:
    """Whether it may be; it is unless it was asked not to be."""
    return not isinstance(function, partial) or bool(function.keywords.get("use_reentrant", True))
