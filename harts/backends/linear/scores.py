"""Decayed scores inside chunks: what tokens before a token contribute to it, without any state.

Shape suffixes: M chunks times value heads, B tokens of a chunk (a power of two), K key dim, L gates of a head (K or 1).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def scores(q_MBK: Tensor, k_MBK: Tensor, gate_MBL: Tensor) -> tuple[Tensor, Tensor]:
    """A_ij = sum_k a_ik k_jk exp(sum of gate_tk over j < t <= i) for j < i, else 0, for a = q and a = k.

    Args:
        q_MBK: queries.
        k_MBK: keys.
        gate_MBL: log-decays, at most 0.

    Returns:
        Scores of q and of k, [M, B, B] each.
    """
    of_q, of_k = _DecayedScores.apply(q_MBK, k_MBK, gate_MBL)  # type: ignore[no-untyped-call]
    return of_q, of_k


def sum_up_to(gate: Tensor) -> Tensor:
    """Sum of the gates up to each token, itself included; tokens are the last dimension but one."""
    return gate.cumsum(-2)


def sum_after(gate: Tensor) -> Tensor:
    """Sum of the gates after each token; tokens are the last dimension but one."""
    return torch.cat([gate[..., 1:, :], torch.zeros_like(gate[..., :1, :])], -2).flip(-2).cumsum(-2).flip(-2)


class _DecayedScores(torch.autograd.Function):
    """The pairwise decays [M, B, B, K] are never formed.

    A chunk is halved again and again. Between the halves of a block the decay from j to i is that from j to the end of
    the first half times that from there to i: two factors of at most 1, and the square below the diagonal is one
    product of matrices. Sums start at each half, so that no digit is lost to gates outside of (j, i], nor gradient
    noise gained from them. The diagonal does not depend on the gates and is left out. Backward forms the factors
    again: q, k and the gates are all that is kept.
    """

    @staticmethod
    def forward(ctx: Any, q_MBK: Tensor, k_MBK: Tensor, gate_MBL: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q_MBK, k_MBK, gate_MBL)
        count, size, _ = k_MBK.shape
        of_q, of_k = k_MBK.new_zeros(2, count, size, size)
        for half, late, early in _levels(gate_MBL):
            (_, q), (k_early, k_late) = _halves(q_MBK, half), _halves(k_MBK, half)
            right = (k_early * early).mT
            _square(of_q, half).copy_((q * late) @ right)
            _square(of_k, half).copy_((k_late * late) @ right)
        return of_q, of_k

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_MBK, k_MBK, gate_MBL = ctx.saved_tensors
        dq_MBK, dk_MBK, dgate_MBL = (torch.zeros_like(x) for x in (q_MBK, k_MBK, gate_MBL))
        for half, late, early in _levels(gate_MBL):
            (_, q), (k_early, k_late) = _halves(q_MBK, half), _halves(k_MBK, half)
            dof_q, dof_k = (_square(x, half).contiguous() for x in grads)
            right = k_early * early
            dq, dk_late = dof_q @ right * late, dof_k @ right * late
            dk_early = (dof_q.mT @ (q * late) + dof_k.mT @ (k_late * late)) * early
            _halves(dq_MBK, half)[1].add_(dq)
            _halves(dk_MBK, half)[0].add_(dk_early)
            _halves(dk_MBK, half)[1].add_(dk_late)
            dlate, dearly = (q * dq).add_(k_late * dk_late), k_early * dk_early
            if gate_MBL.shape[-1] == 1:
                dlate, dearly = dlate.sum(-1, keepdim=True), dearly.sum(-1, keepdim=True)
            _halves(dgate_MBL, half)[1].add_(dlate.flip(-2).cumsum(-2).flip(-2))
            _halves(dgate_MBL, half)[0][..., 1:, :].add_(dearly[..., :-1, :].cumsum(-2))
        return dq_MBK, dk_MBK, dgate_MBL


def _levels(gate_MBL: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Tokens of a half, decay of late tokens since the early half's end, decay of early tokens up to it."""
    half = gate_MBL.shape[1] // 2
    while half:
        early, late = _halves(gate_MBL, half)
        yield half, sum_up_to(late).exp(), sum_after(early).exp()
        half //= 2


def _halves(x_MBK: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Views of the early and the late half of each block, [M, blocks, half, K]."""
    blocks = x_MBK.view(len(x_MBK), -1, 2, half, x_MBK.shape[-1])
    return blocks[:, :, 0], blocks[:, :, 1]


def _square(x_MBB: Tensor, half: int) -> Tensor:
    """View of the scores of each block's late half against its early half, [M, blocks, half, half]."""
    count = x_MBB.shape[-1] // (2 * half)
    blocks = x_MBB.view(len(x_MBB), count, 2, half, count, 2, half)
    return blocks[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
