"""Saves less for the backward pass than a library's function asks for: what can be made again is made again there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Recipe(NamedTuple):
    """How a tensor was made."""

    made: Tensor
    source: Tensor
    """What is saved in its place."""
    make: Callable[[Tensor], Tensor]
    """Gives `made`, bit by bit, from `source`."""


@contextmanager
def made_again(*recipes: Recipe) -> Iterator[None]:
    """Where functions save tensors that were made by recipes, the sources are saved instead.

    A tensor is recognised by its memory, shape, strides and dtype; a copy of it is saved as any other tensor. All are
    saved as outside of this context: a change in place before the backward pass is an error there, and hooks that are
    set around it (activation checkpointing, offloading) get them.

    Args:
        recipes: of the tensors; nothing may write to these.
    """
    known = {_place(recipe.made): recipe for recipe in recipes}
    saved: list[_Saved] = []

    def pack(x: Tensor) -> _Saved:
        recipe = known.get(_place(x))
        saved.append(_Saved(x.detach(), None) if recipe is None else _Saved(recipe.source.detach(), recipe.make))
        return saved[-1]

    try:
        with saved_tensors_hooks(pack, _Saved.read):
            yield
        for each in saved:
            each.keep()
    finally:
        known.clear()  # graphs hold `pack`


class _Saved:
    """One tensor between the passes, or its source."""

    def __init__(self, tensor: Tensor, make: Callable[[Tensor], Tensor] | None) -> None:
        self._tensor: Tensor | None = tensor
        self._make = make
        self._kept: Any = None

    def keep(self) -> None:
        """Hand the tensor over to autograd, with the hooks that are set now."""
        with torch.enable_grad():
            anchor = torch.empty(0, device="cpu", requires_grad=True)
            self._kept = _Keep.apply(anchor, self._tensor)  # type: ignore[no-untyped-call]  # it owns its node
        self._tensor = None

    def read(self) -> Tensor:
        """The tensor; hooks allow one look in each backward pass, which is how often functions take it."""
        (tensor,) = self._kept.grad_fn.saved_tensors
        with torch.no_grad():
            made: Tensor = tensor if self._make is None else self._make(tensor)
        return made


class _Keep(torch.autograd.Function):
    """Saves one tensor, as reading takes all tensors of a node; the node is part of no graph and never runs."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return torch.empty_like(anchor)


def _place(x: Tensor) -> tuple[int, torch.dtype, torch.Size, tuple[int, ...]]:
    return x.data_ptr(), x.dtype, x.shape, x.stride()
