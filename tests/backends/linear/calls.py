"""Random packed calls of linear attention, and their outputs and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harts.backends.base import LinearAttention, Need, RoundOutput
from harts.backends.linear.inputs import delta_inputs
from harts.backends.linear.naive import Naive
from harts.backends.linear.recurrent import Recurrent
from harts.backends.plan_tensors import PackedCall

RULES = ("kda", "gdn")
H, HV, K, V = 2, 4, 6, 5


def naive() -> Naive:
    return Naive(Naive.Config())


def recurrent() -> Recurrent:
    return Recurrent(Recurrent.Config())


def random_rows(count: int, rule: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Leaves q, k, v, g, beta of `count` rows."""
    need = Need("cpu", torch.float64, rule, 1, 4, (H, HV), (K, V), (1, 1), (8, 8))
    rows = delta_inputs(count, need, torch.Generator().manual_seed(seed))
    return {name: x.to(dtype).requires_grad_() for name, x in rows.items()}


def packed_call(chunk_size: int, cu_seqlens: Sequence[int], states: Sequence[tuple[int, int]] = ()) -> PackedCall:
    """A packed call that requests states by (sequence, offset)."""
    requested = torch.tensor(states, dtype=torch.int64).reshape(-1, 2)
    return PackedCall(chunk_size, torch.tensor(cu_seqlens), requested[:, 0].clone(), requested[:, 1].clone())


@dataclass(frozen=True)
class Call:
    rows: dict[str, Tensor]
    chunk_size: int
    cu_seqlens: list[int]
    initial_state: Tensor
    states: Sequence[tuple[int, int]]
    """(sequence, offset) of each requested state."""

    def run(self, backend: LinearAttention) -> RoundOutput:
        return backend.call(self.rows, packed_call(self.chunk_size, self.cu_seqlens, self.states), self.initial_state)

    def leaves(self) -> dict[str, Tensor]:
        return {**self.rows, "initial_state": self.initial_state}

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        leaves = self.leaves()
        return dict(
            zip(
                leaves,
                torch.autograd.grad(loss, list(leaves.values()), retain_graph=True, materialize_grads=True),
                strict=True,
            )
        )

    def with_row(self, name: str, begin: int, end: int, value: float) -> Call:
        """A copy in which some rows of an input hold another value."""
        changed = self.rows[name].detach().clone()
        changed[begin:end] = value
        return replace(self, rows={**self.rows, name: changed})


def random_call(
    lengths: Sequence[int], chunk: int, rule: str, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Call:
    """All chunk boundaries and final states are requested, some twice."""
    cu = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    draw = torch.Generator().manual_seed(seed + 1000)
    start = torch.randn(len(lengths), HV, K, V, generator=draw, dtype=torch.float64)
    wide = torch.promote_types(dtype, torch.float32)
    states = [(i, offset) for i, n in enumerate(lengths) for offset in [*range(chunk, n + 1, chunk), n]]
    return Call(random_rows(cu[-1], rule, seed, dtype), chunk, cu, start.to(wide).requires_grad_(), states[::-1])


def weighted_sum(tensors: Sequence[Tensor], seed: int = 7) -> Tensor:
    """A loss in which every number has its own random weight."""
    draw = torch.Generator().manual_seed(seed)
    weights = [torch.randn(x.shape, generator=draw, dtype=torch.float64) for x in tensors]
    return torch.stack([(x * weight).sum() for x, weight in zip(tensors, weights, strict=True)]).sum()


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative error in the Euclidean norm; of two zeros it is 0."""
    found, wanted = found.detach(), wanted.detach()
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-300))


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    assert all(x.isfinite().all() for x in found.values())
    return max(error(found[name], wanted[name]) for name in wanted)
