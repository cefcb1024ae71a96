"""Parity before speed: errors to float64 against those of the flat run, gradients of all rows, and equal bits.

Errors are relative, in the Euclidean norm. Gradients come from about --samples query rows, whose outputs and gradients
are known in float64; the flat run has each at one of the trajectories that share the row.

A gradient of a flat run is a rounded number for each trajectory; they are summed in float64, and rounded once, as every
gradient of a compact row is. An expanding backend rounds the gradients of its views besides, however few rows they come
from: it may be off by that rounding more.
"""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from attention_bench.problem import Problem, Rows, Shape, attend, upstream
from attention_bench.samples import Exact, exact, sampled_rows, seen_rows
from harts.backends.base import FullAttention

NAMES = Exact._fields
SLACK = 1.1
"""Largest error of a backend over that of its flat run."""
TINY = {torch.bfloat16: 1e-5, torch.float16: 2e-6, torch.float32: 2e-7}
"""Error that is none."""
GROSS = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4}
"""Error, or difference from another backend, that no rounding explains."""

T = TypeVar("T")


class Bits(NamedTuple):
    """Whether two runs give equal bits."""

    promised: bool
    measured: bool


class Parity(NamedTuple):
    """What was found; errors and differences are by `NAMES`."""

    faults: dict[str, list[str]]
    """Of each backend; it is sound if it has none."""
    errors: dict[str, dict[str, float]]
    """To float64; of `flat:NAME` and `flat:NAME, rounded` too."""
    reference: str | None
    """The expanding backend that the others are compared with on all rows."""
    differences: dict[str, dict[str, float]]
    """From the reference, of the other backends."""
    bits: dict[str, Bits]

    def sound(self) -> list[str]:
        """Backends without faults."""
        return [name for name, faults in self.faults.items() if not faults]


def run(backend: FullAttention, rows: Rows, grad: Tensor, shape: Shape) -> Exact:
    """Outputs of all rows and gradients of all inputs."""
    out = attend(backend, rows, shape)
    return Exact(out.detach(), *torch.autograd.grad(out, [rows.leaves[name] for name in ("q", "k", "v")], grad))


def check(
    problem: Problem, backends: dict[str, FullAttention], without_flat: set[str], samples: int, seed: int
) -> Parity:
    """Everything that must hold before a time is worth telling.

    Args:
        problem: inputs.
        backends: by name.
        without_flat: names of those without a flat run: they are held against the worst of the others.
        samples: query rows that are compared with float64.
        seed: of samples and gradients.
    """
    found = Parity({name: [] for name in backends}, {}, None, {}, {})
    _errors(problem, backends, without_flat, _Sampled(problem, samples, seed), found)
    return _dense(problem, backends, upstream(problem, seed + 1), found)


def free(shape: Shape) -> None:
    """Give memory that torch keeps for later back to the device: libraries allocate some of their own."""
    if torch.device(shape.device).type == "cuda":
        torch.cuda.empty_cache()


class _Sampled:
    """Sampled query rows, and what is known of them in float64."""

    def __init__(self, problem: Problem, samples: int, seed: int) -> None:
        self.problem = problem
        views, device = problem.compact.views, problem.shape.device
        rows = sampled_rows(views, samples, seed)
        self.rows = torch.from_numpy(rows).to(device)
        self.flat_rows = torch.from_numpy(_one_each(problem.compact_row.cpu().numpy(), rows, seed)).to(device)
        self.grad = upstream(problem, seed)[self.rows]
        leaves = problem.compact.leaves
        self.wanted = exact(leaves, self.rows, seen_rows(views, rows), self.grad, problem.shape.scale)

    def compact(self, backend: FullAttention) -> dict[str, float]:
        """Errors of a backend on compact rows."""
        found = run(backend, self.problem.compact, self._only(self.rows, self.problem.compact), self.problem.shape)
        return self._relative(found._replace(out=found.out[self.rows]))

    def flat(self, backend: FullAttention) -> tuple[dict[str, float], dict[str, float]]:
        """Errors of a backend on the rows of all trajectories; the same with gradients rounded after the sum."""
        problem = self.problem
        found = run(backend, problem.flat, self._only(self.flat_rows, problem.flat), problem.shape)
        sums = [torch.zeros_like(each) for each in self.wanted[1:]]
        for gradient, total in zip(found[1:], sums, strict=True):
            for head in range(gradient.shape[1]):  # all at once would be four times the size of the inputs
                total[:, head] = total[:, head].index_add(0, problem.compact_row, gradient[:, head].double())
        out = found.out[self.flat_rows]
        rounded = [each.to(problem.shape.dtype) for each in sums]
        return self._relative(Exact(out, *sums)), self._relative(Exact(out, *rounded))

    def rounding(self) -> dict[str, float]:
        """Errors of exact gradients that are rounded."""
        rounded = Exact(self.wanted.out, *(each.to(self.problem.shape.dtype) for each in self.wanted[1:]))
        return self._relative(rounded)

    def _only(self, rows: Tensor, given: Rows) -> Tensor:
        shape = self.problem.shape
        return self.grad.new_zeros(given.views.rows, shape.heads, shape.value_dim).index_copy_(0, rows, self.grad)

    def _relative(self, found: Exact) -> dict[str, float]:
        return {name: _relative(*pair) for name, *pair in zip(NAMES, found, self.wanted, strict=True)}


