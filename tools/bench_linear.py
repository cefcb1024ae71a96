"""Measure the linear-attention tree operator on one GPU: parity first, then time against plain FLA calls.

    python tools/bench_linear.py --rule kda                                 all workloads
    python tools/bench_linear.py --rule gdn --workloads case1 none --json   two of them, one JSON object on stdout
    python tools/bench_linear.py --rule kda --workloads forest --backend naive --device cpu --dtype float32 \\
        --scale 0.1 --heads 1 --key-dim 16 --value-dim 16 --tolerance 1e-5 --baselines

Workloads: the trees of the paper's Appendix A (case1, case2, case3), the fullest microbatch of a small generated step
(claude), the one that stands best for a step of 1,551 trajectories (step), eight trajectories of 8,192 tokens without
sharing (none), a random forest, and thousands of one-token branches (sand).

Parity, in the same run: outputs of every trajectory have the bits of the operator run on each trajectory by itself; two
runs give equal bits, gradients too; errors to a float64 oracle are at most 1.1 times those of the trajectory-wise runs
(outputs and all gradients, on the first --float64-heads heads of the full-size run); the plan's rounds run one by one
give the same outputs. A workload whose parity does not hold has no times, and the exit status is 1.

Timed, all with gradients of q, k, v, g and beta:
  fused, rounds        our operator, and the same with one call a round
  recomputed           our operator without the states of the forward pass, which the backward pass computes again
  plain                one FLA call on as many rows, packed like the tree's input sequences, nothing shared
  plain_one            the same rows as one sequence
  plain_flat_lengths   the same rows in sequences as long as the mean trajectory
  expand               one FLA call on the rows of all trajectories, gathered from compact rows; each row's first output
  depth                one FLA call for each depth of the tree, states handed over at the forks: no phase alignment
  flat                 one FLA call on the rows of all trajectories, gathered beforehand
  projections          the matrix products around the recurrence in one layer of hidden size H * K, on compact rows:
                       what `layer` ratios add on both sides
expand and flat are cut into calls of at most --rows-per-call rows, whose times are summed. Repeats are interleaved.
Before each timed call another one is queued, so that the device does not wait for the host, as in a training step.
Ratios are of medians of forward and backward.

FLA tunes its kernels at the first call, which takes minutes. Point it at tuned configurations before a run, so that
the plain call has them as well: FLA_CACHE_MODE=full FLA_CONFIG_DIR=FOLDER, and FLA_DISABLE_BACKEND_DISPATCH=1
FLA_TILELANG=0 FLA_FLASH_KDA=0.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from bench_document import machine, refused
from linear_bench.forests import CHUNK
from linear_bench.inputs import STRONGEST, Shape
from linear_bench.measure import BASELINES, Settings, measure
from linear_bench.parity import Limits, Operators
from linear_bench.tables import text
from linear_bench.workloads import NAMES

from harts.backends.base import Need
from harts.errors import ConfigError
from harts.registry import resolve


def main(argv: list[str] | None = None) -> int:
    """Run the command; 1 if parity fails or nothing was measured, 2 if it cannot run."""
    given = parser().parse_args(argv)
    # FLA keeps index tensors of four calls; more are in turn here, which would make its calls look slow
    os.environ.setdefault("FLA_TENSOR_CACHE_SIZE", "256")
    settings = _settings(given)
    try:
        operators = _operators(given)
    except ConfigError as error:
        return refused(str(error))
    reasons = operators.fused.why_not(_need(settings.shape))
    if reasons:
        return refused("\n".join(reasons))
    told = []
    for name in given.workloads:
        try:
            told.append(measure(name, operators, settings))
        except FileNotFoundError as error:
            print(f"{name}: skipped: {error}", file=sys.stderr)
            continue
        print(text(told[-1]), end="\n\n", file=sys.stderr if given.json else sys.stdout, flush=True)
    if given.json:
        print(json.dumps(_document(given, told)))
    if not told:
        print("nothing was measured", file=sys.stderr)
    return int(not told or any(each["parity"]["faults"] for each in told))


def parser() -> argparse.ArgumentParser:
    """All options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("--rule", choices=("kda", "gdn"), required=True, help="delta rule")
    add("--workloads", nargs="+", choices=NAMES, default=list(NAMES), help="what to run; default: all")
    add("--baselines", nargs="*", choices=BASELINES, default=list(BASELINES), help="what to time besides; default: all")
    add("--backend", help="registered linear-attention backend; default: the rule's name")
    add("--safe-gate", action=argparse.BooleanOptionalAction, default=True, help="kda: kernels for bounded gates")
    add("--device", default="cuda", help="as torch names it")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of q, k and v")
    add("--heads", type=int, default=16, help="query and key heads, H")
    add("--value-heads", type=int, help="HV, a multiple of H; default: H")
    add("--key-dim", type=int, default=128, help="K")
    add("--value-dim", type=int, default=128, help="V")
    add("--scale", type=float, default=1.0, help="factor on the sizes of workloads")
    add("--repeats", type=int, default=10, help="timed runs of each candidate")
    add("--rows-per-call", type=int, default=6 * 65_536, help="most rows of one trajectory-wise call")
    add("--float64-heads", type=int, default=1, help="query heads that are compared with the float64 oracle")
    tolerance = "relative difference that counts as equal, for backends that do not promise bits; default 0: bits"
    add("--tolerance", type=float, default=0.0, help=tolerance)
    add("--seed", type=int, default=0, help="of workloads and inputs")
    shared = Path(__file__).resolve().parents[2] / "shared" / "data"
    add("--shared", type=Path, default=shared, help="folder with paper_cases.json and tools/gen_claude_like.py")
    add("--json", action="store_true", help="one JSON object on stdout; the tables go to stderr")
    return made


