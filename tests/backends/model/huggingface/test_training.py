"""Compact training is training of transformers' own model, trajectory by trajectory: loss, every gradient, two steps.

In float64 with every cast to float32 widened, each gradient is compared by itself, however small it is. In float32 and
with the casts as they are, rounding follows the terms that a gradient sums, which are of the size of the whole
gradient wherever they cancel: 1e-2 of the norm of all gradients stands for the norm of those that are smaller, so that
1e-5 of it is about one unit in the last place of the whole.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harts.backends.model.huggingface.backend import HuggingFace
from harts.backends.model.huggingface.wide import precision
from tests.backends.model.huggingface.models import CHUNK, FAMILIES, WITH_POSITIONS, stock, tiny
from tests.backends.model.huggingface.runs import (
    agree,
    compact,
    errors,
    far,
    forest,
    gradients,
    relative,
    shifted,
    tensors,
    trajectory_wise,
)
from tests.parity.trees import Paths, layout_of

EXACT, SINGLE = 1e-10, 1e-5
CALM = {"initializer_range": 0.02}
"""As transformers draws weights: float32 keeps its digits. In float64 they are larger, and more of a layer matters."""


def _adamw(module: torch.nn.Module, eps: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3, eps=eps, weight_decay=0.0)


def _train(model: HuggingFace, theirs: Any, paths: Paths, bound: float, *, floor: float, eps: float) -> float:
    """Two steps of both, compared at each; how far the parameter moved that moved least."""
    layout, dtype = layout_of(paths, CHUNK), next(theirs.parameters()).dtype
    before = {name: each.detach().clone() for name, each in theirs.named_parameters()}
    optimizers = [_adamw(module, eps) for module in (model.module, theirs)]
    for _ in range(2):
        ours = compact(model, layout)
        ours.loss.backward()
        with precision(dtype):
            wanted = trajectory_wise(theirs, paths, model.family.module)
            wanted.loss.backward()
        agree(ours, wanted, bound)
        assert not far(errors(gradients(model.module), gradients(theirs), floor), bound)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    after, trained = dict(theirs.named_parameters()), dict(model.module.named_parameters())
    assert not far(errors(trained, after), bound)
    return min(relative(each, before[name]) for name, each in after.items())


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_steps_equal_trajectory_wise_training_in_float32(family: str, recompute: str) -> None:
    model = tiny(family, CALM, recompute=recompute)
    theirs = stock(model, "eager" if recompute == "none" else "sdpa")
    # AdamW divides by |g| + eps: a larger eps than usual, or the sign of rounding noise would move weights
    _train(model, theirs, forest(FAMILIES.index(family)), SINGLE, floor=1e-2, eps=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_gradient_in_float32_is_near_that_in_float64(family: str) -> None:
    """Each by itself; transformers' own in float32 are up to 6e-2 off where terms cancel."""
    model, paths = tiny(family, CALM), forest(FAMILIES.index(family))
    compact(model, layout_of(paths, CHUNK)).loss.backward()
    exact = tiny(family, CALM, dtype="float64")
    exact.module.load_state_dict({name: each.double() for name, each in model.module.state_dict().items()})
    theirs = stock(exact, "eager")
    with precision(torch.float64):
        trajectory_wise(theirs, paths, family).loss.backward()
    assert not far(errors(gradients(model.module), gradients(theirs)), SINGLE)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_two_steps_equal_trajectory_wise_training_in_float64(family: str, seed: int) -> None:
    model = tiny(family, dtype="float64", recompute=("none", "full")[seed % 2], seed=seed)
    moved = _train(model, stock(model, ("sdpa", "eager", "sdpa")[seed]), forest(seed), EXACT, floor=0.0, eps=1e-8)
    assert moved > 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_float64_has_no_parameter_and_no_error_of_float32(family: str) -> None:
    model = tiny(family, dtype="float64")
    assert {each.dtype for each in model.module.state_dict().values()} == {torch.float64}
    paths = forest(7)
    found = [compact(model, layout_of(paths, CHUNK, plan)) for plan in ("min_call", "flat")]
    grads = []
    for each in found:
        model.module.zero_grad()
        each.loss.backward()
        grads.append(gradients(model.module))
    agree(*found, 1e-12)
    assert not far(errors(*grads), 1e-11)
    without = trajectory_wise(stock(model), paths, family)  # its own casts to float32 show what is avoided
    assert 1e-9 < relative(found[0].logits[0], without.logits[0]) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputation_changes_no_bit(family: str) -> None:
    layout = layout_of(forest(3), CHUNK)
    grads = []
    for recompute in ("none", "full"):
        model = tiny(family, recompute=recompute)
        compact(model, layout).loss.backward()
        grads.append(gradients(model.module))
    assert all(torch.equal(each, grads[1][name]) for name, each in grads[0].items())


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_rows_change_nothing(family: str) -> None:
    model = tiny(family, dtype="float64")
    grads, found = [], []
    for row_multiple in (1, 256):
        layout = layout_of(forest(4), CHUNK, row_multiple=row_multiple)
        model.module.zero_grad()
        found.append(compact(model, layout))
        found[-1].loss.backward()
        grads.append(gradients(model.module))
    assert len(layout.input_ids) == 256 > layout.rows
    agree(*found, 1e-12)
    assert not far(errors(*grads), 1e-11)


@pytest.mark.parametrize("family", FAMILIES)
def test_trajectories_of_one_token_are_trained_too(family: str) -> None:
    paths = [[5], [7, 3], [5], [9]]
    model = tiny(family, dtype="float64")
    theirs = stock(model)
    ours = compact(model, layout_of(paths, CHUNK))
    with precision(torch.float64):
        wanted = trajectory_wise(theirs, paths, family)
        wanted.loss.backward()
    ours.loss.backward()
    agree(ours, wanted, EXACT)
    assert not far(errors(gradients(model.module), gradients(theirs)), EXACT)


@pytest.mark.parametrize("family", WITH_POSITIONS)
def test_positions_are_those_of_the_plan(family: str) -> None:
    paths = forest(5)
    layout = layout_of(paths, CHUNK)
    model = tiny(family, dtype="float64")
    theirs, plan = stock(model), tensors(layout, torch.float64)
    with precision(torch.float64), torch.no_grad():
        wanted = trajectory_wise(theirs, paths, family, first=100)
        agree(compact(model, layout, shifted(plan, 100)), wanted, EXACT)
        by_row = torch.arange(len(plan.position_ids)) - plan.position_ids  # not a shift: rows as positions
        wrong = compact(model, layout, shifted(plan, by_row))
    assert max(relative(got, right) for got, right in zip(wrong.logits, wanted.logits, strict=True)) > 1e-3