def _errors(
    problem: Problem, backends: dict[str, FullAttention], without_flat: set[str], sampled: _Sampled, into: Parity
) -> None:
    """Errors to float64 of all backends, and what is wrong with them."""
    dtype = problem.shape.dtype
    errors, rounding = into.errors, sampled.rounding()
    for name, backend in backends.items():
        if name not in without_flat:
            both = _attempt(into.faults[name], lambda each=backend: sampled.flat(each))
            if both is not None:
                errors[f"flat:{name}"], errors[f"flat:{name}, rounded"] = both
                into.faults[name] += _above(f"flat:{name}", both[0], dict.fromkeys(NAMES, GROSS[dtype]))
            free(problem.shape)
    for name, backend in backends.items():
        found = _attempt(into.faults[name], lambda each=backend: sampled.compact(each))
        if found is None:
            continue
        errors[name] = found
        again = rounding if backend.expands else dict.fromkeys(NAMES, 0.0)
        families = set(backends) - without_flat if name in without_flat else {name}
        flats = [errors[key] for each in families if (key := f"flat:{each}, rounded") in errors]
        most = {each: max((flat[each] for flat in flats), default=GROSS[dtype]) for each in NAMES}
        limit = {
            each: min(GROSS[dtype], SLACK * math.hypot(error, again[each]) + TINY[dtype])
            for each, error in most.items()
        }
        into.faults[name] += _above(name, found, limit)


def _dense(problem: Problem, backends: dict[str, FullAttention], grad: Tensor, found: Parity) -> Parity:
    """Run sound backends twice with gradients of all rows: equal bits, and differences from an expanding one."""
    shape = problem.shape
    need, dtype = shape.need(), shape.dtype
    sound = [name for name in backends if not found.faults[name]]
    sound.sort(key=lambda name: not backends[name].expands)  # expanding ones first
    reference, wanted = None, None
    for name in sound:
        backend, faults = backends[name], found.faults[name]
        pair = _attempt(faults, lambda each=backend: [run(each, problem.compact, grad, shape) for _ in range(2)])
        if pair is None:
            continue
        first, again = pair
        del pair
        differing = [each for each, *two in zip(NAMES, first, again, strict=True) if not torch.equal(*map(_bits, two))]
        found.bits[name] = bits = Bits(backend.deterministic(need), not differing)
        if bits.promised and differing:
            faults.append(f"says that two runs give equal bits, but {', '.join(differing)} differ")
        if wanted is not None:
            found.differences[name] = {each: _relative(*two) for each, *two in zip(NAMES, first, wanted, strict=True)}
            faults += _above(f"{name} from {reference}", found.differences[name], dict.fromkeys(NAMES, GROSS[dtype]))
        elif backend.expands and not faults:
            reference, wanted = name, first
    return found._replace(reference=reference)


def _above(which: str, found: dict[str, float], limit: dict[str, float]) -> Iterator[str]:
    for name, error in found.items():
        if not error <= limit[name]:
            yield f"{name}: error of {which} {error:.2e} is above {limit[name]:.2e}"


def _attempt(faults: list[str], make: Callable[[], T]) -> T | None:
    """What it gives; whatever a backend raises is a fault of its own, so that the others are measured."""
    try:
        return make()
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        faults.append(f"raised {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return None


def _one_each(compact_row: np.ndarray[Any, Any], rows: np.ndarray[Any, Any], seed: int) -> np.ndarray[Any, Any]:
    """A flat row of each compact row, any of those that it has."""
    place = np.empty(int(compact_row.max()) + 1, dtype=np.int64)
    order = np.random.default_rng([seed, 4]).permutation(len(compact_row))
    place[compact_row[order]] = order
    return place[rows]


def _relative(found: Tensor, wanted: Tensor) -> float:
    """In float64 head by head, so that nothing is held in it as a whole."""
    off = on = 0.0
    for head in range(wanted.shape[1]):
        target = wanted[:, head].double()
        off += float((found[:, head].double() - target).square().sum())
        on += float(target.square().sum())
    return float(np.sqrt(off / on)) if on else float(off > 0)


def _bits(x: Tensor) -> Tensor:
    """Its bytes: unlike numbers, they tell the two zeros apart."""
    return x.contiguous().view(torch.uint8)
