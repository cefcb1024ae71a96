"""Real rollouts give exactly the numbers published beside them (whole trie, one microbatch, chunks of 64)."""

import random
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from harts.ir import CompactTrie, SegmentTree
from harts.stages.ingest.jsonl import Jsonl, read_jsonl
from harts.stages.ingest.lines import read_lines
from harts.stages.ingest.records import rollout_batch
from harts.stages.ingest.trie import build_trie
from harts.stages.schedule.segments import segment_tree
from tests.shared import shared_data

CHUNK = 64


class Published(NamedTuple):
    file: str
    trajectories: int
    groups: int
    semantic: int
    compact: int
    segments: int
    replay: int
    calls: int


TABLE = [
    Published("medium/tau_trial.jsonl.gz", 200, 50, 800_729, 545_727, 322, 7_642, 3),
    Published("medium/tau_request.jsonl.gz", 2_454, 50, 7_621_208, 545_727, 322, 7_642, 3),
    Published("medium/toolbench_leaf.jsonl.gz", 156, 15, 384_691, 68_804, 301, 4_463, 5),
    Published("medium/swe_trial.jsonl.gz", 60, 60, 796_700, 789_370, 67, 3_490, 2),
    Published("medium/swe_request.jsonl.gz", 1_179, 60, 7_588_776, 881_743, 2_305, 38_873, 3),
    Published("medium/swe_step.jsonl.gz", 1_559, 142, 19_408_860, 3_383_438, 2_984, 52_825, 4),
    Published("medium/swe_all.jsonl.gz", 9_143, 142, 122_944_916, 5_083_262, 18_076, 289_136, 4),
    Published("medium/cc_request.jsonl.gz", 837, 43, 16_482_172, 861_167, 167, 2_247, 4),
    Published("quickstart/rollouts.jsonl.gz", 82, 11, 212_329, 51_123, 157, 2_934, 4),
    Published("quickstart/rollouts_dense.jsonl.gz", 82, 11, 212_329, 51_123, 157, 2_934, 4),
    Published("quickstart/synthetic.jsonl.gz", 96, 4, 46_727, 19_175, 160, 2_464, 3),
]


class Loaded(NamedTuple):
    published: Published
    trie: CompactTrie
    tree: SegmentTree


def load(file: str) -> CompactTrie:
    return Jsonl(Jsonl.Config(path=shared_data() / file)).run(None)


@pytest.fixture(scope="module", params=TABLE, ids=lambda row: Path(row.file).name.partition(".")[0])
def loaded(request):
    """One set at a time: the largest takes gigabytes."""
    trie = load(request.param.file)
    return Loaded(request.param, trie, segment_tree(trie, np.arange(len(trie.order))))


def test_semantic_and_compact_tokens(loaded):
    published, trie, _ = loaded
    trie.verify()
    trie.batch.verify()
    trie.batch.columns.verify()
    assert len(trie.order) == published.trajectories
    assert len(trie.batch.columns.groups) == published.groups
    assert trie.semantic_tokens == published.semantic
    assert trie.compact_tokens == published.compact


def test_segments_and_replay(loaded):
    published, _, tree = loaded
    tree.verify()
    children = np.bincount(tree.parent[tree.parent >= 0], minlength=len(tree.parent))
    forks = np.flatnonzero(children)
    assert len(tree.parent) == published.segments
    assert len(tree.tokens) == published.compact
    assert np.sum((children[forks] - 1) * (tree.end[forks] % CHUNK)) == published.replay


def test_calls_and_replay_of_the_plan(loaded):
    min_call = pytest.importorskip("harts.stages.call_plan.min_call")
    plan = min_call.plan_rounds(loaded.tree, CHUNK)
    assert plan.rounds == loaded.published.calls
    assert plan.replay.sum() == loaded.published.replay


def test_a_step_of_19_million_tokens_loads_in_seconds():
    begin = time.perf_counter()
    load("medium/swe_step.jsonl.gz")
    assert time.perf_counter() - begin < 10


def test_placeholder_rewards_are_unknown_and_others_kept():
    cc = read_jsonl(shared_data() / "medium/cc_request.jsonl.gz", limit=20).columns
    assert np.isnan(cc.reward).all()
    tau = read_jsonl(shared_data() / "medium/tau_trial.jsonl.gz").columns
    assert (tau.reward == 1).sum() == 84 and (tau.reward == 0).sum() == 116


@pytest.mark.parametrize("file", ["quickstart/rollouts_dense.jsonl.gz", "quickstart/synthetic.jsonl.gz"])
def test_order_of_the_records_changes_row_keys_only(file):
    records = [record for _, record in read_lines(shared_data() / file)]
    trie = build_trie(rollout_batch(records, "forward"))
    random.Random(0).shuffle(records)
    other = build_trie(rollout_batch(records, "shuffled"))
    names = [[made.batch.columns.names[i] for i in made.order] for made in (trie, other)]
    assert names[0] == names[1]
    np.testing.assert_array_equal(trie.lcp, other.lcp)
    np.testing.assert_array_equal(trie.length, other.length)
    one, two = (segment_tree(made, np.arange(len(made.order))) for made in (trie, other))
    for field in ("parent", "start", "offset", "tokens"):
        np.testing.assert_array_equal(getattr(one, field), getattr(two, field))
    tails = [dict(zip(tree.columns.names, tree.tail.tolist(), strict=True)) for tree in (one, two)]
    assert tails[0] == tails[1]
