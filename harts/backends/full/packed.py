"""The base of backends that expand keys and values and hand packed branches to a library's kernel.

Shape suffixes: R compact rows, C of them tokens, n keys of all branches, B branches, H query heads, G key/value heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from importlib import import_module
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from harts.backends.base import AttentionCost, FullAttention, Need
from harts.backends.devices import capability
from harts.backends.full.costs import pass_flops
from harts.backends.full.expand import expand, lie_in_order
from harts.backends.full.made_again import Recipe, made_again
from harts.backends.full.shapes import head_faults, padded
from harts.backends.placing import place
from harts.backends.plan_tensors import AttentionViews
from harts.ir.runs import expand_runs

DTYPES = (torch.bfloat16, torch.float16)
TILE = 128
"""Queries and keys of a tile; the libraries' kernels choose tiles near it."""


class PackedViews(NamedTuple):
    """Packed branches as libraries take them (THD)."""

    cu_q: Tensor
    """Queries of branch i are cu_q[i]:cu_q[i + 1], int32 on the device, [B + 1]."""
    cu_k: Tensor
    """Its keys, int32 on the device, [B + 1]."""
    max_q: int
    """Most queries of a branch."""
    max_k: int
    """Most keys of a branch."""


class Heads(NamedTuple):
    """Some of the heads."""

    queries: slice
    keys: slice
    """Key/value heads that these query heads attend to."""


def packed_views(views: AttentionViews) -> PackedViews:
    """The branches of some views, made once for them.

    Raises:
        ValueError: there are more keys than libraries count.
    """
    return views.once("packed", lambda: _packed_views(views))


def _packed_views(views: AttentionViews) -> PackedViews:
    keys = int(views.cu_k[-1])
    if keys >= 2**31:
        raise ValueError(f"views: the branches have {keys} keys in all, offsets of 32 bits count {2**31 - 1}")
    cu_q, cu_k = (place(each.astype(np.int32), views.device) for each in (views.cu_q, views.cu_k))
    return PackedViews(cu_q, cu_k, int(np.diff(views.cu_q).max()), int(np.diff(views.cu_k).max()))


