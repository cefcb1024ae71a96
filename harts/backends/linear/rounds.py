"""Run a plan's rounds, one packed call each: replay rows in, boundary states across, one output a compact row out.

Shape suffixes: R compact rows (C tokens, then padding), HV value heads, K and V head dims.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from harts.backends.linear.dtypes import wide_dtype
from harts.backends.linear.replay import gather_rows
from harts.backends.placing import place
from harts.backends.plan_tensors import PlanTensors

if TYPE_CHECKING:  # the class runs its rounds with this module
    from harts.backends.base import LinearAttention


def run_rounds(backend: LinearAttention, inputs: dict[str, Tensor], plan: PlanTensors) -> Tensor:
    """Run linear attention over the compact rows of one microbatch.

    Replay rows are gathered from their ancestors and only move the state: their outputs are dropped, and gradients of
    their k, v and gates flow to the ancestors' rows. Padding rows are never read.

    Args:
        backend: makes each round's packed call.
        inputs: one tensor [R, ...] for each of `backend.token_inputs`; k [R, H, K] and v [R, HV, V] are among them.
        plan: the microbatch.

    Returns:
        [R, HV, V] in the dtype that the backend returns; zeros on padding rows.

    Raises:
        ValueError: an input is missing, unknown, or has another number of rows than the plan.
    """
    check_inputs(backend, inputs, plan)
    key_dim, (value_heads, value_dim) = inputs["k"].shape[-1], inputs["v"].shape[1:]
    sizes = [len(each.gather) for each in plan.rounds]
    packed = {name: gather_rows(x, plan).split_with_sizes(sizes) for name, x in inputs.items()}
    zero = inputs["v"].new_zeros(value_heads, key_dim, value_dim, dtype=wide_dtype(*inputs.values()))
    bank: dict[int, Tensor] = {-1: zero}
    own = plan.once("own", lambda: [place(each.own, plan.device) for each in plan.rounds])
    outputs = []
    for index, each in enumerate(plan.rounds):
        output, states = backend.call(
            {name: x[index] for name, x in packed.items()},
            each.call,
            torch.stack([bank[state] for state in each.initial_state]),
        )
        bank.update(zip(each.states, states.unbind(0), strict=True))
        outputs.append(output.index_select(0, own[index]))
    # rounds own consecutive runs of rows (round-major order), so that what is left is the padding
    padding = outputs[0].new_zeros(len(plan.input_ids) - plan.rows, value_heads, value_dim)
    return torch.cat([*outputs, padding])


def check_inputs(backend: LinearAttention, inputs: dict[str, Tensor], plan: PlanTensors) -> None:
    """Check the arguments of `LinearAttention.mix`.

    Raises:
        ValueError: an input is missing, unknown, or has another number of rows than the plan.
    """
    if set(inputs) != set(backend.token_inputs):
        raise ValueError(f"inputs: got {', '.join(sorted(inputs))}; needed are {', '.join(backend.token_inputs)}")
    for name, x in inputs.items():
        if len(x) != len(plan.input_ids):
            raise ValueError(f"{name}: has {len(x)} rows, the plan has {len(plan.input_ids)}")
