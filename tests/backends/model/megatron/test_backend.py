"""What the model backend `megatron` builds, refuses and trains."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from harts.backends.gradients import Pass
from harts.backends.model.megatron.backend import MegatronModel
from harts.errors import BackendError, ConfigError, InputError
from harts.ir import CompactOutputs
from tests.backends.model.megatron.runs import (
    BIASED,
    GQA,
    MLA,
    MOE,
    compact,
    config,
    errors,
    forest,
    gradients,
    planned_loss,
    policy_loss,
    tensors,
    tiny,
)
from tests.parity.trees import rows_by_trajectory

ROOT = Path(__file__).resolve().parents[4]

REFUSED: dict[str, Any] = {
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "moe_input_jitter_eps": 0.01,
    "moe_router_force_load_balancing": True,
    "moe_expert_capacity_factor": 1.0,
    "moe_enable_routing_replay": True,
    "mtp_num_layers": 1,
    "window_size": (4, 0),
    "softmax_type": "learnable",
    "log_max_attention_logit": True,
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_change_results_silently_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"model: overrides: .*{name}"):
        tiny(moe=MOE, overrides={name: REFUSED[name]})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("moe_router_load_balancing_type", ["aux_loss", "seq_aux_loss"]),
        ("moe_router_fusion", True),
        ("overlap_moe_expert_parallel_comm", True),
        ("delay_wgrad_compute", True),
        ("cuda_graph_impl", "local"),
        ("apply_rope_fusion", True),
        ("fp8", "hybrid"),
        ("rope_type", "yarn"),
        ("virtual_pipeline_model_parallel_size", 2),
        ("experimental_attention_variant", "dsa"),
        ("qk_l2_norm", True),
        ("moe_router_dtype", "fp64"),
        ("fp32_residual_connection", True),
        ("deallocate_pipeline_outputs", True),
    ],
)
def test_refusals_name_what_megatron_itself_would_take(name: str, value: object) -> None:
    from harts.backends.model.megatron.options import refusals, transformer_config

    options = transformer_config(config(**MLA, moe=MOE))
    assert refusals(options) == []
    setattr(options, name, value)
    assert [reason.split(" is ")[0] for reason in refusals(options)] == [name]


@pytest.mark.parametrize("name", ["gtp_weight_remat_size", "expert_gtp_weight_remat_size"])
def test_what_newer_versions_set_by_themselves_is_served(name: str) -> None:
    from harts.backends.model.megatron.options import refusals, transformer_config

    options = transformer_config(config(**MLA, moe=MOE))
    setattr(options, name, 1)
    assert refusals(options) == []
    setattr(options, name, 2)
    assert [reason.split(" is ")[0] for reason in refusals(options)] == [name]


def test_recomputation_of_experts_alone_is_refused() -> None:
    selective = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    with pytest.raises(
        ConfigError,
        match=r"recompute_modules has moe, served are core_attn, mla_up_proj: .*routers have no multiplicities",
    ):
        tiny(moe=MOE, overrides=selective)


def test_overrides_are_checked() -> None:
    with pytest.raises(ConfigError, match="TransformerConfig has no hidden_sizes"):
        tiny(overrides={"hidden_sizes": 3})
    with pytest.raises(ConfigError, match="hidden_size follows from this configuration's own fields"):
        tiny(overrides={"hidden_size": 3})
    with pytest.raises(ConfigError, match="moe_layer_freq follows from this configuration's own fields"):
        tiny(moe=MOE, overrides={"moe_layer_freq": 2})
    with pytest.raises(ConfigError, match=r"overrides: MLATransformerConfig: .*moe_router_num_groups"):
        tiny(**MLA, moe=MOE, overrides={"moe_router_group_topk": 1, "moe_router_num_groups": 3})
    assert tiny(overrides={"layernorm_epsilon": 1e-3}).module.config.layernorm_epsilon == 1e-3


def test_experts_that_grouped_products_cannot_have_are_refused() -> None:
    with pytest.raises(ConfigError, match="model: grouped experts: moe_ffn_hidden_size is 6, no multiple of 4"):
        tiny(moe={**MOE, "intermediate_size": 6})
    with pytest.raises(ConfigError, match=r"model: grouped experts: activation_func_clamp_value is 7.0"):
        tiny(moe=MOE, overrides={"activation_func_clamp_value": 7.0})


def test_experts_that_nobody_chose_have_zero_gradients() -> None:
    model = tiny(moe={**MOE, "experts": 40})
    paths = [[1, 2, 3]]
    found = gradients(model.module, planned_loss(model, compact(paths), paths))
    norms = found["decoder.layers.0.mlp.experts.gate_up"].flatten(1).norm(dim=1)
    assert 0 < int((norms > 0).sum()) <= 6
    assert bool(norms.isfinite().all())


def test_a_rank_that_no_row_comes_to_has_zero_gradients_not_none() -> None:
    experts = tiny(moe=MOE).module.decoder.layers[0].mlp.experts
    rows = torch.zeros(0, 16, requires_grad=True)
    out, _ = experts(rows, torch.zeros(5, dtype=torch.int64), torch.zeros(0))
    assert out.shape == (0, 16)
    out.sum().backward()
    assert rows.grad is not None
    for each in (experts.gate_up, experts.down):
        assert torch.equal(each.grad, torch.zeros_like(each))


def test_configurations_are_checked() -> None:
    with pytest.raises(ValidationError, match="expert_bias_rate is for scoring sigmoid"):
        config(moe={**MOE, "expert_bias_rate": 0.1})
    with pytest.raises(ValidationError, match="dtype"):
        config(dtype="float64")
    with pytest.raises(ValidationError, match="head_gate is for attention mla; gqa has Megatron's"):
        config(head_gate=True)
    with pytest.raises(ValidationError, match=r"rotary_percent 0.5 of head_dim 6 is 3 channels"):
        config(rotary_percent=0.5)
    with pytest.raises(ValidationError, match="rotary_percent is for attention gqa; mla has rope_dim"):
        config(**MLA, rotary_percent=0.5)
    with pytest.raises(ValidationError, match="decay is full, which is for rule kda, not gdn"):
        config(rule="gdn", decay="full")


def test_a_router_outside_its_layer_is_refused() -> None:
    model = tiny(moe=MOE)
    mlp = model.module.decoder.layers[1].mlp
    with pytest.raises(BackendError, match="layer 2: its router runs outside the layer's forward pass"):
        mlp.router(torch.zeros(5, 1, 16))


def test_layers_without_a_plan_are_refused() -> None:
    model, ids = tiny(), torch.tensor([[1, 2, 3]])
    with pytest.raises(BackendError, match="layer 1: its linear attention is called without a plan"):
        model.module(ids, torch.arange(3)[None], None)
    with pytest.raises(BackendError, match="layer 1: its full attention is called without a plan"):
        tiny(pattern="A").module(ids, torch.arange(3)[None], None)


def test_a_layer_that_did_not_run_on_the_plan_is_named() -> None:
    model = tiny(pattern="A", layers=2)
    core = model.module.decoder.layers[1].self_attention.core_attention
    core.forward = lambda query, *_, **__: query.flatten(1)
    with pytest.raises(BackendError, match=r"did not run on compact rows: 2 \(full\)$"):
        model.forward(tensors(compact(forest(0))))


def test_unknown_tokens_are_refused() -> None:
    plan = tensors(compact([*forest(0), [1, 2, 99]]))
    with pytest.raises(InputError, match=r"\(position 2\) is token 99, but the model's vocab_size is 24"):
        tiny().forward(plan)


def test_without_megatron_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "harts.backends.model.megatron.run", None)
    with pytest.raises(BackendError, match=r"models: megatron: cannot be imported .* pip install 'harts\[megatron\]'"):
        tiny()


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> int:
        raise RuntimeError("no NVIDIA driver\nmore")

    monkeypatch.setattr(torch.cuda, "current_device", absent)
    with pytest.raises(BackendError, match=r"models: megatron: needs a GPU: no NVIDIA driver$"):
        tiny()


def test_one_seed_gives_one_model_and_leaves_torchs_random_state_alone() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, second, other = tiny(moe=BIASED), tiny(moe=BIASED), tiny(moe=BIASED, seed=8)
    assert torch.equal(torch.get_rng_state(), state)
    for name, each in first.module.named_parameters():
        assert torch.equal(each, dict(second.module.named_parameters())[name]), name
    assert not torch.equal(first.head_weight(), other.head_weight())


def test_a_selection_bias_may_stay_what_it_is() -> None:
    model = tiny(moe={**MOE, "scoring": "sigmoid"}, overrides={"moe_router_enable_expert_bias": True})
    before = model.module.decoder.layers[0].mlp.router.expert_bias.clone()
    model.update_expert_bias(torch.tensor([[4.0, 0.0, 2.0, 1.0, 3.0]]).repeat(4, 1))
    assert torch.equal(model.module.decoder.layers[0].mlp.router.expert_bias, before)
    with pytest.raises(ConfigError, match="moe_router_enable_expert_bias follows from this configuration's own fields"):
        tiny(moe=BIASED, overrides={"moe_router_enable_expert_bias": False})


@pytest.mark.parametrize("attention", [{**GQA, "overrides": {"qk_layernorm": True}}, MLA])
def test_norms_centred_at_zero_are_the_same_norms(attention: dict[str, Any]) -> None:
    plain, paths = tiny(**attention), forest(0)
    centred = tiny(
        **attention | {"overrides": attention.get("overrides", {}) | {"layernorm_zero_centered_gamma": True}}
    )
    weights = {name: each for name, each in plain.module.state_dict().items() if isinstance(each, torch.Tensor)}
    with torch.no_grad():
        for name, each in centred.module.state_dict().items():
            if isinstance(each, torch.Tensor):
                each.copy_(weights[name] - float("norm" in name and not name.endswith("self_attention.norm")))
    ours, wanted = (gradients(each.module, planned_loss(each, compact(paths), paths)) for each in (centred, plain))
    assert max(errors(ours, wanted).values()) <= 1e-5


def test_norms_centred_at_zero_tell_what_bfloat16_cannot_add_to_one() -> None:
    from harts.backends.model.megatron.norm import RmsNorm

    options = SimpleNamespace(layernorm_zero_centered_gamma=True, params_dtype=torch.bfloat16, sequence_parallel=False)
    norm, x = RmsNorm(options, 64), torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    unscaled = norm(x)
    norm.weight.data.fill_(3e-3)
    wide = x.double() * x.double().square().mean(-1, keepdim=True).rsqrt()
    assert torch.equal(norm(x), (wide * (1.0 + norm.weight.double())).bfloat16())
    assert torch.equal(1.0 + norm.weight, torch.ones_like(norm.weight))
    assert not torch.equal(norm(x), unscaled)


@pytest.mark.parametrize("attention", [GQA, MLA])
def test_positions_taken_from_rows_are_noticed(attention: dict[str, Any]) -> None:
    model, paths = tiny(pattern="A", **attention), forest(0)
    layout = compact(paths)
    by_row = replace(tensors(layout), position_ids=torch.arange(len(layout.input_ids)))
    wrong, right = (gradients(model.module, planned_loss(model, layout, paths, plan)) for plan in (by_row, None))
    assert max(errors(wrong, right).values()) > 1e-2


def test_the_selection_bias_moves_against_the_load() -> None:
    model = tiny(moe=BIASED)
    routers = [layer.mlp.router for layer in model.module.decoder.layers]
    before = [router.expert_bias.clone() for router in routers]
    load = torch.tensor([[4.0, 0.0, 2.0, 1.0, 3.0]]).repeat(4, 1)
    model.update_expert_bias(load.double())
    for router, old in zip(routers, before, strict=True):
        torch.testing.assert_close(router.expert_bias - old, torch.tensor([-0.01, 0.01, 0.0, 0.01, -0.01]))
    with pytest.raises(BackendError, match=r"expert_load: has shape \(3, 5\), the model's experts are \(4, 5\)"):
        model.update_expert_bias(load[:3])


def test_without_a_rate_there_is_no_selection_bias() -> None:
    model = tiny(moe=MOE)
    model.update_expert_bias(torch.ones(4, 5))
    assert all(layer.mlp.router.expert_bias is None for layer in model.module.decoder.layers)


def test_its_need_is_known_before_it_is_built() -> None:
    model = tiny(**MLA)
    assert model.need(4) == MegatronModel.need_of(model.config, 4, "cpu")
    assert model.need(4).full_head_dims == (8, 5)


def test_a_run_trains_and_holds_against_flat(call: Callable[..., tuple[int, str, str]]) -> None:
    chosen = ["model.type=megatron", "model.dtype=float32", "model.recompute=full", "ingest.limit=6"]
    words = [word for each in chosen for word in ("--set", each)]
    code, out, err = call("run", ROOT / "pipelines" / "quickstart.yaml", *words, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["comparison"]["faults"] == []
    assert found["comparison"]["tolerance"] == 1e-4
    assert all(each["gradient_norm"] > 0 for each in found["train"])


def test_narrow_weights_are_updated_through_copies_in_float32() -> None:
    """Steps far below a bfloat16 digit add up, as they do in several processes."""
    model, paths = tiny(dtype="bfloat16"), forest(2)
    before = {name: each.detach().clone() for name, each in model.module.named_parameters()}
    optimizer = model.optimizer("adamw", 1e-4)
    layout = compact(paths)

    def passes() -> Iterator[Pass]:
        def loss(outputs: CompactOutputs) -> torch.Tensor:
            hidden: Any = outputs.hidden
            logits = (hidden @ model.head_weight().T).float()
            return policy_loss([logits[rows] for rows in rows_by_trajectory(layout)], paths)

        yield Pass(lambda: CompactOutputs(layout, model.forward(tensors(layout)).hidden), loss, 0.0, 0.0)

    for _ in range(20):
        model.accumulate(1, passes())
        assert model.gradient_norm() > 0
        optimizer.step()
    weight = before["output_layer.weight"]
    moved = (dict(model.module.named_parameters())["output_layer.weight"] != weight).float().mean()
    assert weight.dtype == torch.bfloat16
    assert float(moved) > 0.5
