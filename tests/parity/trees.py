"""The forests of the conformance suite, and their plans."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harts.ir import CompactLayout
from harts.registry import resolve
from tests.forests import Spec, paths_of, random_trajectories, tree_of
from tests.shared import shared_data

Paths = list[list[int]]


def layout_of(paths: Paths, chunk: int, call_plan: str = "min_call", row_multiple: int = 1) -> CompactLayout:
    """All trajectories as one microbatch, through the registered stages."""
    plan, layout = resolve("call_plan", call_plan), resolve("layout", "round_major")
    planned = plan(plan.Config(chunk_size=chunk)).run(tree_of(paths))
    found: CompactLayout = layout(layout.Config(conv_width=4, row_multiple=row_multiple)).run(planned)
    found.verify()
    return found


def rows_of(layout: CompactLayout) -> Tensor:
    """Compact row of every semantic position, [S]."""
    return torch.from_numpy(layout.semantic_map.rows())


def rows_by_trajectory(layout: CompactLayout) -> list[Tensor]:
    """Compact rows of each trajectory, in the order in which the trajectories were given."""
    tree = layout.plan.tree
    parts = rows_of(layout).split(tree.columns.length.tolist())
    return [parts[i] for i in np.argsort(tree.key)]


def forests(chunk: int, count: int) -> list[Paths]:
    """Forks one before, on, and one after a chunk boundary; a chain of forks; `count` random forests."""
    around = [paths_of(fork_at(length, chunk)) for length in (chunk - 1, chunk, chunk + 1)]
    chain = paths_of([(-1, chunk + 2), (0, chunk + 1), (0, 1), (1, chunk + 1), (1, 1), (3, chunk + 1), (3, 1)])
    drawn = [random_trajectories(random.Random(seed), chunk, 1 + seed % 2, 2 + seed % 4) for seed in range(count)]
    return [*around, chain, *drawn]


def fork_at(length: int, chunk: int) -> Spec:
    """A trunk that forks after `length` tokens into a long branch, single tokens, and one more fork."""
    return [(-1, length), (0, 2 * chunk + 1), (0, 1), (0, chunk), (3, 1), (3, chunk - 1), (2, 1), (2, 2)]


def paper_case(number: str, chunk: int) -> Paths:
    """A published tree without the whole chunks of its segments, so that every fork keeps its place in a chunk."""
    cases = json.loads((shared_data() / "paper_cases.json").read_text())["cases"]
    told: dict[str, Any] = next(case for case in cases if case["case"] == number)
    known = {segment["name"]: v for v, segment in enumerate(told["segments"])} | {None: -1}
    return paths_of([(known[each["parent"]], (each["tokens"] - 1) % chunk + 1) for each in told["segments"]])
