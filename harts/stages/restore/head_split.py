"""Distributions whose vocabulary is split over processes: each reads its own part, what is reduced is small.

Everything is relative to the largest logit of all processes, so that sums neither overflow nor lose digits.
Shape suffixes: g distributions of a group, V this process's vocabulary; D all distributions of a microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.special import entr

from harts.stages.restore.blocks import Group


@dataclass(frozen=True)
class Part:
    """A process's part of each distribution, by its own vocabulary alone."""

    top: Tensor
    """Largest logit, [D]; -inf without rows of the LM head."""
    log_sum: Tensor
    """Log of the sum of exp(logit - top), [D]."""

    @classmethod
    def empty(cls, like: Tensor, distributions: int) -> Part:
        """Of no vocabulary, in the dtype and on the device of a tensor."""
        return cls(like.new_full((distributions,), -torch.inf), like.new_zeros(distributions))

    def read(self, group: Group, scaled_gV: Tensor, logp_gV: Tensor) -> None:
        """Fill in one group from its logits and their log_softmax."""
        top = scaled_gV.max(dim=1)
        self.top[group.distribution] = top.values
        self.log_sum[group.distribution] = -logp_gV.gather(1, top.indices[:, None])[:, 0]


@dataclass(frozen=True)
class Whole:
    """Distributions over the whole vocabulary; equal bits on all processes but for `log_share`."""

    top: Tensor
    """Largest logit, [D]."""
    log_sum: Tensor
    """Log of the sum of exp(logit - top), [D]."""
    target: Tensor
    """Logit of each cell's target."""
    entropy: Tensor | None
    """Entropy in nats, [D]."""
    log_share: Tensor
    """Log of the probability of this process's vocabulary, [D]; -inf without rows of the LM head."""


def join_parts(part: Part, target: Tensor, entropy: Tensor | None, group: ProcessGroup) -> Whole:
    """Join the parts of all processes of a group in two collectives, however many blocks they came from.

    Args:
        part: of this process.
        target: logit of each cell's target where this process has it, else 0.
        entropy: of this process's part as a distribution of its own, [D]; None if it is not wanted.
        group: processes that have the whole vocabulary together.
    """
    top = part.top.clone()
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    log_part = (part.top - top) + part.log_sum
    mass = log_part.exp()
    pieces = [mass, target] if entropy is None else [mass, target, mass * entropy + entr(mass)]
    sums = torch.cat(pieces)
    dist.all_reduce(sums, group=group)
    total, target, *mixed = sums.split_with_sizes([len(piece) for piece in pieces])
    log_sum = total.log()
    return Whole(top, log_sum, target, mixed[0] / total + log_sum if mixed else None, log_part - log_sum)
