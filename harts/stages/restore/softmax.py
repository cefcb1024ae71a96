"""One group of distributions over this process's rows of the LM head: what is read of it, and its gradient.

Shape suffixes: b rows of a block, g distributions of the group, V this process's vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from harts.stages.restore.blocks import Group


class Wanted(NamedTuple):
    """Gradients of what was read, and what is needed of the distributions for that of their logits."""

    by_cell: Tensor
    """Gradient of each cell's log-prob."""
    total: Tensor
    """Sum of them over the cells of each distribution."""
    spread: Tensor | None
    """Gradient of each distribution's entropy; None if none has one."""
    entropy: Tensor | None
    """Entropy of each distribution; given if `spread` is."""
    log_share: Tensor | None
    """Log of the part of each distribution that is on this process's vocabulary; None is all of it."""


def scaled_logits(logits_bV: Tensor, group: Group) -> Tensor:
    """Logits of a group's distributions, each over its temperature, [g, V]."""
    picked = logits_bV if group.local is None else logits_bV[group.local]
    return picked if group.scale is None else picked * group.scale.to(picked.dtype)


def entropy_of(logp_gV: Tensor) -> Tensor:
    """Entropy of each distribution in nats, [g]."""
    return -(logp_gV.exp() * logp_gV).sum(dim=1)


def d_logits(scaled_gV: Tensor, group: Group, wanted: Wanted) -> Tensor:
    """Gradient of one group's logits, before their temperature, [g, V].

    A log-prob gives onehot - p, an entropy H gives -p * (log p + H); each cell is a different (row, target).
    """
    logp_gV = scaled_gV.log_softmax(dim=1)
    if wanted.log_share is not None:
        logp_gV += wanted.log_share[group.distribution, None]
    p_gV = logp_gV.exp()
    d_gV = p_gV * -wanted.total[group.distribution, None]
    if wanted.spread is not None and wanted.entropy is not None:
        surprise_gV = logp_gV + wanted.entropy[group.distribution, None]
        d_gV -= wanted.spread[group.distribution, None] * p_gV * surprise_gV
    d_gV[group.slot, group.target] += wanted.by_cell[group.cell]
    return d_gV if group.scale is None else d_gV * group.scale.to(d_gV.dtype)
