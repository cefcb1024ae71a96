"""Exchange of rows for heads between the processes that share the rows of a microbatch (Ulysses).

Between the layers process i has the i-th part of the rows; in attention it has all rows of the i-th part of the heads.
Shape suffixes: R all rows, n processes, H heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed


def to_heads(x: Tensor, group: Any) -> Tensor:
    """[R / n, H, ...] to [R, H / n, ...]."""
    n = group.size()
    if n == 1:
        return x
    by_process = x.reshape(len(x), n, x.shape[1] // n, *x.shape[2:]).transpose(0, 1)
    return _exchanged(by_process, group).flatten(0, 1)


def to_rows(x: Tensor, group: Any) -> Tensor:
    """[R, H / n, ...] to [R / n, H, ...]."""
    n = group.size()
    if n == 1:
        return x
    by_process = _exchanged(x.reshape(n, len(x) // n, *x.shape[1:]), group)
    return by_process.transpose(0, 1).flatten(1, 2)


def _exchanged(x: Tensor, group: Any) -> Tensor:
    """Entry i of [n, ...] goes to process i, which puts what it gets from process j at j."""
    exchanged: Tensor = _Exchange.apply(x, group)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grads[0], ctx.group), None


def _all_to_all(x: Tensor, group: Any) -> Tensor:
    sent = x.contiguous()
    received = torch.empty_like(sent)  # contiguous, because `sent` is
    distributed.all_to_all_single(received, sent, group=group)
    return received
