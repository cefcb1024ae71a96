import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from harts.backends.model.linear_layer import LinearLayer
from harts.backends.model.norm import RmsNorm, l2norm
from harts.backends.model.parameters import Draw, initialise
from harts.backends.model.reference import Reference
from harts.backends.model.rope import rotate
from harts.errors import InputError
from harts.registry import resolve
from tests.backends.model.cases import CHUNK, FORK, MLA, MOE, compact_layout, config, reference, tensors


def test_is_registered() -> None:
    assert resolve("models", "reference") is Reference


def test_pattern_is_repeated_and_cut() -> None:
    assert config(pattern="KKA", layers=7).kinds == "KKAKKAK"


def test_parameters_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = reference(config()).module.state_dict()
    state = torch.random.get_rng_state()
    torch.manual_seed(2)
    second = reference(config()).module.state_dict()
    other = reference(config(seed=8)).module.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])
    torch.manual_seed(1)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_dtypes_start_from_the_same_values_rounded(dtype: str) -> None:
    exact = reference(config(moe=MOE)).module.state_dict()
    rounded = reference(config(moe=MOE, dtype=dtype)).module.state_dict()
    assert all(torch.equal(rounded[name], exact[name].to(rounded[name].dtype)) for name in exact)


@pytest.mark.parametrize("rule", ["kda", "gdn"])
def test_decay_and_expert_bias_stay_wide_in_bfloat16(rule: str) -> None:
    model = reference(config(rule=rule, moe=MOE, dtype="bfloat16"))
    wide = {name for name, value in model.module.state_dict().items() if value.dtype == torch.float32}
    assert {name.rpartition(".")[2] for name in wide} == {"a_log", "dt_bias", "expert_bias"}


@pytest.mark.parametrize("changes", [{"rule": "kda"}, {"rule": "gdn", **MLA, "moe": MOE}])
def test_bfloat16_model_is_close_to_float64(changes: dict[str, Any]) -> None:
    layout = compact_layout(FORK)
    with torch.no_grad():
        exact = reference(config(**changes)).forward(tensors(layout))
        rough = reference(config(**changes, dtype="bfloat16")).forward(tensors(layout, torch.float32))
    assert rough.hidden.dtype == torch.bfloat16
    cosine = torch.cosine_similarity(exact.hidden, rough.hidden.double(), dim=1)
    assert float(cosine.median()) > 0.995
    if exact.router_z is not None and rough.router_z is not None:
        assert rough.router_z.dtype == torch.float32
        assert float(rough.router_z) == pytest.approx(float(exact.router_z), rel=0.05)


def test_every_parameter_gets_a_start_and_a_gradient() -> None:
    model = reference(config(moe={**MOE, "dense_layers": 1}, layers=4))
    out = model.forward(tensors(compact_layout(FORK)))
    assert out.router_z is not None and out.router_balance is not None
    ((out.hidden @ model.head_weight().T).sin().sum() + out.router_z + out.router_balance).backward()
    for name, parameter in model.module.named_parameters():
        assert parameter.isfinite().all() and parameter.any(), name
        assert parameter.grad is not None and parameter.grad.any(), name


def test_decay_starts_between_slow_and_fast() -> None:
    model = reference(config(rule="gdn"))
    layer = model.module.blocks[0].mixer
    assert (layer.a_log.exp() >= 1).all() and (layer.a_log.exp() <= 16).all()
    step = torch.nn.functional.softplus(layer.dt_bias)
    assert (step >= 0.001 - 1e-12).all() and (step <= 0.1 + 1e-12).all()


def test_need_states_what_the_layers_use() -> None:
    need = reference(config(**MLA, linear_heads=2)).need(8)
    assert (need.chunk_size, need.conv_width, need.dtype, need.rule) == (8, 3, torch.float64, "kda")
    assert (need.linear_heads, need.linear_head_dims) == ((2, 2), (4, 6))
    assert (need.full_heads, need.full_head_dims) == ((2, 2), (8, 5))
    assert reference(config()).need(8).full_heads == (4, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_heads": 2, "linear_value_heads": 3}, "linear_value_heads is 3, no multiple of linear_heads 2"),
        ({"kv_heads": 3}, "heads is 4, no multiple of kv_heads 3"),
        ({"head_dim": 5}, "head_dim is 5; rotary embeddings need an even"),
        ({"attention": "mla"}, "attention is mla, which needs kv_rank.*needs value_dim"),
        ({**MLA, "rope_dim": 3}, "rope_dim is 3"),
        ({"kv_heads": None}, "attention is gqa, which needs kv_heads"),
        ({"moe": {**MOE, "top_k": 6}}, "top_k is 6, but there are 5 experts"),
        ({"moe": {**MOE, "dense_layers": 3}}, "dense_layers is 3, so none of the 3 layers has experts"),
        ({"pattern": "KX"}, "pattern"),
        ({"hidden_size": "16"}, "hidden_size"),
        ({"hiden_size": 16}, "hiden_size"),
    ],
)
def test_wrong_configs_are_refused_with_names_and_numbers(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**changes)


def test_token_outside_the_vocabulary_is_named() -> None:
    layout = compact_layout([[1, 2, 3], [1, 2, 31]])
    with pytest.raises(InputError, match=r"position 2\) is token 31, but the model's vocab_size is 24"):
        reference(config()).forward(tensors(layout))


def test_rotation_keeps_lengths_and_depends_on_distance() -> None:
    x = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    near = rotate(x, torch.tensor([7, 3]), 100.0)
    far = rotate(x, torch.tensor([30_000_007, 30_000_003]), 100.0)
    torch.testing.assert_close(near.norm(dim=2), x.norm(dim=2), rtol=1e-14, atol=0)
    torch.testing.assert_close((near[0] * near[1]).sum(-1), (far[0] * far[1]).sum(-1), rtol=0, atol=1e-7)
    assert not torch.allclose((near[0] * near[1]).sum(-1), (x[0] * x[1]).sum(-1))
    assert torch.equal(rotate(x, torch.zeros(2, dtype=torch.int64), 100.0), x)


def test_norms_scale_rows() -> None:
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(l2norm(x).norm(dim=1), torch.ones(4, dtype=torch.float64), rtol=1e-5, atol=0)
    norm = RmsNorm(6, torch.float64)
    initialise(norm, Draw(0, 1.0))
    wanted = torch.full((4,), 6.0, dtype=torch.float64)
    torch.testing.assert_close(norm(x).square().sum(1), wanted, rtol=1e-5, atol=0)
    assert norm(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("rule", ["kda", "gdn"])
def test_a_bound_of_the_log_decays_holds_and_is_told(rule):
    model = reference(config(rule=rule, least_gate=-0.5))
    assert model.need(CHUNK).least_gate == -0.5
    layer = next(each for each in model.module.modules() if isinstance(each, LinearLayer))
    x = 50 * torch.randn(200, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    g = layer._log_decay(x)
    assert g.min() >= -0.5
    assert g.max() <= 0.0
    assert g.min() < -0.4
    assert reference(config(rule=rule)).need(CHUNK).least_gate == -math.inf
