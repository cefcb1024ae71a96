"""Megatron's HybridModel runs the same layers as its GPTModel: weights, losses, gradients, router statistics."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from typing import Any

import pytest
import torch
from torch import Tensor

from harts.backends.model.megatron.backend import MegatronModel
from harts.errors import BackendError, ConfigError
from tests.backends.model.megatron.runs import (
    BIASED,
    GQA,
    MLA,
    MOE,
    SINGLE,
    compact,
    config,
    errors,
    flat,
    forest,
    one_by_one,
    planned_loss,
    rectangle,
    tensors,
    tiny,
    without_multiplicity,
)

HYBRID: dict[str, Any] = {"block": "hybrid"}
MLPS: list[dict[str, Any]] = [{}, {"moe": {**BIASED, "dense_layers": 1}}]
FORESTS = range(3)


@cache
def version() -> str:
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return "0.0"


def served() -> bool:
    return tuple(map(int, version().split(".")[:2])) >= (0, 19)


hybrid_only = pytest.mark.skipif(
    not served(), reason=f"HybridModel is in megatron-core 0.19 and newer, not {version()}"
)


def parameters(model: MegatronModel) -> dict[str, torch.nn.Parameter]:
    """Under the names of a GPTModel."""
    from harts.backends.model.megatron.parts import parts_of

    return {part.name: each for part, each in parts_of(model.module, model.config, model.made.groups)}


def gradients(model: MegatronModel, loss: Tensor) -> dict[str, Tensor]:
    model.module.zero_grad(set_to_none=True)
    loss.backward()
    found = parameters(model).items()
    return {name: torch.zeros_like(each) if each.grad is None else each.grad.clone() for name, each in found}


def biases(model: MegatronModel) -> dict[str, Tensor]:
    from harts.backends.model.megatron.parts import buffers_of

    return {name: each.clone() for name, each in buffers_of(model.module).items() if name.endswith("expert_bias")}


def pair(**changes: Any) -> tuple[MegatronModel, MegatronModel]:
    """As GPTModel and as HybridModel."""
    return tiny(**changes), tiny(**changes, **HYBRID)


@hybrid_only
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("mlp", range(len(MLPS)))
@pytest.mark.parametrize("attention", [GQA, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize("rule", ["kda", "gdn"])
def test_it_equals_the_gpt_model(rule: str, attention: dict[str, Any], mlp: int, recompute: str) -> None:
    ours, theirs = pair(rule=rule, **attention, **MLPS[mlp], recompute=recompute)
    wanted = parameters(theirs)
    assert set(parameters(ours)) == set(wanted)
    assert all(torch.equal(each, wanted[name]) for name, each in parameters(ours).items())
    assert set(biases(ours)) == set(biases(theirs))
    for seed in FORESTS:
        paths = forest(seed)
        loss, expected = (planned_loss(model, compact(paths), paths) for model in (ours, theirs))
        assert float(loss) == pytest.approx(float(expected), rel=SINGLE)
        found = errors(gradients(ours, loss), gradients(theirs, expected))
        assert max(found.values()) <= SINGLE, found
        mine, other = (model.forward(tensors(compact(paths))) for model in (ours, theirs))
        torch.testing.assert_close(mine.hidden, other.hidden, rtol=SINGLE, atol=SINGLE)
        if not mlp:
            assert (mine.router_z, mine.router_balance, mine.expert_load) == (None, None, None)
            continue
        torch.testing.assert_close(mine.router_z, other.router_z, rtol=SINGLE, atol=0.0)
        torch.testing.assert_close(mine.router_balance, other.router_balance, rtol=SINGLE, atol=0.0)
        assert torch.equal(mine.expert_load, other.expert_load)
        assert mine.expert_load is not None and other.expert_load is not None
        ours.update_expert_bias(mine.expert_load)
        theirs.update_expert_bias(other.expert_load)
        after = biases(theirs)
        assert len(after) == 3
        assert all(torch.equal(each, after[name]) for name, each in biases(ours).items())


@hybrid_only
@pytest.mark.parametrize("case", [{"rule": "gdn", **MLA}, {"rule": "kda", **GQA, "moe": BIASED}])
def test_compact_rows_equal_megatrons_own_batch_of_trajectories(case: dict[str, Any]) -> None:
    from tests.backends.model.megatron.stock import stock, stock_loss

    theirs, ours = pair(**case)
    paths, batches = rectangle(2), stock(theirs)
    batches.zero_grad(set_to_none=True)
    stock_loss(batches, paths).backward()
    wanted = {name: each.grad for name, each in batches.named_parameters()}
    found = errors(one_by_one(gradients(ours, planned_loss(ours, compact(paths), paths))), wanted)
    assert max(found.values()) <= SINGLE, found


@hybrid_only
def test_multiplicities_reach_its_routers() -> None:
    model, paths = tiny(moe=BIASED, recompute="full", **HYBRID), forest(3)
    layout = compact(paths)
    wanted = gradients(model, planned_loss(model, flat(paths), paths))
    counted = errors(gradients(model, planned_loss(model, layout, paths)), wanted)
    assert max(counted.values()) <= SINGLE, counted
    ones = planned_loss(model, layout, paths, without_multiplicity(tensors(layout)))
    found = errors(gradients(model, ones), wanted)
    assert min(error for name, error in found.items() if name.endswith("router.weight")) > 1e-2


@hybrid_only
def test_microbatches_in_flight_keep_their_own_plans() -> None:
    model = tiny(moe=BIASED, recompute="full", **HYBRID)
    batches = [forest(seed) for seed in (4, 5)]
    layouts = [compact(paths) for paths in batches]
    alone = [gradients(model, planned_loss(model, *each)) for each in zip(layouts, batches, strict=True)]
    losses = [planned_loss(model, *each) for each in zip(layouts, batches, strict=True)]
    together = [gradients(model, loss) for loss in losses]
    for mine, wanted in zip(together, alone, strict=True):
        assert all(torch.equal(mine[name], each) for name, each in wanted.items())


@hybrid_only
def test_recomputation_runs_attention_and_what_follows_it_again() -> None:
    model, paths = tiny(recompute="full", **HYBRID), forest(0)
    runs: list[int] = []
    for layer in model.module.decoder.layers:
        layer.register_forward_pre_hook(lambda layer, _: runs.append(layer.layer_number))
    loss = planned_loss(model, compact(paths), paths)
    assert runs == [*range(1, 9)]
    loss.backward()
    assert runs[8:] == [7, 8, 5, 6, 3, 4, 1, 2]


@hybrid_only
def test_a_checkpoint_has_the_same_names_in_both(monkeypatch: pytest.MonkeyPatch) -> None:
    from harts.backends.model.megatron.checkpoints import convert
    from harts.backends.model.megatron.parts import buffers_of, parts_of

    theirs, ours = tiny(moe=BIASED, seed=8), tiny(moe=BIASED, **HYBRID)
    kept = {**parameters(theirs), **buffers_of(theirs.module)}
    monkeypatch.setattr(convert, "weights_in", lambda *_: iter(kept.items()))
    named = ours.config.model_copy(update={"checkpoint": "a folder"})
    convert.load(list(parts_of(ours.module, ours.config, ours.made.groups)), buffers_of(ours.module), named)
    assert all(torch.equal(each, kept[name]) for name, each in parameters(ours).items())
    assert all(torch.equal(each, kept[name]) for name, each in biases(ours).items())


@hybrid_only
@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"layers": 3, **GQA}, "G-*-G-"),
        ({"layers": 4, **MLA, "moe": {**MOE, "dense_layers": 1}}, "G-+EGE+E"),
        ({"layers": 4, "moe": MOE, "parallel": {"pipeline": 2}}, "GE*E|GE*E"),
        (
            {"layers": 5, "parallel": {"pipeline": 3}, "overrides": {"num_layers_in_first_pipeline_stage": 1}},
            "G-|*-G-|*-G-",
        ),
    ],
)
def test_its_pattern_has_two_letters_a_layer(changes: dict[str, Any], pattern: str) -> None:
    from harts.backends.model.megatron.hybrid import pattern_of
    from harts.backends.model.megatron.options import transformer_config

    wanted = config(**changes, **HYBRID)
    assert pattern_of(wanted, transformer_config(wanted)) == pattern


@hybrid_only
def test_a_layer_that_did_not_run_on_the_plan_is_named_as_in_the_configuration() -> None:
    model = tiny(pattern="A", layers=2, **HYBRID)
    core = model.module.decoder.layers[2].self_attention.core_attention
    core.forward = lambda query, *_, **__: query.flatten(1)
    with pytest.raises(BackendError, match=r"did not run on compact rows: 2 \(full\)$"):
        model.forward(tensors(compact(forest(0))))


@hybrid_only
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("no_rope_freq", 2),
        ("cp_comm_type", ["p2p"] * 4),
        ("pipeline_model_parallel_layout", [["embedding", *["decoder"] * 4, "loss"]]),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"model: overrides: {name} is .*: HybridModel has"):
        tiny(overrides={name: value}, **HYBRID)


@hybrid_only
def test_fused_projections_of_latents_are_refused() -> None:
    from harts.backends.model.megatron.options import refusals, transformer_config

    options = transformer_config(config(**MLA, **HYBRID))
    options.mla_down_proj_fusion = True
    assert refusals(options) == []
    assert [each.split(":")[0] for each in refusals(options, "hybrid")] == ["mla_down_proj_fusion is True"]


@pytest.mark.skipif(served(), reason=f"megatron-core {version()} has HybridModel")
def test_a_version_without_it_is_refused_by_name() -> None:
    wanted = rf"^model: block: hybrid is for megatron-core 0\.19 and newer, megatron-core {version()} is installed$"
    with pytest.raises(ConfigError, match=wanted):
        tiny(**HYBRID)
