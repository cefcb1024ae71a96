"""Steps to plan: generated at the scale of Table 2 and ten times that, and real rollouts.

A step is a folder of arrays that the ingest stage `arrays` reads: tokens, offset, loss_mask, groups. It is made once,
in a process of its own, from the generator or the sets of the shared data.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harts.ir import Columns, RolloutBatch
from harts.ir.base import Bool, Int64
from harts.stages.ingest.jsonl import read_jsonl
from planner_bench.published import TABLE2

SPLIT_LOSS = 1.05
"""Ratio of a whole step over that after the split, which Table 2 gives; the generator's own assumption."""


class Step(NamedTuple):
    """What is planned at once."""

    data: str
    """table2, real or 10x."""
    step: str
    """Its name."""
    row: int | None = None
    """Of Table 2, if it was generated."""
    seed: int | None = None
    """Of the generator."""


def generated(rows: list[int], seed: int) -> list[Step]:
    """One step like each of these rows of Table 2."""
    return [Step("table2", f"table2_{row}_seed{seed}", row, seed) for row in rows]


def tenfold(seed: int) -> list[Step]:
    """Ten times the paths and tokens of row 1."""
    return [Step("10x", f"10x_seed{seed}", 1, seed)]


def real(shared: Path, names: list[str] | None) -> list[Step]:
    """The named medium sets, or all that there are."""
    found = sorted(path.name.partition(".")[0] for path in (shared / "medium").glob("*.jsonl.gz"))
    return [Step("real", name) for name in (found if names is None else names)]


def make(step: Step, shared: Path, cache: Path) -> Path:
    """The folder of a step, made if it is not there.

    Raises:
        FileNotFoundError: it has to be made, and the shared data is not where it was said to be.
    """
    folder = cache / step.step
    if folder.is_dir():
        return folder
    batch = read_jsonl(_existing(shared / "medium" / f"{step.step}.jsonl.gz")) if step.data == "real" else None
    arrays = _of_batch(batch) if batch else _generate(step, _existing(shared / "tools" / "gen_claude_like.py"))
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=cache, prefix=f".{step.step}."))
    for name, array in arrays.items():
        np.save(unfinished / f"{name}.npy", array)
    try:
        unfinished.rename(folder)
    except OSError:  # another process was first
        shutil.rmtree(unfinished)
    return folder


def load(folder: Path) -> RolloutBatch:
    """A step's trajectories in memory."""
    tokens, offset, loss_mask, groups = (
        np.load(folder / f"{name}.npy") for name in ("tokens", "offset", "loss_mask", "groups")
    )
    names = tuple(f"t{i}" for i in range(len(offset) - 1))
    tasks, group = np.unique(groups, return_inverse=True)
    columns = Columns(names, tuple(map(str, tasks.tolist())), offset, group.astype(np.int32), loss_mask)
    return RolloutBatch(folder.name, tokens, columns)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"needs {path}, which is not there; say where the shared data is with --shared")
    return path


def _of_batch(batch: RolloutBatch) -> dict[str, Any]:
    columns = batch.columns
    return {
        "tokens": batch.tokens,
        "offset": columns.offset,
        "loss_mask": columns.loss_mask,
        "groups": columns.group.astype(np.int64),
    }


def _generate(step: Step, generator: Path) -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location("gen_claude_like", generator)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert step.row is not None
    row, scale = TABLE2[step.row - 1], 10 if step.data == "10x" else 1
    made = module.generate(scale * row.paths, scale * row.raw, row.raw / row.harts * SPLIT_LOSS, step.seed)
    return {
        "tokens": made["tokens"],
        "offset": made["offsets"],
        "loss_mask": _completions(made["offsets"], made["prompt_len"]),
        "groups": made["group"].astype(np.int64),
    }


def _completions(offset: Int64, prompt: Int64) -> Bool:
    """True on the tokens after each prompt, [S]."""
    mask = np.zeros(int(offset[-1]), dtype=np.bool_)
    for start, stop in zip((offset[:-1] + prompt).tolist(), offset[1:].tolist(), strict=True):
        mask[start:stop] = True
    return mask
