"""Trajectories of one training step: generated, real, bundled, or without any sharing."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
from planner_bench.published import TABLE2

from harts.errors import InputError
from harts.ir import Columns, RolloutBatch
from harts.ir.base import Int64
from harts.stages.ingest.jsonl import read_jsonl

GENERATED = ("claude", "none")
BUNDLED = "synthetic"
"""Rollouts in the repository, for machines without the shared data."""
RATIO = 8.0
"""Of `claude`, tokens over unique tokens of the whole step; split into microbatches of 65,536 rows it is about 5.6."""
SEQUENCES = 8
"""Trajectories of `none` that fill one microbatch."""
FULL = 2
"""Microbatches of `none`."""
TOKENS = 157_184
"""Largest vocabulary that `claude` is drawn from."""


def names(shared: Path) -> list[str]:
    """Workloads that can be made here."""
    return [*GENERATED, BUNDLED, *sorted(path.name.partition(".")[0] for path in _medium(shared).glob("*.jsonl.gz"))]


def rollouts(name: str, shared: Path, seed: int, vocabulary: int, capacity: int) -> RolloutBatch:
    """Make or read a step.

    Args:
        name: `claude`, `none`, `synthetic`, or a set of the shared data.
        shared: folder with tools/gen_claude_like.py and medium/.
        seed: of what is drawn.
        vocabulary: token ids are below it; ids of a file that are not are renumbered, which keeps what is shared.
        capacity: rows of a microbatch, which `none` fills.

    Raises:
        FileNotFoundError: the shared data is needed, and is not there.
        InputError: a trajectory is longer than the capacity, or there are more different tokens than the vocabulary.
    """
    if name == "claude":
        row = TABLE2[0]
        made = generated(shared, seed, min(vocabulary, TOKENS), paths=row.paths, raw=row.raw, ratio=RATIO)
    elif name == "none":
        made = _unshared(seed, vocabulary, capacity)
    elif name == BUNDLED:
        made = read_jsonl(Path(__file__).resolve().parents[2] / "pipelines" / "data" / "synthetic.jsonl.gz")
    else:
        made = read_jsonl(existing(_medium(shared) / f"{name}.jsonl.gz"))
    _check_lengths(made, capacity)
    return _within(made, vocabulary)


def generated(shared: Path, seed: int, vocabulary: int = TOKENS, **sizes: float) -> RolloutBatch:
    """Make a step like a coding agent's; completions are trained.

    Args:
        shared: folder with tools/gen_claude_like.py.
        seed: of what is drawn.
        vocabulary: token ids are below it.
        sizes: paths, raw tokens, and the ratio of these to unique ones.

    Raises:
        FileNotFoundError: the generator is not there.
    """
    generator = existing(shared / "tools" / "gen_claude_like.py")
    spec = importlib.util.spec_from_file_location(generator.stem, generator)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.generate(**sizes, seed=seed, vocab=vocabulary)
    offset = made["offsets"]
    length = np.diff(offset)
    position = np.arange(offset[-1]) - np.repeat(offset[:-1], length)
    return _batch("claude", made["tokens"], offset, position >= np.repeat(made["prompt_len"], length))


def _unshared(seed: int, vocabulary: int, capacity: int) -> RolloutBatch:
    """Trajectories that differ in their first token."""
    count, length = FULL * SEQUENCES, capacity // SEQUENCES
    tokens = np.random.default_rng(seed).integers(0, vocabulary, (count, length), dtype=np.int32)
    tokens[:, 0] = np.arange(count)
    return _batch("none", tokens.reshape(-1), np.arange(count + 1, dtype=np.int64) * length, np.ones(tokens.size, bool))


def _batch(name: str, tokens: Any, offset: Int64, mask: Any) -> RolloutBatch:
    count = len(offset) - 1
    columns = Columns(tuple(f"t{i}" for i in range(count)), ("g",), offset, np.zeros(count, dtype=np.int32), mask)
    return RolloutBatch(name, tokens, columns)


def _check_lengths(batch: RolloutBatch, capacity: int) -> None:
    length = batch.columns.length
    over = np.flatnonzero(length > capacity)
    if over.size:
        first = int(over[0])
        raise InputError(
            f"{batch.source}: trajectory {batch.columns.names[first]!r} has {length[first]:,} tokens, a microbatch has "
            f"{capacity:,} rows ({over.size} of {len(length)} trajectories are longer)"
        )


def _within(batch: RolloutBatch, vocabulary: int) -> RolloutBatch:
    if int(batch.tokens.max()) < vocabulary:
        return batch
    found, tokens = np.unique(batch.tokens, return_inverse=True)
    if len(found) > vocabulary:
        raise InputError(
            f"{batch.source}: has {len(found):,} different tokens, the model's vocabulary is {vocabulary:,}"
        )
    return RolloutBatch(batch.source, tokens.astype(np.int32), batch.columns)


def _medium(shared: Path) -> Path:
    return shared / "medium"


def existing(path: Path) -> Path:
    """The path of a file of the shared data.

    Raises:
        FileNotFoundError: it is not there.
    """
    if not path.is_file():
        raise FileNotFoundError(f"needs {path}, which is not there; say where the shared data is with --shared")
    return path
