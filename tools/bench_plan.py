"""Measure planners against the paper's and an OR-Tools baseline, at the scale of the paper's Table 2 and on real data.

    python tools/bench_plan.py --data table2 --replicas 4 2            the ten steps, generated
    python tools/bench_plan.py --data table2 --seed 7 --json           the same of another seed, as one JSON object
    python tools/bench_plan.py --data real --settings fast paper       eight sets of real rollouts
    python tools/bench_plan.py --data 10x --settings 5s 30s paper      ten times row 1: 15,510 paths, 423 M tokens

Each step is planned with each setting in a process of its own, with a capacity of 65,536 compact tokens. Time is from
tokens in memory to the plan: sort and LCPs (trie), candidates (partition), choice of candidate and slots (slots); the
last column has the whole schedule stage in place of slots, which also makes the segment trees of all microbatches.
Before that a small step is planned once, so that neither compilation nor loading what is compiled counts. Memory is the
most that the process held until then, tokens and interpreter with it. Gaps are over the volume bound, which no
partition can be below, and over its D-th part for the slots' heaviest microbatches, summed. A plan whose work,
capacity, membership or number does not follow from the tokens alone ends the run; its figures are not shown.

The baseline's quality depends on nothing but its time limit, --or-seconds, for each task tree: CP-SAT with one worker.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from planner_bench.measure import Job, measure, warm_up
from planner_bench.published import CAPACITY, TABLE2, TABLE3
from planner_bench.steps import Step, generated, make, real, tenfold
from planner_bench.summary import Result, summaries
from planner_bench.tables import line, report
from planner_bench.verify import PlanFaultError

SETTINGS: dict[str, dict[str, Any]] = {
    "fast": {"type": "lns", "objective": "critical", "rounds": 200},
    "default": {"type": "lns", "objective": "critical"},
    "paper": {"type": "paper"},
    "5s": {"type": "lns", "objective": "critical", "rounds": 10**9, "seconds": 5.0},
    "30s": {"type": "lns", "objective": "critical", "rounds": 10**9, "seconds": 30.0},
}
"""Partition stages and their values. Where time is the limit, the result is that of a machine."""

BASELINE = "or"
USUAL = ("fast", "default", "paper", BASELINE)
"""What is measured unless --settings says otherwise."""
DATA = ("table2", "real", "10x")
Out = TypeVar("Out")


def main(argv: list[str] | None = None) -> int:
    """Run the command; 1 if a plan does not verify or nothing was measured."""
    given = parser().parse_args(argv)
    results: list[Result] = []
    try:
        for step in steps(given):
            try:
                folder = alone(make, step, given.shared, given.cache)
            except FileNotFoundError as error:
                print(f"{step.step}: skipped: {error}", file=sys.stderr)
                continue
            for job in jobs(given, step, folder):
                if all(result["setting"] != job.setting for result in results):
                    alone(warm_up, job)  # compiling takes memory, which would count in the first measurement
                results.append(alone(measure, job))
                print(line(results[-1]), file=sys.stderr)
    except PlanFaultError as fault:
        print(f"{job.step.step}, {job.setting}, D = {job.replicas}: the plan does not verify: {fault}", file=sys.stderr)
        return 1
    if not results:
        print("nothing was measured", file=sys.stderr)
        return 1
    print(json.dumps(document(given, results)) if given.json else f"{heading(given)}\n\n{report(results)}")
    return 0


def positive(text: str) -> int:
    """A number of replicas."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """All options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("--data", choices=(*DATA, "all"), default="table2", help="what to plan")
    add("--rows", type=int, nargs="+", choices=range(1, 11), default=list(range(1, 11)), help="of Table 2")
    add("--sets", nargs="+", help="of the real data; default: all")
    add("--seed", type=int, default=0, help="of generated steps")
    add("--replicas", type=positive, nargs="+", default=[4], help="D")
    add("--settings", nargs="+", choices=(*SETTINGS, BASELINE), default=list(USUAL), help="planners")
    add("--or-seconds", type=float, default=0.2, help="time limit of the baseline's solver for each task tree")
    add("--repeat", type=int, default=1, help="plan so often and take the fastest")
    shared = Path(__file__).resolve().parents[2] / "shared" / "data"
    add("--shared", type=Path, default=shared, help="folder with tools/gen_claude_like.py and medium/")
    cache = Path(tempfile.gettempdir()) / "harts_bench_plan"
    add("--cache", type=Path, default=cache, help="where generated and converted steps are kept; up to 7 GB")
    add("--json", action="store_true", help="one JSON object on stdout in place of tables")
    return made


def steps(given: argparse.Namespace) -> list[Step]:
    """What to plan, in order."""
    offered = {"table2": generated(given.rows, given.seed), "10x": tenfold(given.seed)}
    offered["real"] = real(given.shared, given.sets)
    if given.data in ("real", "all") and not offered["real"]:
        print(f"real: skipped: no sets in {given.shared / 'medium'}; say where they are with --shared", file=sys.stderr)
    return [step for data in DATA if given.data in (data, "all") for step in offered[data]]


def jobs(given: argparse.Namespace, step: Step, folder: Path) -> Iterator[Job]:
    """Every setting with every D."""
    for replicas in given.replicas:
        for setting in given.settings:
            stage = SETTINGS.get(setting)
            yield Job(step, folder, setting, stage, given.or_seconds, CAPACITY, replicas, given.repeat)


def alone(function: Callable[..., Out], *arguments: object) -> Out:
    """Call it in a process that does nothing else, which its peak memory is read from."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def heading(given: argparse.Namespace) -> str:
    """What holds for all tables."""
    return (
        f"capacity {CAPACITY:,} compact tokens; seed {given.seed}; baseline: {given.or_seconds:g} s a task tree, one "
        f"worker; fastest of {given.repeat}"
    )


def document(given: argparse.Namespace, results: list[Result]) -> dict[str, Any]:
    """Everything that is known, for a program."""
    return {
        "capacity": CAPACITY,
        "seed": given.seed,
        "or_seconds": given.or_seconds,
        "repeat": given.repeat,
        "settings": {name: SETTINGS.get(name) for name in given.settings},
        "results": results,
        "summaries": summaries(results),
        "published": {
            "table2": [row._asdict() for row in TABLE2],
            "table3": {d: {name: held._asdict() for name, held in rows.items()} for d, rows in TABLE3.items()},
        },
    }


if __name__ == "__main__":
    sys.exit(main())
