"""KDA and GDN as layers of Megatron: those of the reference model with the same weights; what stays in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from harts.backends.linear.naive import Naive
from harts.backends.model.config import ReferenceConfig
from harts.backends.model.linear_layer import LinearLayer
from tests.backends.model.megatron.runs import compact, config, forest, tensors, tiny

WIDE = ("conv", "a_log", "dt_bias")
CASES: list[dict[str, Any]] = [
    {"rule": "kda"},
    {"rule": "kda", "least_gate": -5.0},
    {"rule": "kda", "decay": "full"},
    {"rule": "gdn"},
]


def _by_head(heads: int, *parts: Tensor) -> Tensor:
    """Rows of several weights, sorted by the key head that they belong to."""
    return torch.cat([part.reshape(heads, -1, part.shape[1]) for part in parts], dim=1).flatten(0, 1)


def _reference(changes: dict[str, Any]) -> LinearLayer:
    known = set(ReferenceConfig.model_fields)
    settings = ReferenceConfig(**{k: v for k, v in config(**changes).model_dump().items() if k in known})
    layer = LinearLayer(settings, Naive(Naive.Config()))
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for each in layer.parameters():
            each.copy_(torch.randn(each.shape, generator=draw) * 0.3)
    return layer


def _copy(theirs: LinearLayer, ours: Any) -> None:
    heads = theirs.heads
    parts = [*theirs.qkv.weight.split(theirs.sizes), theirs.gate.weight, theirs.beta.weight]
    if theirs.rule == "gdn":
        parts.append(theirs.decay.weight)
    elif ours.shape.full_decay:
        parts.append(theirs.decay[1].weight @ theirs.decay[0].weight)
    else:
        ours.decay_down.weight.copy_(theirs.decay[0].weight)
        ours.decay_up.weight.copy_(theirs.decay[1].weight)
    ours.in_proj.weight.copy_(_by_head(heads, *parts))
    ours.conv.copy_(_by_head(heads, *theirs.conv.split(theirs.sizes)))
    ours.out_proj.weight.copy_(theirs.out.weight)
    for mine, wanted in ((ours.norm, theirs.norm.weight), (ours.a_log, theirs.a_log), (ours.dt_bias, theirs.dt_bias)):
        mine.copy_(wanted)


@pytest.mark.parametrize("changes", CASES)
def test_it_is_the_layer_of_the_reference_model(changes: dict[str, Any]) -> None:
    from harts.backends.model.megatron.call import tree_params

    model, theirs = tiny(**changes), _reference(changes)
    ours = model.module.decoder.layers[0].self_attention
    with torch.no_grad():
        _copy(theirs, ours)
    plan = tensors(compact(forest(0)))
    x = torch.randn(len(plan.input_ids), 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
    y, bias = ours(x[:, None], None, packed_seq_params=tree_params(plan, model.linear, model.full))
    wanted = theirs(x, plan)
    assert bias is None
    torch.testing.assert_close(y[:, 0], wanted, rtol=1e-5, atol=1e-5)
    probe = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2))
    (dx,), (wanted_dx,) = (torch.autograd.grad(each, x, probe) for each in (y[:, 0], wanted))
    torch.testing.assert_close(dx, wanted_dx, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", ["kda", "gdn"])
def test_parameters_of_gates_and_convolutions_stay_in_float32(rule: str) -> None:
    model = tiny(rule=rule)
    layer = model.module.decoder.layers[0].self_attention
    before = {name: getattr(layer, name).detach().clone() for name in WIDE}
    model.module.bfloat16()  # as Megatron's own wrapper casts a model
    assert layer.in_proj.weight.dtype == torch.bfloat16
    for name, wanted in before.items():
        assert isinstance(getattr(layer, name), torch.nn.Parameter)
        assert torch.equal(getattr(layer, name), wanted), name


@pytest.mark.parametrize("rule", ["kda", "gdn"])
def test_bfloat16_models_are_near_float32_ones(rule: str) -> None:
    plan = tensors(compact(forest(1)))
    wide = tiny(rule=rule).forward(plan).hidden
    narrow = tiny(rule=rule, dtype="bfloat16").forward(plan).hidden
    assert narrow.dtype == torch.bfloat16
    assert float(((narrow.float() - wide).norm() / wide.norm()).detach()) < 0.05
    narrow.float().square().sum().backward()
