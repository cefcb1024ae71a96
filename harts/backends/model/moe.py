"""Mixture of experts whose statistics are those of the semantic positions (SPEC section 6, equation 20).

Shape suffixes: R compact rows, E experts, k chosen experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from harts.backends.model.config import MoeConfig, ReferenceConfig
from harts.backends.model.mlp import Experts, Mlp
from harts.backends.model.norm import widen
from harts.backends.model.parameters import Projection
from harts.errors import BackendError


class RouterStatistics(NamedTuple):
    """What one MoE layer contributes; returned, never accumulated, so that recomputation does not count twice."""

    z: Tensor
    """Sum over rows of q_c * logsumexp(logits)^2, scalar."""
    balance: Tensor
    """E * sum_e f_e * P_e, scalar."""
    load: Tensor
    """q_c-weighted assignments, without gradient, [E]."""


class Routing(NamedTuple):
    """Where each row goes."""

    chosen: Tensor
    """Expert ids, best first, [R, k]."""
    weight: Tensor
    """Combination weights, 0 where not chosen, [R, E]."""
    probability: Tensor
    """Scores normalised over all experts, [R, E]."""


def route(logits: Tensor, bias: Tensor, config: MoeConfig) -> Routing:
    """Choose the top k of score + bias; equal ones by lower expert id.

    The bias only selects: combination weights are the scores, normalised over the chosen experts.

    Args:
        logits: float32 or wider, [R, E].
        bias: [E].
        config: scoring and top_k.
    """
    scores = logits.softmax(-1) if config.scoring == "softmax" else logits.sigmoid()
    order = (scores.detach() + bias).sort(dim=-1, descending=True, stable=True).indices
    chosen = order[:, : config.top_k]
    weight = torch.zeros_like(scores).scatter(1, chosen, _normalised(scores.gather(1, chosen)))
    return Routing(chosen, weight, _normalised(scores))


def _normalised(scores: Tensor) -> Tensor:
    return scores / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)


def statistics(
    logits: Tensor, routing: Routing, multiplicity: Tensor, total: Callable[[Tensor], Tensor] = lambda counts: counts
) -> RouterStatistics:
    """Statistics of the semantic positions from the compact rows: row c stands for q_c of them (20).

    Args:
        logits: float32 or wider, [R, E].
        routing: of the same rows.
        multiplicity: q_c, 0 on padding, [R].
        total: where other processes have other rows, sums counts [E + 1] over them; what is returned is then this
            process's part of each sum.
    """
    q, experts = multiplicity.to(logits.dtype), logits.shape[1]
    hits = torch.zeros_like(logits).scatter(1, routing.chosen, 1.0)
    load = weighted(q, hits)
    counts = total(torch.cat((load, q.sum()[None])))
    fraction = counts[:-1] / (routing.chosen.shape[1] * counts[-1])
    mass = weighted(q, routing.probability) / counts[-1]
    z = (q * logits.logsumexp(-1).square()).sum()
    return RouterStatistics(z, experts * (fraction * mass).sum(), load)


def weighted(multiplicity: Tensor, values: Tensor) -> Tensor:
    """Sum over rows of q_c * values, in the dtype of values: autocast, which would round to 16 bits, changes nothing.

    Args:
        multiplicity: q_c, [R].
        values: float32 or wider, [R, E].

    Returns:
        [E].
    """
    with torch.autocast(values.device.type, enabled=False):
        return multiplicity.to(values.dtype) @ values


def check_load(expert_load: Tensor, layers: int, experts: int) -> None:
    """Check loads of the whole step, [layers with experts, E].

    Raises:
        BackendError: the shape is not that of the model's experts.
    """
    got, wanted = tuple(expert_load.shape), (layers, experts)
    if got != wanted:
        raise BackendError(f"expert_load: has shape {got}, the model's experts are {wanted}")


def move_bias(bias: Tensor, load: Tensor, rate: float) -> None:
    """Move a layer's selection bias in place: bias += rate * sign(mean load - load).

    Args:
        bias: [E].
        load: q_c-weighted assignments over the whole step, [E].
        rate: in units of a score.

    Raises:
        BackendError: the bias has less than 32 bits, in which a step of `rate` is rounded away.
    """
    if torch.finfo(bias.dtype).bits < 32:
        raise BackendError(
            f"expert_bias_rate: steps of {rate} are rounded away in a selection bias of {bias.dtype}; make the "
            "biases of routers float32 again after a cast of the model"
        )
    with torch.no_grad():
        bias += (rate * torch.sign(load.mean() - load)).to(bias.dtype)


class MoeLayer(nn.Module):
    """Router, routed experts and the shared expert. No token is dropped."""

    expert_bias: Tensor
    """Added to scores for selection alone, float32 or wider, [E]."""

    def __init__(self, config: ReferenceConfig, moe: MoeConfig) -> None:
        super().__init__()
        hidden, dtype = config.hidden_size, config.torch_dtype
        self.config = moe
        self.router = Projection(hidden, moe.experts, dtype)
        self.register_buffer("expert_bias", torch.zeros(moe.experts, dtype=config.wide_dtype))
        self.experts = Experts(hidden, moe.intermediate_size, moe.experts, dtype)
        size = moe.shared_intermediate_size
        self.shared = Mlp(hidden, size, dtype) if size else None

    def forward(self, x: Tensor, multiplicity: Tensor) -> tuple[Tensor, RouterStatistics]:
        """x [R, hidden], q_c [R] to [R, hidden] and this layer's statistics."""
        logits = functional.linear(widen(x), widen(self.router.weight))
        routing = route(logits, self.expert_bias, self.config)
        out = self.experts(x, routing.weight)
        if self.shared is not None:
            out = out + self.shared(x)
        return out, statistics(logits, routing, multiplicity)
