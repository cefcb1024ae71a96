"""The delta rule over all rounds of a plan as one differentiable operator.

Everything in a chunk but the state recurrence is independent of the state: it runs once for all rounds. The recurrence
is one launch as well, in which sequences wait for the states that they start from. The backward pass computes the
states again, without waiting, because every state that a sequence starts from is in the bank. The host never waits.

Shape suffixes: R compact rows, X head rows, S slots of the bank, HV value heads, K and V head dims.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.backends.linear.tree.grid import Grid, Inputs
from harts.backends.linear.tree.rule import Backward, Kept, Rule
from harts.backends.linear.tree.schedule import Schedule
from harts.backends.linear.tree.settle import settle_rows
from harts.backends.linear.tree.states import Recurrence, Walked


def tree_delta_rule(
    rule: Rule, schedule: Schedule, x: Inputs, given: Tensor, *, keep_states: bool = False
) -> tuple[Tensor, Tensor]:
    """Run a delta rule over the rows of one execution.

    Args:
        rule: chunk-parallel work.
        schedule: the execution.
        x: R rows, contiguous; q and k normalised.
        given: states from outside, float32 [given, HV, K, V].
        keep_states: keep the state before each chunk, and the errors, for the backward pass instead of walking again.

    Returns:
        Outputs [R, HV, V] in the dtype of v, zeros on rows past those of the schedule; and the bank of all states,
        float32 [S, HV, K, V]: the given ones, then the produced ones. Differentiable in the inputs and in `given`;
        gradients of the bank's states flow into the recurrence that produced them.
    """
    with torch.cuda.device_of(x.v):  # type: ignore[no-untyped-call]  # kernels are launched on the current device
        output, bank = _TreeDeltaRule.apply(rule, schedule, keep_states, *x, given)  # type: ignore[no-untyped-call]
    return output, bank


class _Side(NamedTuple):
    """One buffer of rows, its chunks, and what the forward pass keeps of it: leading arguments of a rule's work."""

    x: Inputs
    kept: Kept
    grid: Grid


class _TreeDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: Rule, schedule: Schedule, keep_states: bool, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        x, given = Inputs(*tensors[:5]), tensors[5]
        bank = given.new_empty(schedule.slots, *given.shape[1:])
        bank[: schedule.given] = given
        sides = [_Side(x, rule.keep(x, schedule.body), schedule.body)]
        if schedule.heads is not None:
            head = Inputs(*(each.index_select(0, schedule.heads.row) for each in x))
            sides.append(_Side(head, rule.keep(head, schedule.heads.grid), schedule.heads.grid))
        rows = [rule.state_rows(*side, with_q=False) for side in sides]
        walk = Recurrence(rule, schedule, rows, [side.kept.g for side in sides])
        walk.forward(bank, write=True)
        outputs = [
            rule.outputs(*side, walked.states, walked.errors) for side, walked in zip(sides, walk.walked, strict=True)
        ]
        if schedule.heads is not None:
            settle_rows(outputs[:1], outputs[1:], *schedule.heads.outputs)
        outputs[0][schedule.body.rows :] = 0.0
        ctx.rule, ctx.schedule, ctx.keep_states = rule, schedule, keep_states
        kept = [
            (*side.x, *side.kept, *(walked if keep_states else ()))
            for side, walked in zip(sides, walk.walked, strict=True)
        ]
        ctx.save_for_backward(bank, *(tensor for each in kept for tensor in each))
        return outputs[0], bank

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        rule, schedule = ctx.rule, ctx.schedule
        bank, *saved = ctx.saved_tensors
        sides, kept = _sides(schedule, saved)
        dos = _output_gradients(schedule, grads[0], sides[0].x.v)
        dbank = None if grads[1] is None else grads[1].contiguous()
        rows = [rule.state_rows(*side, with_q=True) for side in sides]
        walk = Recurrence(rule, schedule, rows, [side.kept.g for side in sides], kept if ctx.keep_states else None)
        if not ctx.keep_states:
            walk.forward(bank, write=False)
        local = [
            rule.error_gradients(*side, walked.errors, do)
            for side, walked, do in zip(sides, walk.walked, dos, strict=True)
        ]
        dstates, dsource = walk.backward(dbank, dos, [de for de, _ in local])
        found = []
        for i, side in enumerate(sides):
            back = Backward(rows[i].w, *walk.walked[i], dstates[i], dos[i], *local[i])
            # heads are summed into their rows: in float32
            found.append(rule.input_gradients(*side, back, torch.float32 if i else side.x.v.dtype))
        if schedule.heads is not None:
            settle_rows(*found, *schedule.heads.gradients)
        dgiven = dsource[: schedule.given] if dbank is None else dsource[: schedule.given] + dbank[: schedule.given]
        return None, None, None, *_to_inputs(found[0], sides[0].x, schedule.body.rows), dgiven


def _sides(schedule: Schedule, saved: list[Tensor]) -> tuple[list[_Side], list[Walked]]:
    """The buffers from what was saved, and what the forward walk left of them, if that was kept."""
    width, inputs = len(saved) // len(schedule.grids), len(Inputs._fields)
    parts = [saved[i : i + width] for i in range(0, len(saved), width)]
    kept = inputs + len(Kept._fields)
    sides = [
        _Side(Inputs(*part[:inputs]), Kept(*part[inputs:kept]), grid)
        for part, grid in zip(parts, schedule.grids, strict=True)
    ]
    return sides, [Walked(*part[kept:]) for part in parts if len(part) > kept]


def _output_gradients(schedule: Schedule, do: Tensor | None, v: Tensor) -> list[Tensor]:
    """Gradients of the outputs of each buffer; nobody sees the outputs of replay rows."""
    body = torch.zeros_like(v) if do is None else do.contiguous()
    if schedule.heads is None:
        return [body]
    return [body, body.index_select(0, schedule.heads.row).masked_fill_(schedule.heads.replayed, 0.0)]


def _to_inputs(gradients: Inputs, x: Inputs, rows: int) -> tuple[Tensor, ...]:
    """Sum the value heads of each head of q and k, zero the padding, and round to the inputs' dtypes."""
    found = []
    for gradient, each in zip(gradients, x, strict=True):
        grouped = gradient.shape != each.shape
        summed = gradient.view(*each.shape[:2], -1, each.shape[2]).sum(2) if grouped else gradient
        summed[rows:] = 0.0
        found.append(summed.to(each.dtype))
    return tuple(found)
