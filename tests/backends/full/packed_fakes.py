"""What a library's packed kernel computes, in plain torch, and backends over it: right ones and wrong ones."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from harts.backends.base import Need
from harts.backends.full.packed import Expanding, packed_views
from harts.backends.full.tree.tiles import visible_tiles
from harts.backends.plan_tensors import AttentionViews
from harts.schema import StageConfig

SHAPES = {"mha": (4, 4, 8, 8), "gqa": (4, 2, 8, 8), "mla": (2, 2, 24, 16), "wide value": (2, 2, 8, 16)}
"""H, G, Dk, Dv."""


def need(**changes: Any) -> Need:
    fields: dict[str, Any] = {
        "device": "cpu",
        "dtype": torch.bfloat16,
        "rule": "kda",
        "chunk_size": 64,
        "conv_width": 4,
        "linear_heads": (1, 1),
        "linear_head_dims": (4, 4),
        "full_heads": (4, 2),
        "full_head_dims": (24, 16),
    }
    return Need(**(fields | changes))


def draw(rows: int, shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k and v as leaves."""
    heads, groups, key_dim, value_dim = shape
    generator = torch.Generator().manual_seed(rows)
    sizes = ((rows, heads, key_dim), (rows, groups, key_dim), (rows, groups, value_dim))
    drawn = (torch.randn(size, dtype=torch.float64, generator=generator) for size in sizes)
    return [each.to(dtype).requires_grad_() for each in drawn]


def packed_attention(  # noqa: PLR0917
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float, mask: str = "bottom right"
) -> Tensor:
    """Dense attention in each sequence; `mask` is `bottom right`, `top left` or `none`."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert int(cu_q[-1]) == len(q)
    assert int(cu_k[-1]) == len(k) == len(v)
    group = q.shape[1] // k.shape[1]
    outputs = []
    for (q_0, q_1), (k_0, k_1) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        keys, values = (each[k_0:k_1].repeat_interleave(group, dim=1) for each in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q[q_0:q_1], keys) * scale
        seen = torch.ones(q_1 - q_0, k_1 - k_0, dtype=torch.bool)
        if mask != "none":
            seen = seen.tril(k_1 - k_0 - (q_1 - q_0) if mask == "bottom right" else 0)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hij,jhd->ihd", weights, values))
    return torch.cat(outputs)


class Fake(Expanding):
    """A right one, on a CPU."""

    mask = "bottom right"

    def _faults(self, need: Need) -> list[str]:
        return []

    def deterministic(self, need: Need) -> bool:
        return True

    def _run(self, q: Tensor, k: Tensor, v: Tensor, views: AttentionViews, scale: float) -> Tensor:
        packed = packed_views(views)
        return packed_attention(q, k, v, packed.cu_q, packed.cu_k, self.scale(scale), self.mask)

    def scale(self, scale: float) -> float:
        return scale


class Library(torch.autograd.Function):
    """Saves what it is given and what it gives, as libraries do."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        *tensors, ctx.scale = given
        out = packed_attention(*given)
        ctx.save_for_backward(*tensors, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, cu_q, cu_k, _ = ctx.saved_tensors
        with torch.enable_grad():
            inputs = [each.detach().requires_grad_() for each in inputs]
            out = packed_attention(*inputs, cu_q, cu_k, ctx.scale)
        return (*torch.autograd.grad(out, inputs, *grads), None, None, None)


class Saving(Fake):
    """A right one over `Library`, which knows the memory of the keys and values of its last call."""

    def _run(self, q: Tensor, k: Tensor, v: Tensor, views: AttentionViews, scale: float) -> Tensor:
        self.given = [StorageWeakRef(each.untyped_storage()) for each in (k, v)]
        packed = packed_views(views)
        out: Tensor = Library.apply(q, k, v, packed.cu_q, packed.cu_k, scale)
        return out

    def held(self) -> list[bool]:
        """Whether the keys are held by something, and the values."""
        return [not each.expired() for each in self.given]


class TopLeft(Fake):
    mask = "top left"


class Unmasked(Fake):
    mask = "none"


class OwnScale(Fake):
    """Drops the scale that it was given."""

    def scale(self, scale: float) -> float:
        return 1.0


class Dense(Fake):
    """A right one, branch by branch, whose masks and weights are there to be changed."""

    def seen(self, views: AttentionViews, branch: int) -> Tensor:
        """Which query sees which key of a branch, [queries, keys]."""
        queries, keys = (int(ends[branch + 1] - ends[branch]) for ends in (views.cu_q, views.cu_k))
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)

    def weights(self, scores: Tensor, views: AttentionViews, branch: int) -> Tensor:
        return scores.masked_fill(~self.seen(views, branch), -torch.inf).softmax(-1).nan_to_num()

    def _run(self, q: Tensor, k: Tensor, v: Tensor, views: AttentionViews, scale: float) -> Tensor:
        outputs = []
        for i in range(len(views.cu_q) - 1):
            queries, keys = slice(*views.cu_q[i : i + 2]), slice(*views.cu_k[i : i + 2])
            group = q.shape[1] // k.shape[1]
            key, value = (each[keys].repeat_interleave(group, dim=1) for each in (k, v))
            scores = torch.einsum("ihd,jhd->hij", q[queries], key) * scale
            outputs.append(torch.einsum("hij,jhd->ihd", self.weights(scores, views, i), value))
        return torch.cat(outputs)


