"""Full attention of compact rows over compact rows: no key or value is copied, and no tile that nobody sees is read."""

from __future__ import annotations

from math import prod

from torch import Tensor
from torch.nn import functional

from harts.backends.base import AttentionCost, FullAttention, Need
from harts.backends.devices import capability
from harts.backends.full.costs import backward_flops, forward_flops
from harts.backends.full.expand import lie_in_order
from harts.backends.full.flash_attention_4 import (
    HOPPER,
    MODULE,
    FlashAttention4,
    FlashAttention4Config,
    grouped_head_faults,
    head_dim_faults,
)
from harts.backends.full.packed import import_faults, machine_faults, order_faults, shape_faults
from harts.backends.full.tree.plan import TileSizes, backward_tiles, forward_tiles, tile_sizes, tree_plan
from harts.backends.plan_tensors import AttentionViews

ROOTS = FlashAttention4(FlashAttention4Config())
"""Attends where no branch has ancestors: keys lie in order, and packed sequences need no lists."""


class Tree(FullAttention):
    """FlashAttention 4 (package `flash-attn-4`, extra `fa4`) over lists of visible tiles, forward and backward; over
    packed sequences where nothing is shared.

    In tiles that are seen in part, rows are masked by their places in the tree (equation 22). Gradients of queries, and
    of keys and values of grouped heads, are summed in any order.
    """

    expands = False

    def why_not(self, need: Need) -> list[str]:
        """Every reason why it cannot serve `need`; empty if it can."""
        found = shape_faults(need) + machine_faults(need, (9, 0))
        has = capability(need.device)
        if has is not None and has[0] != HOPPER:
            found.append(f"its tiles are those of compute capability 9.0, {need.device} has {has[0]}.{has[1]}")
        found += import_faults(MODULE, "fa4") + order_faults(self.deterministic(need))
        key_dim, value_dim = need.full_head_dims
        if tile_sizes(need.full_head_dims) is None or key_dim % 8 or value_dim % 8:
            dims = f"head dims {need.full_head_dims} (query/key, value)"
            found.append(f"{dims} are not multiples of 8 up to (192, 128), or (256, 256)")
        else:
            found += head_dim_faults(need)
        found += grouped_head_faults(need)
        return found

    def deterministic(self, need: Need) -> bool:
        """No: several tiles of keys add to the gradient of a query in any order."""
        return False

    def cost(self, views: AttentionViews, need: Need) -> AttentionCost:
        """All pairs of the tiles that hold a visible pair; nothing is expanded."""
        if lie_in_order(views):
            return ROOTS.cost(views, need)
        sizes = tile_sizes(need.full_head_dims) or TileSizes((128, 128), (128, 128))  # told of refused dims, too
        forward = len(forward_tiles(views, sizes).query) * prod(sizes.forward)
        backward = len(backward_tiles(views, sizes).query) * prod(sizes.backward)
        return AttentionCost(0, forward_flops(forward, need) + backward_flops(backward, need))

    def call(self, q: Tensor, k: Tensor, v: Tensor, views: AttentionViews, scale: float) -> Tensor:
        """Attend: see `FullAttention.attend`.

        Raises:
            ValueError: the kernels have no tiles for these head dims.
        """
        sizes = tile_sizes((q.shape[2], v.shape[2]))
        if sizes is None:
            raise ValueError(f"head dims {(q.shape[2], v.shape[2])} (query/key, value): no tiles are known")
        if lie_in_order(views):
            return ROOTS.call(q, k, v, views, scale)
        from harts.backends.full.tree.kernel import run  # noqa: PLC0415  (FlashAttention 4, where there is a GPU)

        rows = int(views.cu_q[-1])
        out = run(q[:rows], k[:rows], v[:rows], tree_plan(views, sizes), scale)
        return out if rows == views.rows else functional.pad(out, (0, 0, 0, 0, 0, views.rows - rows))
