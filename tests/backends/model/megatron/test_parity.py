"""Training on compact rows is training of Megatron's own modules trajectory by trajectory: loss and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.backends.model.megatron.runs import (
    BALANCE,
    BIASED,
    CHUNK,
    GQA,
    GROUPED,
    MLA,
    MOE,
    SINGLE,
    Z,
    compact,
    errors,
    flat,
    forest,
    gradients,
    one_by_one,
    planned_loss,
    rectangle,
    tensors,
    tiny,
    without_multiplicity,
)
from tests.parity.trees import layout_of

CASES: list[dict[str, Any]] = [
    {"rule": "kda", **GQA},
    {"rule": "gdn", **MLA},
    {"rule": "kda", **MLA, "least_gate": -5.0, "moe": {**MOE, "dense_layers": 1}},
    {"rule": "gdn", **GQA, "moe": BIASED},
    {"pattern": "A", **GQA, "layers": 2, "moe": BIASED},
    {"pattern": "A", **MLA, "layers": 2, "moe": {**MOE, "shared_intermediate_size": 8}},
    {"rule": "kda", **MLA, "decay": "full", "least_gate": -5.0, "head_gate": True, **GROUPED},
    {
        "rule": "gdn",
        **GQA,
        "head_dim": 8,
        "rotary_percent": 0.5,
        "moe": {**MOE, "shared_intermediate_size": 8},
        "overrides": {"attention_output_gate": True, "qk_layernorm": True, "moe_shared_expert_gate": True},
    },
]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_compact_rows_equal_megatrons_own_batch_of_trajectories(case: int, recompute: str) -> None:
    from tests.backends.model.megatron.stock import stock, stock_loss

    model, paths = tiny(**CASES[case], recompute=recompute), rectangle(case)
    theirs = stock(model)
    wanted = gradients(theirs, stock_loss(theirs, paths))
    found = errors(one_by_one(gradients(model.module, planned_loss(model, compact(paths), paths))), wanted)
    assert max(found.values()) <= SINGLE, found


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_compact_rows_equal_flat_ones_of_ragged_trajectories(case: int, recompute: str) -> None:
    model, paths = tiny(**CASES[case], recompute=recompute), forest(case)
    ours, theirs = (planned_loss(model, each(paths), paths) for each in (compact, flat))
    assert float(ours) == pytest.approx(float(theirs), rel=SINGLE)
    found = errors(gradients(model.module, ours), gradients(model.module, theirs))
    assert max(found.values()) <= SINGLE, found


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_router_losses_without_multiplicities_are_noticed(recompute: str) -> None:
    model, paths = tiny(moe=BIASED, recompute=recompute), forest(3)
    layout = compact(paths)
    ones = planned_loss(model, layout, paths, without_multiplicity(tensors(layout)))
    found = errors(gradients(model.module, ones), gradients(model.module, planned_loss(model, flat(paths), paths)))
    assert min(error for name, error in found.items() if name.endswith("router.weight")) > 1e-2


@pytest.mark.parametrize("moe", [MOE, BIASED])
def test_statistics_equal_those_of_flat_rows_and_are_counted_once(moe: dict[str, Any]) -> None:
    paths = forest(1)
    for recompute in ("none", "full"):
        model = tiny(moe=moe, recompute=recompute)
        out, wanted = (model.forward(tensors(each(paths))) for each in (compact, flat))
        for mine, theirs in ((out.router_z, wanted.router_z), (out.router_balance, wanted.router_balance)):
            torch.testing.assert_close(mine, theirs, rtol=SINGLE, atol=0.0)
        assert torch.equal(out.expert_load, wanted.expert_load)
        assert torch.equal(out.expert_load.sum(1), torch.full((4,), 2.0 * sum(map(len, paths))))


def test_microbatches_in_flight_keep_their_own_plans() -> None:
    model = tiny(moe=BIASED, recompute="full")
    batches = [forest(seed) for seed in (4, 5)]
    layouts = [compact(paths) for paths in batches]
    alone = [gradients(model.module, planned_loss(model, *each)) for each in zip(layouts, batches, strict=True)]
    losses = [planned_loss(model, *each) for each in zip(layouts, batches, strict=True)]
    together = [gradients(model.module, loss) for loss in losses]
    for mine, wanted in zip(together, alone, strict=True):
        assert all(torch.equal(mine[name], each) for name, each in wanted.items())


def test_selective_recomputation_of_attention_changes_nothing() -> None:
    paths, selective = forest(2), {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    models = [tiny(**MLA, overrides=overrides) for overrides in ({}, selective)]
    plain, recomputed = (gradients(each.module, planned_loss(each, compact(paths), paths)) for each in models)
    assert max(errors(recomputed, plain).values()) <= 1e-6


@pytest.mark.parametrize("changes", [{**GQA}, {**MLA, "moe": BIASED}])
def test_padding_rows_change_nothing(changes: dict[str, Any]) -> None:
    model, paths = tiny(**changes), forest(0)
    padded = layout_of(paths, CHUNK, row_multiple=64)
    assert len(padded.input_ids) > padded.rows
    ours, wanted = (gradients(model.module, planned_loss(model, each, paths)) for each in (padded, compact(paths)))
    assert max(errors(ours, wanted).values()) <= 2e-6


def test_gradients_of_router_losses_follow_their_factors() -> None:
    model, layout = tiny(moe=MOE, recompute="full"), compact(forest(6))
    out = model.forward(tensors(layout))
    assert out.router_z is not None and out.router_balance is not None
    both = gradients(model.module, Z * out.router_z + BALANCE * out.router_balance)
    again = [model.forward(tensors(layout)) for _ in range(2)]
    z, balance = gradients(model.module, again[0].router_z), gradients(model.module, again[1].router_balance)
    wanted = {name: Z * z[name] + BALANCE * balance[name] for name in both}
    assert max(errors(both, wanted).values()) <= SINGLE