class CountsItselfTwice(Dense):
    """Under equal scores, a row weighs twice as much for itself as others do."""

    def weights(self, scores: Tensor, views: AttentionViews, branch: int) -> Tensor:
        queries, keys = scores.shape[1:]
        own = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries).triu(keys - queries)
        return super().weights(scores + own.to(scores) * math.log(2), views, branch)


class WrongBackward(Dense):
    """Right outputs, and gradients of another mask."""

    def _run(self, q: Tensor, k: Tensor, v: Tensor, views: AttentionViews, scale: float) -> Tensor:
        packed, wrong = packed_views(views), super()._run(q, k, v, views, scale)
        return wrong + (packed_attention(q, k, v, packed.cu_q, packed.cu_k, scale) - wrong).detach()


class LosesFarDiagonal(WrongBackward):
    """A query past a tile does not see itself."""

    def seen(self, views: AttentionViews, branch: int) -> Tensor:
        seen = super().seen(views, branch)
        queries, keys = seen.shape
        for i in range(128, queries):
            seen[i, keys - queries + i] = False
        return seen


class SeesOneAhead(WrongBackward):
    """A query past a tile sees the row after it."""

    def seen(self, views: AttentionViews, branch: int) -> Tensor:
        seen = super().seen(views, branch)
        queries, keys = seen.shape
        for i in range(128, queries - 1):
            seen[i, keys - queries + i + 1] = True
        return seen


class LosesLastAncestor(WrongBackward):
    """Of more than a tile of them."""

    def seen(self, views: AttentionViews, branch: int) -> Tensor:
        seen = super().seen(views, branch)
        ancestors = seen.shape[1] - seen.shape[0]
        if ancestors >= 128:
            seen[:, ancestors - 1] = False
        return seen


class LosesFirstAncestors(WrongBackward):
    """The first tile of more than two."""

    first = 0
    """Of the queries that lose them."""

    def seen(self, views: AttentionViews, branch: int) -> Tensor:
        seen = super().seen(views, branch)
        if seen.shape[1] - seen.shape[0] >= 256:
            seen[self.first :, :128] = False
        return seen


class LosesFirstAncestorsLate(LosesFirstAncestors):
    """In queries past a tile alone."""

    first = 128


class LosesARunOfDeepPaths(WrongBackward):
    """The second run, in branches that see more than five."""

    def seen(self, views: AttentionViews, branch: int) -> Tensor:
        seen = super().seen(views, branch)
        first, end = views.run_offset[branch : branch + 2]
        if end - first > 5:
            begin = int(views.run_length[first])
            seen[:, begin : begin + int(views.run_length[first + 1])] = False
        return seen


class LosesWholeTiles(WrongBackward):
    """Tiles of compact rows that no mask touches."""

    def seen(self, views: AttentionViews, branch: int) -> Tensor:
        seen, tiles = super().seen(views, branch), visible_tiles(views, 128, 128)
        query = torch.arange(*views.cu_q[branch : branch + 2]) // 128
        key = views.key_row[slice(*views.cu_k[branch : branch + 2])] // 128
        for one, other in zip(tiles.query[tiles.full].tolist(), tiles.key[tiles.full].tolist(), strict=True):
            seen &= ~((query == one)[:, None] & (key == other))
        return seen


class Broken(Fake):
    def _run(self, q: Tensor, k: Tensor, v: Tensor, views: AttentionViews, scale: float) -> Tensor:
        raise RuntimeError("no kernel image\nis available")


class WrongHeads(Fake):
    """Query heads take turns at the key/value heads, instead of following each other."""

    def _run(self, q: Tensor, k: Tensor, v: Tensor, views: AttentionViews, scale: float) -> Tensor:
        order = torch.arange(q.shape[1]).reshape(-1, k.shape[1]).T.flatten()
        return super()._run(q[:, order], k, v, views, scale)[:, order.argsort()]


class WrongGradients(Fake):
    """Loses the gradients of the keys."""

    def _run(self, q: Tensor, k: Tensor, v: Tensor, views: AttentionViews, scale: float) -> Tensor:
        return super()._run(q, k.detach() + 0 * k, v, views, scale)


def fake(kind: type[Fake] = Fake) -> Fake:
    return kind(StageConfig())
