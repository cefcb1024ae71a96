from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harts.backends.linear.scores import scores
from tests.backends.linear.calls import error


def leaves(size: int, gates: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(size)
    q, k = torch.randn(2, 3, size, 4, generator=draw, dtype=torch.float64)
    gate = -torch.rand(3, size, gates, generator=draw, dtype=torch.float64)
    return q.requires_grad_(), k.requires_grad_(), gate.requires_grad_()


def by_pairs(left: Tensor, right: Tensor, gate: Tensor) -> Tensor:
    found = torch.zeros(len(left), left.shape[1], left.shape[1], dtype=left.dtype)
    for i in range(left.shape[1]):
        for j in range(i):
            decay = gate[:, j + 1 : i + 1].sum(1).exp()
            found[:, i, j] = (left[:, i] * right[:, j] * decay).sum(-1)
    return found


@pytest.mark.parametrize("gates", [4, 1])
@pytest.mark.parametrize("size", [1, 2, 8, 16])
def test_scores_are_the_sum_over_pairs(size: int, gates: int) -> None:
    q, k, gate = leaves(size, gates)
    of_q, of_k = scores(q, k, gate)
    assert error(of_q, by_pairs(q, k, gate)) < 1e-14
    assert error(of_k, by_pairs(k, k, gate)) < 1e-14


@pytest.mark.parametrize("gates", [4, 1])
def test_hand_written_gradients(gates: int) -> None:
    assert torch.autograd.gradcheck(scores, leaves(8, gates))


@pytest.mark.parametrize("gates", [4, 1])
def test_channels_that_forget_everything_give_exact_zeros(gates: int) -> None:
    q, k, gate = leaves(8, gates)
    with torch.no_grad():
        gate.fill_(-1000.0)
    of_q, of_k = scores(q, k, gate)
    found = torch.autograd.grad(of_q.sum() + of_k.sum(), (q, k, gate))
    assert all(not x.any() for x in (of_q, of_k, *found))
