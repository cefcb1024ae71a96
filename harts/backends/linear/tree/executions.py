"""The schedules of the two executions, made on the host from plan tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from harts.backends.linear.tree.schedule import Schedule, Sequences, build_schedule
from harts.backends.placing import place
from harts.backends.plan_tensors import PackedCall, PlanTensors
from harts.ir.base import Int64


def fused_schedule(plan: PlanTensors, device: torch.device) -> Schedule:
    """All rounds of a plan as one execution over its compact rows."""
    cu_rows = np.asarray(plan.cu_rows, dtype=np.int64)
    own = np.diff(cu_rows)
    length = np.concatenate([each.call.cu_seqlens.diff().numpy() for each in plan.rounds])
    counts = [len(each.initial_state) for each in plan.rounds]
    source = np.concatenate([np.asarray(each.initial_state, dtype=np.int64) for each in plan.rounds])
    states, producer, after = _produced(plan, counts)
    order = np.lexsort((after, producer))
    slot = np.full(plan.num_states + 1, -1, dtype=np.int64)  # the last is that of no state, -1
    slot[states[order]] = np.arange(len(order))
    return build_schedule(
        Sequences(
            cu_rows=cu_rows,
            replay=length - own,
            replay_row=np.concatenate([each.gather.numpy()[each.replayed()] for each in plan.rounds]),
            source=slot[source],
            given=0,
            producer=producer[order],
            produced_after=after[order],
        ),
        device,
    )


def _produced(plan: PlanTensors, counts: list[int]) -> tuple[Int64, Int64, Int64]:
    """States of all rounds, the sequences that produce them, and after how many of their rows."""
    first = np.cumsum([0, *counts[:-1]])
    states = np.concatenate([np.asarray(each.states, dtype=np.int64) for each in plan.rounds])
    producer = np.concatenate(
        [each.call.state_sequence.numpy() + base for each, base in zip(plan.rounds, first, strict=True)]
    )
    after = np.concatenate([each.call.state_offset.numpy() for each in plan.rounds])
    return states, producer, after


@dataclass(frozen=True)
class CallExecution:
    """One packed call as an execution of a single round; each sequence starts from a slot of its own."""

    schedule: Schedule
    slot_of_state: Tensor
    """Slot of each requested state, int64 on the device, [P]."""


def call_execution(packed: PackedCall, device: torch.device) -> CallExecution:
    """The schedule of one packed call. Requests for one and the same state share its slot."""
    cu_rows = packed.cu_seqlens.numpy()
    count = len(cu_rows) - 1
    producer, after = packed.state_sequence.numpy(), packed.state_offset.numpy()
    wanted, inverse = np.unique(np.stack([producer, after], axis=1), axis=0, return_inverse=True)
    moved = wanted[:, 1] > 0  # a state after no rows is the one that the sequence starts from
    slot = np.where(moved, count + np.cumsum(moved) - 1, wanted[:, 0])
    none = np.zeros(0, dtype=np.int64)
    schedule = build_schedule(
        Sequences(
            cu_rows=cu_rows,
            replay=np.zeros(count, dtype=np.int64),
            replay_row=none,
            source=np.arange(count),
            given=count,
            producer=wanted[moved, 0],
            produced_after=wanted[moved, 1],
        ),
        device,
    )
    return CallExecution(schedule, place(slot[inverse.ravel()], device))
