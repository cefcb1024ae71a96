"""Measure full-attention backends on the trees of one microbatch, on one GPU: parity first, then time.

    python tools/bench_attention.py --shapes mha128 mla gqa                   all workloads in three shapes
    python tools/bench_attention.py --workloads case1 none --json             two of them, one JSON object on stdout
    python tools/bench_attention.py --workloads forest --backends sdpa --flat sdpa --device cpu --dtype float32 \\
        --scale 0.02 --heads 2 --kv-heads 1 --key-dim 24 --value-dim 16

Workloads: those of tools/bench_linear.py. Backends: the registered ones, and `flex`, FlexAttention over the compact
rows with a plain block mask. A flat run is the same backend on the rows of all trajectories.

Parity, in the same run and before any time. On some query rows: outputs, and the gradients of all inputs, against
float64; errors are at most 1.1 times those of the backend's flat run (`flex` has none and is held against the worst of
the others). On all rows: results differ from those of an expanding backend by no more than rounding; two runs give
equal bits where the backend says so. A backend whose parity does not hold is not timed, and the exit status is 1.

Timed, forward and both directions, repeats interleaved: all backends, and flat runs of those named with --flat, their
inputs gathered beforehand. On a GPU, calls of the same candidate that take at least 0.2 s are queued before a timed
one, so that the device has its clock and does not wait for the host, as in a training step. TFLOP/s are of the pairs of
a query and a key that it sees. Peak memory is beside inputs, outputs and gradients; expanded MiB is what the backend
says that it holds beside the compact keys and values. What `tree` held is told from its peak, too: without what a
backward pass over compact rows takes, over the expanded keys and values.

Ratios are of medians of forward and backward. `best flat` is the faster one of the flat runs of flash_attention_4 and
tree. Its ratio is told over S / C, the rows of all trajectories over the compact rows, and over the ratio of pairs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from attention_bench.candidates import known, serving, usual
from attention_bench.measure import Settings, measure
from attention_bench.problem import Planned, Shape, planned
from attention_bench.requirements import FLATS
from attention_bench.tables import text
from bench_document import machine, refused
from linear_bench.workloads import NAMES, workload

SHAPES = {"mha128": (16, 16, 128, 128), "mla": (16, 16, 192, 128), "gqa": (16, 2, 128, 128)}
"""(query heads, key/value heads, query/key dim, value dim)."""


def main(argv: list[str] | None = None) -> int:
    """Run the command; 1 if parity fails or nothing was measured, 2 if it cannot run."""
    given = parser().parse_args(argv)
    wanted = tuple(given.backends or usual())
    settings = _settings(given)
    unknown = [name for name in (*wanted, *(given.flat or ())) if name not in known()]
    if unknown:
        return refused(f"no such backend: {', '.join(unknown)}; known: {', '.join(known())}")
    workloads = list(_planned(given))
    told = []
    for shape in _shapes(given):
        torch.compiler.reset()  # what was compiled for another shape must not make head dims symbols
        served = serving(wanted, shape, given.deterministic)
        for each in workloads:
            told.append(measure(each, shape, served, settings))
            print(text(told[-1]), end="\n\n", file=sys.stderr if given.json else sys.stdout, flush=True)
    if given.json:
        print(json.dumps(_document(given, told)))
    if not any("times_ms" in each for each in told):
        print("nothing was measured", file=sys.stderr)
        return 1
    return int(any(faults for each in told if "parity" in each for faults in each["parity"]["faults"].values()))


def parser() -> argparse.ArgumentParser:
    """All options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("--workloads", nargs="+", choices=NAMES, default=list(NAMES), help="what to run; default: all")
    add("--shapes", nargs="+", choices=SHAPES, help="several shapes in turn, instead of the four options below")
    add("--heads", type=int, default=16, help="query heads, H")
    add("--kv-heads", type=int, default=16, help="key/value heads, G")
    add("--key-dim", type=int, default=128, help="Dk, of queries and keys")
    add("--value-dim", type=int, default=128, help="Dv")
    add("--backends", nargs="+", metavar="NAME", help="registered ones, or flex; default: all but sdpa")
    add("--flat", nargs="*", metavar="NAME", help=f"whose flat runs are timed; default: {' and '.join(FLATS)}")
    bits = "ask backends that have the choice for equal bits in every run"
    add("--deterministic", action="store_true", help=bits)
    add("--device", default="cuda", help="as torch names it")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of q, k and v")
    add("--scale", type=float, default=1.0, help="factor on the sizes of workloads")
    add("--repeats", type=int, default=5, help="timed runs of each candidate")
    add("--flat-repeats", type=int, default=2, help="timed runs of flat candidates, which take long")
    add("--samples", type=int, default=192, help="query rows that are compared with float64")
    add("--seed", type=int, default=0, help="of workloads and inputs")
    shared = Path(__file__).resolve().parents[2] / "shared" / "data"
    add("--shared", type=Path, default=shared, help="folder with paper_cases.json and tools/gen_claude_like.py")
    add("--json", action="store_true", help="one JSON object on stdout; the tables go to stderr")
    return made


def _settings(given: argparse.Namespace) -> Settings:
    return Settings(
        tuple(FLATS if given.flat is None else given.flat), given.samples, given.repeats, given.flat_repeats, given.seed
    )


def _planned(given: argparse.Namespace) -> Iterator[Planned]:
    """Workloads, each planned once for all shapes; those that need absent data are told and left out."""
    for name in given.workloads:
        try:
            yield planned(workload(name, given.shared, given.seed, given.scale))
        except FileNotFoundError as error:
            print(f"{name}: skipped: {error}", file=sys.stderr)


def _shapes(given: argparse.Namespace) -> list[Shape]:
    sizes = [SHAPES[name] for name in given.shapes or ()]
    sizes = sizes or [(given.heads, given.kv_heads, given.key_dim, given.value_dim)]
    return [Shape(*each, getattr(torch, given.dtype), given.device) for each in sizes]


def _document(given: argparse.Namespace, told: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything that is known, for a program."""
    settings = {name: value for name, value in vars(given).items() if name not in {"json", "shared"}}
    packages = ("harts", "torch", "triton", "flash-attn-4", "transformer-engine", "nvidia-cudnn-cu13")
    return {
        "settings": settings,
        **machine(given.device, packages),
        "results": told,
    }


if __name__ == "__main__":
    sys.exit(main())
