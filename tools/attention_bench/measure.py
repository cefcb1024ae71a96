"""One workload in one shape: plan, parity, times, memory, and what the requirements say of them."""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

from attention_bench.candidates import FLEX, Served
from attention_bench.parity import Parity, check, free
from attention_bench.problem import Planned, Problem, Shape, problem, upstream
from attention_bench.requirements import TREE, ratios, requirements
from attention_bench.timing import Candidate, Measured, measure_all
from harts.backends.base import FullAttention
from harts.backends.full.costs import forward_flops, pass_flops

TILE = 256
"""Rows of the largest tile."""


class Settings(NamedTuple):
    """What holds for all workloads and shapes."""

    flats: tuple[str, ...]
    """Backends whose flat runs are timed."""
    samples: int
    repeats: int
    flat_repeats: int
    seed: int


def measure(planned: Planned, shape: Shape, served: Served, settings: Settings) -> dict[str, Any]:
    """Figures of one workload in one shape; a backend whose parity does not hold has no times."""
    workload, backends = planned.workload, served.backends
    told: dict[str, Any] = {"workload": workload.name, "shape": shape.figures(), "skipped": served.refused}
    if not backends:
        return told
    given = problem(planned, shape, settings.seed)
    told["plan"] = {**given.figures(), "compression": workload.compression, "pair_ratio": _pair_ratio(given)}
    parity = check(given, backends, {FLEX}, settings.samples, settings.seed + 1)
    told["parity"] = _parity(parity)
    told["cost"] = {name: each.cost(given.compact.views, shape.need())._asdict() for name, each in backends.items()}
    expanding = [name for name, backend in backends.items() if backend.expands]
    sound = {name: backends[name] for name in parity.sound()}
    if sound:
        gc.collect()
        free(shape)
        measured = measure_all(_candidates(given, sound, settings), shape)
        told |= _figures(given, measured)
        found, best = ratios(told["times_ms"], workload.compression, _pair_ratio(given), expanding)
        told |= {
            "best": best,
            "ratios": found,
            "requirements": requirements(workload.name, found, told["cost"], _held(given, told["memory_bytes"])),
        }
    del given
    gc.collect()
    free(shape)
    return told


def _candidates(given: Problem, sound: dict[str, FullAttention], settings: Settings) -> list[Candidate]:
    grad = upstream(given, settings.seed + 3)
    made = [Candidate(name, each, given.compact, grad, settings.repeats) for name, each in sound.items()]
    flats = [name for name in settings.flats if name in sound]
    if flats:
        of_flat = grad.index_select(0, given.compact_row)
        made += [Candidate(f"flat:{name}", sound[name], given.flat, of_flat, settings.flat_repeats) for name in flats]
    return made


def _figures(given: Problem, measured: dict[str, Measured]) -> dict[str, Any]:
    """Times, rates of useful operations, and peaks of memory."""
    need = given.shape.need()
    times = {name: each.times.summary() for name, each in measured.items()}
    rates = {}
    for name, each in times.items():
        pairs = (given.flat if name.startswith("flat:") else given.compact).views.pairs
        useful = {"forward": forward_flops(pairs, need), "both": pass_flops(pairs, need)}
        rates[name] = {which: useful[which] / each[which]["median"] / 1e9 for which in useful}
    return {
        "times_ms": times,
        "tflops": rates,
        "memory_bytes": {name: each.peak for name, each in measured.items() if each.peak is not None},
    }


def _held(given: Problem, peaks: dict[str, int]) -> float | None:
    """Of the expanded keys and values, what a backend's peak has beside a backward pass over compact rows."""
    if TREE not in peaks:
        return None
    shape = given.shape
    expanded = int(given.compact.views.cu_k[-1]) * shape.kv_heads * (shape.key_dim + shape.value_dim)
    return max(0, peaks[TREE] - compact_bytes(shape, given.compact.views.rows)) / (expanded * shape.dtype.itemsize)


def compact_bytes(shape: Shape, rows: int) -> int:
    """What a backward pass holds beside inputs, outputs and their gradients, however many branches share a row.

    A copy of the outputs' gradient; float32 sums of the gradients of queries, and of keys and values of grouped heads;
    three numbers of a row and query head; all up to whole tiles.
    """
    heads, groups, key_dim, value_dim = shape.heads, shape.kv_heads, shape.key_dim, shape.value_dim
    summed = heads * key_dim + (groups * (key_dim + value_dim) if heads != groups else 0)
    return (rows + TILE) * (heads * value_dim * shape.dtype.itemsize + 4 * (summed + 3 * heads))


def _pair_ratio(given: Problem) -> float:
    return given.flat.views.pairs / given.compact.views.pairs


def _parity(parity: Parity) -> dict[str, Any]:
    bits = {name: each._asdict() for name, each in parity.bits.items()}
    return {**parity._asdict(), "bits": bits}
