"""A step's microbatches in the order of Megatron's schedule: one forward, one backward, stage after stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from harts.backends.gradients import Pass
from harts.backends.model.megatron.run import routers_of


def run_schedule(model: Any, count: int, passes: Iterator[Pass]) -> None:
    """Forward and backward of all microbatches, then the sum of gradients over processes, in `main_grad`.

    Args:
        model: `DistributedDataParallel` of Megatron around this process's module.
        count: microbatches.
        passes: of them.
    """
    model.zero_grad_buffer()
    model.zero_grad(set_to_none=True)  # Megatron's optimizers leave gradients there, which would be added again
    get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=passes,
        model=[model],
        num_microbatches=count,
        seq_length=1,  # stages tell each other how many rows come
        micro_batch_size=1,
        forward_only=False,
    )
    for _ in passes:
        raise AssertionError("Megatron's schedule left a microbatch out")
    for router in routers_of(model.module).values():
        if router.enable_expert_bias:
            router.local_tokens_per_expert.zero_()  # or finalising would move the biases
    finalize_model_grads([model])


def _forward_step(passes: Iterator[Pass], model: Any) -> tuple[Tensor, Any]:
    each = next(passes)
    outputs = each.forward()
    hidden = _with_loss(outputs.hidden, each.router_loss(outputs))

    def loss(_: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        share = each.loss(replace(outputs, hidden=hidden))
        return share, torch.zeros((), dtype=torch.int, device=share.device), {}

    return hidden, loss


def _with_loss(hidden: Tensor, loss: Tensor | float) -> Tensor:
    """Hidden states whose backward pass also is that of a loss of this process alone."""
    if not isinstance(loss, Tensor):
        return hidden
    attached: Tensor = _WithLoss.apply(hidden, loss)  # type: ignore[no-untyped-call]
    return attached


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor) -> Tensor:
        ctx.of_loss = torch.ones_like(loss)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], ctx.of_loss