class Expanding(FullAttention, ABC):
    """Gathers keys and values of all branches at once, and attends to them in one packed call (equation 22).

    What is gathered lives for one pass, and is gathered again in the backward pass: between them, a layer holds compact
    rows alone. Rows past C may hold anything. Heads are split over several calls where a tensor would have more
    elements than 32 bits count: kernels are not trusted with more.
    """

    most_elements: ClassVar[int] = 2**31 - 1
    """Elements of one tensor of a call."""

    @abstractmethod
    def _run(self, q: Tensor, k: Tensor, v: Tensor, views: AttentionViews, scale: float) -> Tensor:
        """Attend in each branch, bottom-right causal.

        Args:
            q: [C, H, Dk]; the last stride is 1.
            k: [n, G, Dk], contiguous.
            v: [n, G, Dv], contiguous.
            views: the branches.
            scale: factor on the scores.

        Returns:
            [C, H, Dv].
        """

    def _query_rows(self, views: AttentionViews) -> int:
        """Rows that the library's largest tensor of queries has for one head; C unless it pads branches."""
        return int(views.cu_q[-1])

    def _head_dims(self, key_dim: int, value_dim: int) -> tuple[int, int]:
        """Head dims of query/key and of value that the library gets: channels of zeros are added."""
        return key_dim, value_dim

    @abstractmethod
    def _faults(self, need: Need) -> list[str]:
        """Every reason of this library why it cannot serve, apart from heads and dtype."""

    def why_not(self, need: Need) -> list[str]:
        """Every reason why this backend cannot serve `need`; empty if it can."""
        return shape_faults(need) + self._faults(need)

    def cost(self, views: AttentionViews, need: Need) -> AttentionCost:
        """Keys and values of the largest call, as far as they are copied; all pairs of tiles that hold a visible pair.

        With the channels that are padded. Where keys lie in order, those are copied alone whose channels are padded or
        whose heads are split over calls.
        """
        (heads, groups), dims = need.full_heads, self._head_dims(*need.full_head_dims)
        elements = self._elements(views, heads // max(1, groups), max(1, *dims))
        count = min(groups, max(1, self.most_elements // elements))
        in_order = lie_in_order(views) and count == groups
        copied = sum(dim for dim, given in zip(dims, need.full_head_dims, strict=True) if dim != given or not in_order)
        rows = views.rows if lie_in_order(views) else int(views.cu_k[-1])
        flops = pass_flops(tile_pairs(views), replace(need, full_head_dims=dims))
        return AttentionCost(rows * count * copied * need.dtype.itemsize, flops)

    def call(self, q: Tensor, k: Tensor, v: Tensor, views: AttentionViews, scale: float) -> Tensor:
        """Attend: see `FullAttention.attend`.

        Raises:
            ValueError: one key/value head has more elements than 32 bits count.
        """
        tokens = int(views.cu_q[-1])
        q = _part(q if q.stride(2) == 1 else q.contiguous(), 0, slice(0, tokens))
        parts = [
            self._attend_to(_part(q, 1, heads), k, v, views, scale, groups)
            for heads, groups in self.calls(q, k, v, views)
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return out if tokens == views.rows else functional.pad(out, (0, 0, 0, 0, 0, views.rows - tokens))

    def calls(self, q: Tensor, k: Tensor, v: Tensor, views: AttentionViews) -> list[Heads]:
        """What each of the calls for q [., H, Dk], k [., G, Dk] and v [., G, Dv] gets, in order.

        Raises:
            ValueError: one key/value head has more elements than 32 bits count.
        """
        groups = k.shape[1]
        group = q.shape[1] // groups
        step = self._groups_of_a_call(views, group, max(self._head_dims(q.shape[2], v.shape[2])))
        ends = [(begin, min(begin + step, groups)) for begin in range(0, groups, step)]
        return [Heads(slice(begin * group, end * group), slice(begin, end)) for begin, end in ends]

    def _attend_to(  # noqa: PLR0917
        self, q: Tensor, k: Tensor, v: Tensor, views: AttentionViews, scale: float, groups: slice
    ) -> Tensor:
        """One call: queries of some heads, with the key/value heads that they attend to."""
        key_dim, value_dim = self._head_dims(q.shape[2], v.shape[2])
        keys, values = _expanded(k, views, groups, key_dim), _expanded(v, views, groups, value_dim)
        with made_again(keys, values):
            out = self._run(padded(q, key_dim), keys.made, values.made, views, scale)
        return out if v.shape[2] == value_dim else out[..., : v.shape[2]]

    def _elements(self, views: AttentionViews, group: int, width: int) -> int:
        """Of the largest tensor that one key/value head with its group of query heads takes."""
        return max(self._query_rows(views) * group, int(views.cu_k[-1])) * width

    def _groups_of_a_call(self, views: AttentionViews, group: int, width: int) -> int:
        elements = self._elements(views, group, width)
        if elements > self.most_elements:
            raise ValueError(
                f"views: {views.cu_q[-1]} queries in {group} heads and {views.cu_k[-1]} keys of {width} channels are "
                f"{elements} elements of one key/value head; kernels count {self.most_elements}"
            )
        return self.most_elements // elements


def tile_pairs(views: AttentionViews) -> int:
    """Pairs of a query and a key in the tiles that a kernel computes of one head, of TILE queries and TILE keys."""
    queries, keys = np.diff(views.cu_q), np.diff(views.cu_k)
    tiles = -(-queries // TILE)
    branch = np.repeat(np.arange(len(queries)), tiles)
    end = (expand_runs(np.zeros_like(tiles), tiles) + 1) * TILE
    seen = (keys - queries)[branch] + np.minimum(queries[branch], end)
    return int((-(-seen // TILE)).sum()) * TILE**2


def _expanded(x: Tensor, views: AttentionViews, groups: slice, width: int) -> Recipe:
    """Keys or values of some heads, padded to a head dim, of all branches."""

    def make(x: Tensor) -> Tensor:
        return expand(padded(_part(x, 1, groups), width), views)

    return Recipe(make(x), x, make)


def _part(x: Tensor, dim: int, which: slice) -> Tensor:
    """Some of the heads, contiguous, or some of the rows; the tensor itself if it is all of them."""
    count = which.stop - which.start
    if count == x.shape[dim]:
        return x
    part = x.narrow(dim, which.start, count)
    return part if dim == 0 else part.contiguous()


def shape_faults(need: Need) -> list[str]:
    """Reasons in dtype, heads and head dims that hold for every packed kernel."""
    if need.dtype in DTYPES:
        return head_faults(need)
    return [f"the dtype {need.dtype} is not one of {', '.join(map(str, DTYPES))}", *head_faults(need)]


def machine_faults(need: Need, least: tuple[int, int]) -> list[str]:
    """Reasons in the device, which has to be a CUDA device of a compute capability of at least `least`."""
    has = capability(need.device)
    if has is None and torch.device(need.device).type == "cuda":
        return [f"it needs a CUDA device, torch finds no {need.device}"]
    if has is None:
        return [f"it needs a CUDA device, the device is {need.device}"]
    if has < least:
        return [f"it needs compute capability {least[0]}.{least[1]} or later, {need.device} has {has[0]}.{has[1]}"]
    return []


def order_is_asked() -> bool:
    """Whether torch is set to deterministic algorithms; where it only warns, all run as they do by default."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def order_faults(deterministic: bool) -> list[str]:
    """The reason in torch's setting, which is meant to raise where kernels have no fixed order of sums.

    Args:
        deterministic: whether they have one.
    """
    if deterministic or not order_is_asked():
        return []
    return ["torch.use_deterministic_algorithms asked for deterministic kernels, and it sums gradients in any order"]


def import_faults(module: str, extra: str) -> list[str]:
    """The reason why a package cannot be imported, and which extra of ours installs it."""
    try:
        import_module(module)
    except Exception as error:  # what is installed for another machine can raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return [f"{module} cannot be imported ({reason}); pip install 'harts[{extra}]'"]
    return []
