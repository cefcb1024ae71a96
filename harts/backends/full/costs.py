"""What full attention takes, from the shape of its views alone."""

from __future__ import annotations

from harts.backends.base import Need
from harts.backends.plan_tensors import AttentionViews


def pass_flops(pairs: int, need: Need) -> int:
    """Floating-point operations of one forward and backward pass over pairs of a query and a key.

    Forward q k^T and p v; backward q k^T again, do v^T, p^T do, ds k and ds^T q: four products of the query/key dim and
    three of the value dim in every query head.
    """
    key_dim, value_dim = need.full_head_dims
    return 2 * pairs * need.full_heads[0] * (4 * key_dim + 3 * value_dim)


def expanded_bytes(views: AttentionViews, need: Need) -> int:
    """Keys and values of all branches, each with its ancestors'."""
    return int(views.cu_k[-1]) * need.full_heads[1] * sum(need.full_head_dims) * need.dtype.itemsize
