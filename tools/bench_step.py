"""Measure one training step, HARTS against flat: parity first, then forward, backward and gradient.

    python tools/bench_step.py --model ling --microbatches 2                    claude, swe_step and none, cut
    python tools/bench_step.py --model dense --layers 8 --workloads claude none --microbatches 1 --json
    python tools/bench_step.py --model reference --workloads synthetic none     everything on a CPU, in a minute
    torchrun --nproc-per-node 4 tools/bench_step.py --model ling_megatron --topology tp2+sp+pp2+ep2

Both sides are one model object with the same kernels and full recomputation; log-probs come from the restore stage. The
flat side is the call plan `flat` on the trajectories of the same microbatches, packed whole into microbatches of the
same number of rows, each into the fullest one that has room. The loss is the sum of drawn weights times log-probs of
trained tokens, over the sum of all weights. Logits are computed of rows that predict a trained token; `--set
restore.positions=all` computes all of them.

Models: ling, ling_megatron, qwen3_next, dense, reference (pipeline files in tools/step_bench/models), or the path of a
pipeline file whose ingest stage is `batch`. Workloads: claude, a generated step of 1,551 trajectories and 42 M tokens;
none, two microbatches of eight trajectories without sharing; synthetic, the rollouts of the repository; and the sets of
the shared data by name, for instance swe_step. --microbatches N cuts a step to N microbatches of each replica that are
together nearest to the whole step in S / C, in the ratio of pairs, and in rows of a microbatch.

Parity, on the first --parity of them: loss, gradients, and the routers' z statistic and assignments against flat, and
the logits of some positions. In float32 and wider, bounds on gradients are those of the package. In 16 bits they are
what the flat run differs from itself in other microbatches (`repacked`), once more in the same ones (`rerun`), and,
unless HARTS's logits have the bits of flat's, with embeddings that are off by half a rounding step at most (`rounded`):
the gradient may be off by twice the most of them, that of each parameter by four times, or by 0.02; but by 0.5 and 0.9
at most, since one that is missing is off by 1. Routers and the mean of 1 - cosine of logits may be off by twice the
most of these, too, in every dtype; or z as the loss may be, an assignment in a thousand, and 1e-9. Megatron adds
outputs of experts in a fixed order meanwhile. A workload whose parity does not hold has no times, and the exit status
is 1.

F/B/Grad is forward (with the making of index tensors), backward, and norm and clip of the gradient. Core adds planning
on the side of HARTS: of ingest, partition and schedule the part of the tokens that were run, and call plan and layout
of these microbatches. Conversion is speedup over S / C; `F/B conversion` leaves out what is done once a step, however
many microbatches it has (the sum of gradients over processes, norm and clip), and waiting between passes. Both sides
run once before times are taken, since kernels are compiled and chosen for shapes; repeats are interleaved; the device
is not waited for within a side, and Python's collector leaves alone what was there before. Peak memory includes
parameters and gradients; whole trajectories leave more room in a microbatch than a plan does, so that what flat takes
beside them is scaled to the rows of the fullest microbatch of HARTS before peaks are compared.

A topology is sizes joined by +: tp, cp, pp, ep, dp; sp is sequence parallelism. Flat trajectories are packed into as
many microbatches for every replica. Times are the slowest process's, memory is of the process with the largest peak,
the breakdown is a mean over processes. Forward and backward are what a process computes and exchanges inside of them;
the total has the waiting between them and the sum of gradients as well. Slot imbalance is the slowest replica's time of
forward and backward over the mean, of all slots; NCCL time is that of its kernels.

The breakdown is of the microbatches that were compared, measured apart, with marks around modules and backends. `lost`
is what HARTS takes beyond flat's time over S / C. Not everything can gain S / C: attention has fewer pairs of a query
and a key by a smaller factor, and a trained token, whose logits are computed, is seldom shared. `conversion that pairs
and logits allow` is that of a run whose attention gains the one factor, whose LM head the other, and all else S / C.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench_document import machine, refused
from step_bench.measure import Settings, measure
from step_bench.models import NAMES, Loaded, load
from step_bench.processes import PROCESSES, RANK, check, gathered, gradients, overrides, surroundings
from step_bench.progress import Progress
from step_bench.tables import text
from step_bench.workloads import names, rollouts

from harts.errors import HartsError

USUAL = ("claude", "swe_step", "none")


def main(argv: list[str] | None = None) -> int:
    """Run the command; 1 if parity fails or nothing was measured, 2 if it cannot run."""
    given = parser().parse_args(argv)
    unknown = [name for name in given.workloads if name not in (*names(given.shared), *USUAL)]
    if unknown:
        return _refused(f"no such workload: {', '.join(unknown)}; known: {', '.join(names(given.shared))}")
    try:
        loaded = load(given.model, _overrides(given), given.layers)
        with surroundings(loaded.kind == "megatron"):
            return _measure_all(given, loaded)
    except HartsError as error:
        return _refused(str(error))


def _measure_all(given: argparse.Namespace, loaded: Loaded) -> int:
    """All workloads; the first process tells of them."""
    progress = Progress(given.quiet or RANK > 0)
    told: list[dict[str, Any]] = []
    progress.tell(f"building {given.model}")
    check(loaded.pipeline)
    parameters = _parameters(loaded)
    for name in given.workloads:
        try:
            found = parameters | _measured(name, loaded, given, progress)
        except FileNotFoundError as error:
            _say(f"{name}: skipped: {error}", sys.stderr)
            continue
        told.append(found)
        _say(text(found) + "\n", sys.stderr if given.json else sys.stdout)
    if given.json:
        _say(json.dumps(_document(given, loaded, told)), sys.stdout)
    if not told:
        _say("nothing was measured", sys.stderr)
    return int(not told or any(each["parity"]["faults"] for each in told))


def _say(text: str, to: Any) -> None:
    if RANK == 0:
        print(text, file=to, flush=True)


def _refused(text: str) -> int:
    return refused(text if PROCESSES == 1 else f"process {RANK}: {text}")


def parser() -> argparse.ArgumentParser:
    """All options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("--model", default="ling", help=f"{', '.join(NAMES)}, or the path of a pipeline file; default: ling")
    add("--workloads", nargs="+", default=list(USUAL), metavar="NAME", help=f"default: {' '.join(USUAL)}")
    add("--topology", help="of several processes that torchrun starts, for instance tp2+sp+pp2+ep2; for megatron")
    add("--microbatches", type=positive, metavar="N", help="cut to N microbatches a replica of HARTS; default: all")
    add("--layers", type=positive, metavar="N", help="depth of the model; default: the file's")
    add("--capacity", type=positive, metavar="T", help="rows of a microbatch; default: the file's, 65,536")
    add("--parity", type=positive, default=1, metavar="N", help="microbatches that are compared; default: 1")
    add("--samples", type=positive, default=256, help="positions whose logits are compared")
    add("--repeats", type=positive, default=3, help="timed runs of each side")
    add("--no-breakdown", dest="breakdown", action="store_false", help="leave out the breakdown, which takes two runs")
    add("--dtype", choices=("bfloat16", "float32", "float64"), help="of the model; default: the file's")
    add("--device", help="as torch names it; default: the file's")
    add("--set", action="append", default=[], metavar="A.B=C", help="replace a value of the file; may be repeated")
    add("--seed", type=int, default=0, help="of workloads, weights and samples")
    shared = Path(__file__).resolve().parents[2] / "shared" / "data"
    add("--shared", type=Path, default=shared, help="folder with tools/gen_claude_like.py and medium/")
    add("--quiet", action="store_true", help="no progress on stderr")
    add("--json", action="store_true", help="one JSON object on stdout; the tables go to stderr")
    return made


