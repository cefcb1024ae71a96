"""Conformance on trees: compact rows of a forest give what each trajectory alone gives, values and gradients.

Nothing here knows what a backend computes. The other half of the suite is test_conformance_calls.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from harts.backends.plan_tensors import build_plan_tensors
from harts.ir import CompactLayout
from tests.forests import paths_of
from tests.parity.subject import Leaves, Run, Subject, emulated, run
from tests.parity.trees import Paths, forests, layout_of, paper_case, rows_by_trajectory, rows_of


def forest(chunk: int, first: int = 1) -> Paths:
    """Forks inside the second chunk, at a chunk's end, and into single tokens; the first token of all is `first`."""
    spec = [(-1, chunk + 5), (0, 2 * chunk - 5), (0, 3), (0, chunk), (1, chunk + 1), (1, 5), (1, 1)]
    return [[first, *path[1:]] for path in paths_of(spec)]


def tree_runs(subject: Subject, leaves: Leaves, layout: CompactLayout) -> list[Run]:
    """One run for each way to execute the plan; values are of all semantic positions."""
    return [run(leaves, way(leaves, layout)[rows_of(layout)]) for way in subject.executions()]


def alone(subject: Subject, leaves: Leaves, layout: CompactLayout) -> list[Tensor]:
    """Outputs of each trajectory in a call of its own, in the layout's order."""
    return [along(subject, leaves, rows) for rows in rows_of(layout).split(layout.plan.tree.columns.length.tolist())]


def together(subject: Subject, leaves: Leaves, layout: CompactLayout) -> Tensor:
    """The same in one call, as trajectory-wise training runs it: gradients of shared rows are summed in float32."""
    wide = torch.promote_types(subject.need.dtype, torch.float32)
    rows, lengths = rows_of(layout), layout.plan.tree.columns.length.tolist()
    zero = torch.zeros(len(lengths), subject.need.linear_heads[1], *subject.need.linear_head_dims, dtype=torch.float64)
    return subject.call({name: x.to(wide)[rows] for name, x in leaves.items()}, zero, lengths)[0]