def _settings(given: argparse.Namespace) -> Settings:
    shape = Shape(
        given.rule,
        given.heads,
        given.value_heads or given.heads,
        given.key_dim,
        given.value_dim,
        getattr(torch, given.dtype),
        given.device,
    )
    limits = Limits(given.tolerance, given.float64_heads)
    return Settings(
        shape,
        given.safe_gate,
        limits,
        tuple(given.baselines),
        given.repeats,
        given.rows_per_call,
        given.seed,
        given.shared,
        given.scale,
    )


def _operators(given: argparse.Namespace) -> Operators:
    kind = resolve("linear_attention", given.backend or given.rule)
    fields = kind.Config.model_fields
    options: dict[str, Any] = {"safe_gate": given.safe_gate} if "safe_gate" in fields else {}
    rounds = kind(kind.Config(**options, execution="rounds")) if "execution" in fields else None
    recomputed = kind(kind.Config(**options, keep_states=False)) if "keep_states" in fields else None
    return Operators(kind(kind.Config(**options)), rounds, recomputed)


def _need(shape: Shape) -> Need:
    """What a model of this shape would ask of the operator; it says nothing about full attention."""
    return Need(
        device=shape.device,
        dtype=shape.dtype,
        rule=shape.rule,
        chunk_size=CHUNK,
        conv_width=4,
        linear_heads=(shape.heads, shape.value_heads),
        linear_head_dims=(shape.key_dim, shape.value_dim),
        full_heads=(shape.heads, shape.heads),
        full_head_dims=(shape.key_dim, shape.value_dim),
        least_gate=STRONGEST,
    )


def _document(given: argparse.Namespace, told: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything that is known, for a program."""
    settings = {name: value for name, value in vars(given).items() if name not in {"json", "shared"}}
    return {
        "settings": settings,
        **machine(given.device, ("harts", "torch", "triton", "fla-core")),
        "tuned": {name: os.environ.get(name) for name in ("FLA_CACHE_MODE", "FLA_CONFIG_DIR")},
        "results": told,
    }


if __name__ == "__main__":
    sys.exit(main())
