"""Floating-point operations of full attention."""

from __future__ import annotations

from harts.backends.base import Need


def pass_flops(pairs: int, need: Need) -> int:
    """Floating-point operations of a forward and backward pass over pairs of a query and a key, in all query heads."""
    return forward_flops(pairs, need) + backward_flops(pairs, need)


def forward_flops(pairs: int, need: Need) -> int:
    """Of the forward pass: q k^T and p v."""
    key_dim, value_dim = need.full_head_dims
    return 2 * pairs * need.full_heads[0] * (key_dim + value_dim)


def backward_flops(pairs: int, need: Need) -> int:
    """Of the backward pass: q k^T again, do v^T, p^T do, ds k and ds^T q."""
    key_dim, value_dim = need.full_head_dims
    return 2 * pairs * need.full_heads[0] * (3 * key_dim + 2 * value_dim)
