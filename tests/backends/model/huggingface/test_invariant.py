"""Routers and gates of shared experts use the product whose rows do not depend on their number."""

from __future__ import annotations

import copy
import inspect
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harts.backends.model.huggingface.call import TreeCall
from harts.backends.model.huggingface.hooks import TreeForward
from harts.backends.model.invariant import FUNCTIONS, linear
from tests.backends.model.huggingface.models import (
    CHUNK,
    EXPERTS,
    WITH_EXPERTS,
    WITH_SHARED_GATE,
    config,
    handed_over,
    routers,
    wrapped,
)
from tests.backends.model.huggingface.runs import compact, forest, tensors
from tests.parity.trees import layout_of


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_routers_and_gates_use_it_in_calls_with_a_plan_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: list[int] = []

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        outputs.append(len(weight))
        return linear(x, weight, bias)

    monkeypatch.setattr(FUNCTIONS, "linear", counted)
    model = wrapped(config(family))
    for name in (model.family.delta_rule, model.family.conv):  # in torch, also where FLA is installed
        monkeypatch.setattr(model.family.modeling, name, inspect.unwrap(getattr(model.family.modeling, name)))
    layers, gates = len(routers(model.module, family)), family in WITH_SHARED_GATE
    assert layers
    layout = layout_of(forest(0), CHUNK)
    plan = tensors(layout)
    compact(model, layout, plan)
    assert sorted(outputs) == [1] * layers * gates + [EXPERTS] * layers
    rows = torch.randn(len(layout.input_ids), model.settings.hidden_size)
    for router in routers(model.module, family):
        found = []
        for given, named in (((rows,), {}), ((), {"hidden_states": rows})):
            router.forward.slot.call = TreeCall(plan, model.linear, model.full)
            found.append(router(*given, **named)[0])
        assert torch.equal(*found)
    assert len(outputs) == layers * (3 + gates)
    model.module(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
    assert len(outputs) == layers * (3 + gates)


def test_a_gate_of_another_class_and_a_forward_of_its_own_are_kept() -> None:
    module = wrapped(config("qwen3_next")).module
    gates = [layer.mlp for layer in module.model.layers]
    plain = copy.deepcopy(gates[0].shared_expert_gate)
    del plain.forward  # the hook's
    gates[0].shared_expert_gate = nn.Sequential(plain)
    own = gates[1].shared_expert_gate.forward = partial(functional.linear, weight=plain.weight)
    for part in module.modules():
        if type(vars(part).get("forward")) is TreeForward:
            del part.forward
    model = handed_over(module)
    compact(model, layout_of(forest(0), CHUNK)).loss.backward()
    assert "forward" not in vars(plain)
    assert gates[1].shared_expert_gate.forward is own