def positive(text: str) -> int:
    """A number from 1 on."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def _overrides(given: argparse.Namespace) -> list[str]:
    options = {"partition.capacity": given.capacity, "model.dtype": given.dtype, "device": given.device}
    found = [*(f"{key}={value}" for key, value in options.items() if value is not None), *given.set]
    return found if given.topology is None else [*found, *overrides(given.topology)]


def _parameters(loaded: Loaded) -> dict[str, int]:
    """Of the whole model."""
    mine = sum(each.numel() for _, each, _, counts in gradients(loaded.pipeline.env.model) if counts)
    return {"parameters": sum(gathered(mine)), "processes": PROCESSES}


def _measured(name: str, loaded: Loaded, given: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    pipeline = loaded.pipeline
    partition: Any = pipeline.settings.components["partition"].config
    settings = Settings(
        pipeline.env.device,
        given.microbatches,
        given.parity,
        given.samples,
        given.repeats,
        given.breakdown,
        given.seed,
    )
    capacity = partition.capacity or sys.maxsize
    batch = rollouts(name, given.shared, given.seed, pipeline.env.model.vocabulary, capacity)
    found = {
        "workload": name,
        "model": given.model,
        "layers": loaded.layers,
        "dtype": str(pipeline.env.dtype).removeprefix("torch."),
        "topology": given.topology or "one",
    }
    return found | measure(name, batch, loaded, settings, progress)


def _document(given: argparse.Namespace, loaded: Loaded, told: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything that is known, for a program."""
    settings = {name: value for name, value in vars(given).items() if name not in {"json", "quiet", "shared"}}
    packages = ("harts", "torch", "triton", "transformers", "fla-core", "flash-attn-4", "megatron-core")
    return {
        "settings": settings,
        "pipeline": loaded.pipeline.settings.effective(),
        **machine(loaded.pipeline.env.device, packages),
        "results": told,
    }


if __name__ == "__main__":
    sys.exit(main())
