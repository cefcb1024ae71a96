"""What is measured: the paper's trees, a generated microbatch, and extremes, planned by the registered stages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from step_bench.choice import chosen
from step_bench.workloads import TOKENS, existing, generated, rollouts

from harts.ir import CompactLayout, RolloutBatch, SegmentTree
from harts.ir.base import Int64
from harts.registry import resolve
from harts.stages.ingest.trie import build_trie
from linear_bench.forests import CHUNK, forest, random_forest, sand, scaled

NAMES = ("case1", "case2", "case3", "claude", "step", "none", "forest", "sand")
CASES = {"case1": "I", "case2": "II", "case3": "III"}
CAPACITY = 65_536
"""Compact tokens that the generated microbatch may hold."""
GENERATED = {"paths": 160, "raw": 4.3e6, "ratio": 5.9}
"""About a tenth of a step of the paper's Table 2, in paths and tokens, with its sharing before the split."""


class Workload(NamedTuple):
    """One microbatch, planned with the fewest calls."""

    name: str
    layout: CompactLayout

    @property
    def rows(self) -> int:
        """C."""
        return self.layout.rows

    @property
    def compression(self) -> float:
        """S / C."""
        return self.layout.plan.tree.semantic_tokens / self.layout.rows

    def figures(self) -> dict[str, int | float]:
        """What the plan comes to."""
        plan = self.layout.plan
        return {
            "trajectories": len(plan.tree.key),
            "semantic_rows": plan.tree.semantic_tokens,
            "compact_rows": self.rows,
            "compression": self.compression,
            "replay_rows": int(plan.replay.sum()),
            "segments": len(plan.segment),
            "depth": int(depths(plan.tree).max()) + 1,
            "sequences": len(plan.anchor),
            "rounds": plan.rounds,
            "states": len(plan.state_sequence),
        }


def workload(name: str, shared: Path, seed: int, scale: float) -> Workload:
    """Plan one of `NAMES`: `claude` is the fullest microbatch of a small generated step, `step` the one that is nearest
    to a whole step of 1,551 trajectories in S / C, in the ratio of pairs, and in rows.

    Args:
        name: which.
        shared: folder with paper_cases.json and tools/gen_claude_like.py.
        seed: of what is drawn.
        scale: factor on the lengths of segments, or on the numbers of branches where lengths are the point.

    Raises:
        FileNotFoundError: the shared data is needed, and is not there.
    """
    return Workload(name, planned(_tree(name, shared, seed, scale)))


def planned(tree: SegmentTree) -> CompactLayout:
    """Plan and lay out a tree with the fewest calls; without forks that is one call, each trajectory a sequence."""
    call_plan, layout = resolve("call_plan", "min_call"), resolve("layout", "round_major")
    plan = call_plan(call_plan.Config(chunk_size=CHUNK)).run(tree)
    laid_out: CompactLayout = layout(layout.Config(conv_width=4)).run(plan)
    return laid_out


def depths(tree: SegmentTree) -> Int64:
    """Ancestors of each segment, [V]."""
    depth = np.zeros(len(tree.parent), dtype=np.int64)
    for v, up in enumerate(tree.parent.tolist()):
        depth[v] = depth[up] + 1 if up >= 0 else 0
    return depth


def _tree(name: str, shared: Path, seed: int, scale: float) -> SegmentTree:
    if name == "forest":
        return random_forest(seed, scale)
    if name == "sand":
        return sand(scale)
    if name in CASES:
        tree = _paper_tree(CASES[name], existing(shared / "paper_cases.json"))
    elif name == "claude":
        tree = _fullest(shared, seed)
    elif name == "step":
        tree = _typical(shared, seed)
    else:
        tree = forest([-1] * 8, [8_192] * 8)
    return tree if scale == 1 else scaled(tree, scale)


def _paper_tree(number: str, path: Path) -> SegmentTree:
    cases = json.loads(path.read_text())["cases"]
    segments = next(case["segments"] for case in cases if case["case"] == number)
    known = {segment["name"]: v for v, segment in enumerate(segments)} | {None: -1}
    return forest([known[each["parent"]] for each in segments], [each["tokens"] for each in segments])


def _fullest(shared: Path, seed: int) -> SegmentTree:
    """The fullest microbatch of a small generated step."""
    return max(_microbatches(generated(shared, seed, **GENERATED)), key=lambda tree: len(tree.tokens))


def _typical(shared: Path, seed: int) -> SegmentTree:
    """The microbatch that stands best for a whole generated step."""
    trees = _microbatches(rollouts("claude", shared, seed, TOKENS, CAPACITY))
    return trees[chosen(trees, 1)[0]]


def _microbatches(batch: RolloutBatch) -> Sequence[SegmentTree]:
    partition, schedule = resolve("partition", "contiguous"), resolve("schedule", "slots")
    trees = schedule(schedule.Config()).run(partition(partition.Config(capacity=CAPACITY)).run(build_trie(batch)))
    made: Sequence[SegmentTree] = trees.items
    return made