def values_of(found: Run) -> tuple[Tensor, ...]:
    return (*found.values, *found.gradients.values())


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Equal but for how a product of matrices is blocked."""
    return bool(torch.allclose(ours.double(), theirs.double(), rtol=1e-5, atol=1e-6 * float(theirs.abs().max())))


def along(subject: Subject, leaves: Leaves, rows: Tensor) -> Tensor:
    """Outputs of one trajectory in a call of its own, from a zero state."""
    zero = torch.zeros(1, subject.need.linear_heads[1], *subject.need.linear_head_dims, dtype=torch.float64)
    return subject.call({name: x[rows] for name, x in leaves.items()}, zero, [len(rows)])[0]


def check_forests(subject: Subject, several: list[Paths], allowed: float = 1.1) -> None:
    ours, plain, exact = [], [], []
    for seed, paths in enumerate(several):
        layout = layout_of(paths, subject.need.chunk_size)
        leaves = subject.leaves(layout.rows, seed)
        ours.append(tree_runs(subject, leaves, layout))
        plain.append(run(leaves, together(subject, leaves, layout)))
        exact.append(run(leaves, torch.cat(alone(subject.exact(), leaves, layout))))
    for found in zip(*ours, strict=True):
        subject.check(found, plain, exact, allowed)


def test_forests_equal_their_trajectories(subject: Subject) -> None:
    chunk = subject.need.chunk_size
    check_forests(subject, forests(chunk, 2 if emulated(subject.need) else 12))


@pytest.mark.parametrize("number", ["I", "II", "III"])
def test_published_trees_equal_their_trajectories(subject: Subject, number: str) -> None:
    # three root tokens hold most of a gradient's norm: too few numbers for 10 %
    check_forests(subject, [paper_case(number, subject.need.chunk_size)], allowed=1.25)


def test_a_backend_that_promises_equal_bits_gives_equal_bits(subject: Subject) -> None:
    if not subject.backend.bitwise:
        pytest.skip("promises no equal bits")
    for paths in forests(subject.need.chunk_size, 2):
        layout = layout_of(paths, subject.need.chunk_size)
        leaves = subject.leaves(layout.rows)
        wanted = torch.cat(alone(subject, leaves, layout))
        assert all(torch.equal(each.values[0], wanted) for each in tree_runs(subject, leaves, layout))


def test_replay_rows_move_the_state_and_nothing_else(subject: Subject) -> None:
    chunk = subject.need.chunk_size
    layout = layout_of(forest(chunk), chunk)
    trajectories = rows_by_trajectory(layout)
    sequence = int(np.diff(layout.replay_offset).argmax())
    replayed = torch.tensor(layout.replay_row[slice(*layout.replay_offset[sequence : sequence + 2])].tolist())
    assert len(replayed)
    own = torch.arange(*layout.cu_rows[sequence : sequence + 2].tolist())
    leaves = subject.leaves(layout.rows)
    # outputs of the branch alone: their gradients at the replayed ancestors are those of the whole trajectory
    path = next(rows for rows in trajectories if set(own.tolist()) & set(rows.tolist()))
    mine = torch.isin(path, own)
    exact, plain = (run(leaves, along(each, leaves, path)[mine]) for each in (subject.exact(), subject))
    for way in subject.executions():
        output = way(leaves, layout)
        found = run(leaves, output[path[mine]])
        subject.check([found], [plain], [exact])
        assert all(found.gradients[name][replayed].any() for name in leaves if name != "q")
        if "q" in leaves:
            assert not found.gradients["q"][replayed].any()
            other = {**leaves, "q": leaves["q"].detach().index_fill(0, replayed, 0.5)}
            assert torch.equal(way(other, layout)[own], output[own])


def test_a_loss_on_one_tree_has_no_gradient_in_another(subject: Subject) -> None:
    chunk = subject.need.chunk_size
    first, second = forest(chunk, first=1), forest(chunk, first=2)
    layout = layout_of([*first, *second], chunk)
    rows = rows_by_trajectory(layout)
    of_first, of_second = torch.cat(rows[: len(first)]), torch.cat(rows[len(first) :])
    leaves = subject.leaves(layout.rows)
    for way in subject.executions():
        found = run(leaves, way(leaves, layout)[of_second]).gradients
        assert all(not gradient[of_first].any() for gradient in found.values())
        assert all(gradient[of_second].any() for gradient in found.values())


def test_the_order_of_trees_changes_nothing(subject: Subject) -> None:
    chunk = subject.need.chunk_size
    first, second, third = (forest(chunk, first=token) for token in (1, 2, 3))
    before, after = layout_of([*first, *second], chunk), layout_of([*third, *second], chunk)
    rows, moved = torch.cat(rows_by_trajectory(before)), torch.cat(rows_by_trajectory(after))
    assert not torch.equal(rows, moved)
    row_before = torch.empty(after.rows, dtype=torch.int64).index_put((moved,), rows)
    leaves = subject.leaves(before.rows)
    exact = run(leaves, subject.exact().mix(leaves, before)[rows])
    for way in subject.executions():
        wanted = run(leaves, way(leaves, before)[rows])
        found = run(leaves, way({name: x[row_before] for name, x in leaves.items()}, after)[moved])
        subject.check([found], [wanted], [exact])
        if subject.backend.bitwise:
            assert torch.equal(found.values[0], wanted.values[0])


def test_poison_in_padding_rows_reaches_nothing(subject: Subject) -> None:
    chunk = subject.need.chunk_size
    layout = layout_of(forest(chunk), chunk, row_multiple=layout_of(forest(chunk), chunk).rows + 3)
    assert len(layout.input_ids) > layout.rows
    leaves = subject.leaves(len(layout.input_ids))
    poisoned = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
    for x in poisoned.values():
        x.data[layout.rows :] = torch.nan
    for way in subject.executions():
        clean, found = run(leaves, way(leaves, layout)), run(poisoned, way(poisoned, layout))
        assert torch.equal(found.values[0], clean.values[0])
        assert not found.values[0][layout.rows :].any()
        for name, gradient in found.gradients.items():
            assert torch.equal(gradient, clean.gradients[name])
            assert not gradient[layout.rows :].any()


def test_a_tree_run_twice_is_equal_in_every_bit(subject: Subject) -> None:
    layout = layout_of(forest(subject.need.chunk_size), subject.need.chunk_size)
    leaves = subject.leaves(layout.rows)
    for first, second in zip(tree_runs(subject, leaves, layout), tree_runs(subject, leaves, layout), strict=True):
        assert torch.equal(first.values[0], second.values[0])
        assert all(torch.equal(first.gradients[name], second.gradients[name]) for name in leaves)


def test_layers_that_share_a_plan_do_not_share_their_inputs(subject: Subject) -> None:
    layout = layout_of(forest(subject.need.chunk_size), subject.need.chunk_size)
    wide = torch.promote_types(subject.need.dtype, torch.float32)
    plan = build_plan_tensors(layout, subject.need.device, wide)
    several = [subject.leaves(layout.rows, seed) for seed in (0, 1)]
    outputs = [subject.backend.mix(subject.inputs(leaves), plan).cpu().double() for leaves in several]
    together = [run(leaves, output) for leaves, output in zip(several, outputs, strict=True)]  # after both forwards
    for leaves, found in zip(several, together, strict=True):
        wanted = run(leaves, subject.mix(leaves, layout))
        for ours, theirs in zip(values_of(found), values_of(wanted), strict=True):
            assert same(ours, theirs)


def test_inputs_and_upstream_gradients_may_have_strides(subject: Subject) -> None:
    layout = layout_of(forest(subject.need.chunk_size), subject.need.chunk_size)
    plan = build_plan_tensors(layout, subject.need.device, torch.promote_types(subject.need.dtype, torch.float32))
    leaves = subject.leaves(layout.rows)
    upstream = torch.randn(2, *subject.mix(leaves, layout).shape, generator=torch.Generator().manual_seed(3))
    found = []
    for strided in (False, True):
        inputs = {name: x.detach().requires_grad_() for name, x in subject.inputs(leaves).items()}
        given = {name: torch.stack([x, x + 1], dim=-1)[..., 0] if strided else x for name, x in inputs.items()}
        assert not strided or not any(x.is_contiguous() for x in given.values())
        output = subject.backend.mix(given, plan)
        both = upstream.to(output).movedim(0, -1) if strided else upstream.to(output)
        gradient = both[..., 0] if strided else both[0]
        found.append([output, *torch.autograd.grad(output, list(inputs.values()), gradient)])
    assert all(same(plain, strided) for plain, strided in zip(*found, strict=True))


def test_outputs_are_the_same_without_gradients(subject: Subject) -> None:
    layout = layout_of(forest(subject.need.chunk_size), subject.need.chunk_size)
    leaves = subject.leaves(layout.rows)
    with torch.no_grad():
        without = subject.mix(leaves, layout)
    assert same(subject.mix(leaves, layout).detach(), without)


def test_inputs_that_do_not_fit_the_plan_are_refused(subject: Subject) -> None:
    layout = layout_of(forest(subject.need.chunk_size), subject.need.chunk_size)
    plan = build_plan_tensors(layout, subject.need.device, torch.float32)
    inputs = subject.inputs(subject.leaves(layout.rows))
    for name, x in inputs.items():
        for wrong in (
            {**inputs, name: x[:-1]},
            {**inputs, "another": x},
            {k: y for k, y in inputs.items() if k != name},
        ):
            with pytest.raises(ValueError):
                subject.backend.mix(wrong, plan)
