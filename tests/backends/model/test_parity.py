"""The model on compact rows against the same model on flat trajectories, float64."""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.backends.model.cases import (
    CHUNK,
    FORK,
    GQA,
    MLA,
    MOE,
    compact_layout,
    config,
    differences,
    execute,
    flat_layout,
    reference,
    tensors,
)
from tests.forests import random_trajectories

TOLERANCE = 1e-10

CASES: list[dict[str, Any]] = [
    {"rule": "kda", **GQA},
    {"rule": "gdn", **MLA, "linear_heads": 2},
    {"rule": "kda", **MLA, "recompute": "full"},
    {"rule": "gdn", **GQA, "recompute": "full", "pattern": "A"},
    {"rule": "kda", **MLA, "moe": {**MOE, "scoring": "sigmoid"}},
    {"rule": "kda", **GQA, "moe": {**MOE, "scoring": "softmax"}, "recompute": "full"},
    {"rule": "gdn", **MLA, "moe": {**MOE, "scoring": "softmax", "dense_layers": 1}},
    {"rule": "gdn", **GQA, "moe": {**MOE, "scoring": "sigmoid", "shared_intermediate_size": 0}, "recompute": "full"},
    {"rule": "kda", **MLA, "pattern": "K", "conv_width": 3, "moe": {**MOE, "top_k": 5}},
    {"rule": "kda", **GQA, "pattern": "KKKA", "layers": 4},
    {"rule": "gdn", **MLA, "pattern": "KKKA", "layers": 4, "moe": {**MOE, "top_k": 1}},
    {"rule": "kda", **MLA, "pattern": "AK", "layers": 4, "moe": MOE, "recompute": "full"},
]


@pytest.mark.parametrize(("seed", "changes"), list(enumerate(CASES)))
def test_compact_rows_equal_flat_trajectories(seed: int, changes: dict[str, Any]) -> None:
    trajectories = random_trajectories(random.Random(seed), CHUNK, roots=2, forks=4)
    model = reference(config(**changes))
    found = differences(execute(model, compact_layout(trajectories)), execute(model, flat_layout(trajectories)))
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize("moe", [None, MOE])
def test_recomputation_changes_nothing_and_counts_the_load_once(moe: dict[str, Any] | None) -> None:
    layout = compact_layout(FORK)
    results = [execute(reference(config(moe=moe, recompute=way)), layout) for way in ("full", "none")]
    assert max(differences(*results).values()) <= 1e-14
    if moe is not None:
        load = results[0].output.expert_load
        assert load is not None
        semantic = sum(len(each) for each in FORK)
        assert torch.equal(load.sum(1), torch.full((3,), MOE["top_k"] * semantic, dtype=torch.float64))


@pytest.mark.parametrize("changes", [{**GQA}, {**MLA, "moe": MOE}])
def test_padding_rows_change_nothing(changes: dict[str, Any]) -> None:
    model = reference(config(**changes))
    padded = compact_layout(FORK, row_multiple=64)
    assert len(padded.input_ids) == 64 > padded.rows
    found = differences(execute(model, padded), execute(model, compact_layout(FORK)))
    assert max(found.values()) <= 1e-14, found


def test_router_statistics_without_multiplicity_are_noticed() -> None:
    model = reference(config(moe=MOE))
    layout = compact_layout(FORK)
    plan = tensors(layout)
    ones = replace(plan, multiplicity=(plan.multiplicity > 0).to(torch.float64))
    found = differences(execute(model, layout, ones), execute(model, flat_layout(FORK)))
    assert found["hidden"] <= TOLERANCE
    assert min(found[name] for name in ("router_z", "router_balance", "expert_load")) > 1e-3
    assert min(grad for name, grad in found.items() if name.endswith("router.weight")) > 1e-3


@pytest.mark.parametrize("attention", [GQA, MLA])
def test_positions_taken_from_rows_are_noticed(attention: dict[str, Any]) -> None:
    model = reference(config(**attention))
    layout = compact_layout(FORK)
    rows = replace(tensors(layout), position_ids=torch.arange(len(layout.input_ids)))
    found = differences(execute(model, layout, rows), execute(model, flat_layout(FORK)))
    assert found["hidden"] > 1e-3


@pytest.mark.parametrize("moe", [None, MOE, {**MOE, "scoring": "sigmoid"}])
@pytest.mark.parametrize("changes", [{"rule": "kda", **GQA}, {"rule": "gdn", **MLA}])
def test_a_token_of_one_branch_changes_no_bit_elsewhere(changes: dict[str, Any], moe: dict[str, Any] | None) -> None:
    trajectories = random_trajectories(random.Random(5), CHUNK, roots=2, forks=5)
    layout = compact_layout(trajectories)
    model = reference(config(**changes, moe=moe))
    plan = tensors(layout)
    with torch.no_grad():
        before = model.forward(plan).hidden
        for row in random.Random(1).sample(range(layout.rows), 6):
            tokens = plan.input_ids.clone()
            tokens[row] = 23  # a token that no other row has
            after = model.forward(replace(plan, input_ids=tokens)).hidden
            changed = (before != after).any(dim=1).nonzero().flatten().tolist()
            assert changed == _descendants(layout, row)


def _descendants(layout: Any, row: int) -> list[int]:
    """The row and all that come after it in some trajectory, ascending."""
    rows, found = layout.semantic_map.rows().tolist(), set()
    offset = layout.plan.tree.columns.offset.tolist()
    for begin, end in pairwise(offset):
        path = rows[begin:end]
        if row in path:
            found |= set(path[path.index(row) :])
    return sorted(found)
