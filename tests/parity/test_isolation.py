"""A branch is isolated: what another branch holds changes no bit of its outputs, and its loss sends it no gradient."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from harts.backends.base import Env
from harts.backends.plan_tensors import build_plan_tensors
from harts.ir import CompactLayout, RolloutBatch
from harts.registry import resolve
from harts.stages.ingest.trie import build_trie
from harts.stages.schedule.segments import segment_tree
from tests.forests import batch_of, paths_of, random_spec
from tests.parity.cases import CHUNK, Case
from tests.parity.rig import CONV_WIDTH, env_of

MODELS = list(itertools.product(("kda", "gdn"), ("mla", "gqa"), ("dense", "sigmoid")))


def layout_of(batch: RolloutBatch) -> CompactLayout:
    trie = build_trie(batch)
    plan = resolve("call_plan", "min_call")
    layout = resolve("layout", "round_major")
    tree = segment_tree(trie, np.arange(len(trie.order)))
    planned = plan(plan.Config(chunk_size=CHUNK)).run(tree)
    found: CompactLayout = layout(layout.Config(conv_width=CONV_WIDTH)).run(planned)
    return found


def trajectories_of(number: int) -> list[list[int]]:
    paths = paths_of(random_spec(random.Random(number), CHUNK, roots=2, forks=4))
    return [[3 * token for token in path] for path in paths]


def changed(batch: RolloutBatch, trajectory: int) -> RolloutBatch:
    """The same forest with another last token in one trajectory; shape and order stay, so the plan does too."""
    tokens = batch.tokens.copy()
    tokens[batch.columns.offset[trajectory + 1] - 1] += 1
    return RolloutBatch(batch.source, tokens, batch.columns)


def hidden_by_position(env: Env, layout: CompactLayout) -> list[Tensor]:
    """Hidden states of each trajectory, by its row in the caller's batch."""
    with torch.no_grad():
        hidden = env.model.forward(build_plan_tensors(layout, "cpu", env.dtype)).hidden
    tree = layout.plan.tree
    parts = hidden[layout.semantic_map.rows()].split(tree.columns.length.tolist())
    return [parts[i] for i in np.argsort(tree.key)]


@pytest.mark.parametrize("number", range(8))
def test_changing_a_token_of_one_branch_changes_no_bit_of_another(number: int):
    rule, attention, feed_forward = MODELS[number]
    env = env_of(Case(number, rule, attention, feed_forward, "none", 1, False), "naive")
    batch = batch_of(trajectories_of(number))
    before = hidden_by_position(env, layout_of(batch))
    moved = 0
    for trajectory in range(len(batch.columns)):
        after = hidden_by_position(env, layout_of(changed(batch, trajectory)))
        for other, (a, b) in enumerate(zip(before, after, strict=True)):
            last = len(a) - 1
            assert torch.equal(a[:last], b[:last]), f"trajectory {trajectory} changed {other}"
            assert other == trajectory or torch.equal(a, b), f"trajectory {trajectory} changed {other}"
            moved += not torch.equal(a, b)
    assert moved == len(batch.columns)


@pytest.mark.parametrize("number", range(0, 8, 3))
def test_a_loss_on_one_tree_has_no_gradient_in_another(number: int):
    rule, attention, feed_forward = MODELS[number]
    env = env_of(Case(number, rule, attention, feed_forward, "none", 1, False), "naive")
    layout = layout_of(batch_of([[1, 5, 6, 7, 8], [2, 9, 10, 11, 12, 13, 14]]))
    hidden = env.model.forward(build_plan_tensors(layout, "cpu", env.dtype)).hidden
    second = layout.semantic_map.rows()[5:]
    hidden[second].square().sum().backward()
    grad = env.model.module.embedding.weight.grad
    assert grad[[2, 9, 10, 11, 12, 13, 14]].abs().min() > 0
    assert grad[[1, 5, 6, 7, 8]].abs().max() == 0


def test_the_order_of_two_trees_changes_nothing():
    """But rounding: on some processors a row of a matrix product has other bits elsewhere in the matrix."""
    env = env_of(Case(1, "kda", "gqa", "dense", "none", 1, False), "naive")
    first, second = [1, 5, 6, 7, 8], [2, 9, 10, 11, 12, 13, 14]
    one = hidden_by_position(env, layout_of(batch_of([first, second])))
    # the second tree's tokens sort first now, so the physical order is the other way round
    relabelled = hidden_by_position(env, layout_of(batch_of([[3, *first[1:]], second])))
    torch.testing.assert_close(one[1], relabelled[1], rtol=1e-13, atol=1e-14)
