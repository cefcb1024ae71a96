"""Router statistics are those of all trajectories written out, counted once, whatever is recomputed or interleaved."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from harts.backends.model.huggingface.wide import precision
from harts.errors import BackendError
from tests.backends.model.huggingface.models import (
    CHUNK,
    EXPERTS,
    FAMILIES,
    TOP_K,
    WITH_EXPERTS,
    handed_over,
    routers,
    stock,
    tiny,
)
from tests.backends.model.huggingface.runs import (
    agree,
    compact,
    errors,
    forest,
    gradients,
    relative,
    tensors,
    trajectory_wise,
)
from tests.parity.trees import layout_of


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_statistics_are_those_of_trajectory_wise_runs(family: str) -> None:
    paths = forest(0)
    layout = layout_of(paths, CHUNK)
    model = tiny(family, dtype="float64")
    plan = tensors(layout, torch.float64)
    assert float(plan.multiplicity.max()) > 3
    theirs = stock(model)
    with precision(torch.float64):
        wanted = trajectory_wise(theirs, paths, family)
    ours = compact(model, layout, plan)
    agree(ours, wanted, 1e-12)
    assert ours.load is not None and wanted.load is not None
    assert torch.equal(ours.load, wanted.load)
    assert ours.load.shape == (len(routers(model.module, family)), EXPERTS)
    assert not ours.load.requires_grad


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_counts_of_rows_instead_of_positions_are_noticed(family: str) -> None:
    layout = layout_of(forest(0), CHUNK)
    model = tiny(family, dtype="float64")
    plan = tensors(layout, torch.float64)
    ones = replace(plan, multiplicity=plan.multiplicity.clamp(max=1))
    found, grads = [], []
    for each in (plan, ones):
        model.module.zero_grad()
        found.append(compact(model, layout, each))
        found[-1].loss.backward()
        grads.append(gradients(model.module))
    right, wrong = found
    assert all(torch.equal(x, y) for x, y in zip(right.logits, wrong.logits, strict=True))
    assert min(relative(getattr(wrong, name), getattr(right, name)) for name in ("z", "balance", "load")) > 1e-5
    gates = {name: each for name, each in errors(*grads).items() if name.endswith("mlp.gate.weight")}
    assert len(gates) == len(routers(model.module, family))
    assert min(gates.values()) > 1e-3


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_every_position_is_counted_once(family: str, recompute: str) -> None:
    paths = forest(1)
    model = tiny(family, recompute=recompute)
    found = compact(model, layout_of(paths, CHUNK))
    assert found.load is not None
    before = found.load.clone()
    found.loss.backward()
    assert torch.equal(found.load, before)
    assert before.sum(1).tolist() == [TOP_K * sum(map(len, paths))] * len(before)


def _parametrized(module: Any, family: str) -> None:
    for router in routers(module, family):
        parametrize.register_parametrization(router, "weight", nn.Identity())


def _of_subclasses(module: Any, _family: str) -> None:
    """As sharding of torch's distributed package does it."""
    for part in module.model.layers.modules():
        part.__class__ = type(f"Sharded{type(part).__name__}", (type(part),), {})


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("change", [_parametrized, _of_subclasses])
@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_layers_of_subclasses_are_those_of_their_classes(family: str, change: Any, early: bool) -> None:
    wanted, plain = tiny(family), stock(tiny(family))
    layout = layout_of(forest(0), CHUNK)
    for each in plain.modules():
        vars(each).pop("forward", None)  # the functions of transformers
    if early:
        change(plain, family)
    model = handed_over(plain)
    if not early:
        change(plain, family)
    found = [compact(each, layout) for each in (wanted, model)]
    assert not model.why_not(model.need(CHUNK))
    for name in ("loss", "z", "balance", "load"):
        assert torch.equal(*(getattr(each, name) for each in found))
    model.update_expert_bias(torch.zeros(len(routers(wanted.module, family)), EXPERTS))  # of all routers


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_what_hooks_choose_is_counted_whenever_they_came(family: str, early: bool) -> None:
    def first_experts(_module: Any, _given: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return *output[:-1], torch.arange(TOP_K).expand_as(output[-1])

    paths, plain = forest(0), stock(tiny(family))
    for each in plain.modules():
        vars(each).pop("forward", None)  # the functions of transformers
    model = None if early else handed_over(plain)
    for router in routers(plain, family):
        router.register_forward_hook(first_experts)
    found = compact(model or handed_over(plain), layout_of(paths, CHUNK))
    assert found.load is not None
    positions = sum(map(len, paths))
    assert found.load.tolist() == [[positions] * TOP_K + [0] * (EXPERTS - TOP_K)] * len(routers(plain, family))


def test_layers_with_experts_have_one_router() -> None:
    model = tiny("kimi_linear")
    layers = model.module.model.layers
    layers[1].mlp.other = copy.deepcopy(layers[1].mlp.gate)
    layers[2].mlp.gate = nn.Linear(32, EXPERTS)
    layers[2].mlp.forward = lambda hidden_states: hidden_states
    reason = "layers 1, 2 have experts, but not one KimiLinearTopkRouter"
    assert model.why_not(model.need(CHUNK)) == [reason]
    with pytest.raises(BackendError, match=r"did not run on compact rows: 2 \(experts\)"):
        compact(model, layout_of(forest(0), CHUNK))


def test_dense_models_have_no_statistics() -> None:
    output = tiny("qwen3_5").forward(tensors(layout_of(forest(0), CHUNK)))
    assert (output.router_z, output.router_balance, output.expert_load) == (None, None, None)


def _interleaved(family: str, order: list[str], recompute: str) -> tuple[dict[str, Tensor], list[Tensor | None]]:
    """Gradients and statistics of two microbatches; `order` names their forward and backward passes."""
    model = tiny(family, recompute=recompute)
    layouts = {"a": layout_of(forest(0), CHUNK), "b": layout_of(forest(1), CHUNK)}
    found = {}
    for step in order:
        if step.isupper():
            found[step.lower()].loss.backward()
        else:
            found[step] = compact(model, layouts[step])
    told = [getattr(found[name], field) for name in "ab" for field in ("z", "balance", "load")]
    return gradients(model.module), told


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_microbatches_in_flight_do_not_mix(family: str, recompute: str) -> None:
    wanted, told = _interleaved(family, ["a", "A", "b", "B"], recompute)
    got, also = _interleaved(family, ["a", "b", "A", "B"], recompute)
    assert all(torch.equal(each, got[name]) for name, each in wanted.items())
    for mine, theirs in zip(also, told, strict=True):
        assert (mine is None and theirs is None) or torch.equal(mine, theirs)  # type: ignore[arg-type]
    backwards, _ = _interleaved(family, ["a", "b", "B", "A"], recompute)  # sums in another order
    assert max(errors(backwards, wanted, 1e-2).values()) < 1e-5


@pytest.mark.parametrize("family", ["bailing_hybrid", "kimi_linear"])
def test_selection_bias_moves_against_the_load(family: str) -> None:
    model = tiny(family, expert_bias_rate=0.25)
    assert not model.why_not(model.need(CHUNK))
    before = [each.e_score_correction_bias.clone() for each in routers(model.module, family)]
    load = torch.tensor([[3, 1, 0, 4, 2, 2, 2, 2], [0, 0, 0, 0, 16, 0, 0, 0]], dtype=torch.float64)
    model.update_expert_bias(load)
    moved = [
        each.e_score_correction_bias - old for each, old in zip(routers(model.module, family), before, strict=True)
    ]
    wanted = torch.tensor([[-1, 1, 1, -1, 0, 0, 0, 0], [1, 1, 1, 1, -1, 1, 1, 1]]) * 0.25
    torch.testing.assert_close(torch.stack(moved), wanted)


def test_selection_bias_selects_in_the_next_step() -> None:
    model = tiny("kimi_linear", expert_bias_rate=10.0)
    layout = layout_of(forest(0), CHUNK)
    load = compact(model, layout).load
    assert load is not None
    model.update_expert_bias(load)
    after = compact(model, layout).load
    assert after is not None
    assert after[load > load.mean(1, keepdim=True)].sum() == 0  # those that had more than their part have none


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_without_a_rate_or_a_bias_nothing_moves(family: str) -> None:
    model = tiny(family)
    before = {name: each.clone() for name, each in model.module.state_dict().items()}
    model.update_expert_bias(torch.rand(len(routers(model.module, family)), EXPERTS))
    assert all(torch.equal(each, before[name]) for name, each in model.module.state_dict().items())


@pytest.mark.parametrize("shape", [(1, EXPERTS), (2, EXPERTS - 1), (3, EXPERTS)])
def test_load_of_another_shape_is_refused(shape: tuple[int, int]) -> None:
    model = tiny("kimi_linear", expert_bias_rate=0.1)
    with pytest.raises(BackendError, match=rf"shape \({shape[0]}, {shape[1]}\).*\(2, {EXPERTS}\)"):
        model.update_expert_bias(torch.ones(shape))
