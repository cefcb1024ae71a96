"""Compare a Megatron model that is split over processes with the same model in one process, trajectory by trajectory.

    python tools/parity_matrix.py                                            all topologies, on the host
    python tools/parity_matrix.py --topologies tp2+sp pp2 --rules kda --attentions mla --json
    python tools/parity_matrix.py --device cuda --topologies tp2+sp ep2      on two GPUs

A topology is sizes joined by +: tp, cp, pp, ep, dp; sp is sequence parallelism, do the distributed optimizer. Each runs
two optimizer steps of GRPO with router losses and expert bias on random trees, on compact rows, in processes that
torchrun starts. The reference is one process that runs every trajectory by itself, q = 1: no row is shared. With do the
optimizer is Adam, whose first steps are signs of gradients, however small: there the reference is the same topology
without do.

One row a topology, rule, attention and recomputation. `gradient` is the worst |a - b| / |b| over all parameters and
both steps, |b| no less than a hundredth of the norm of all gradients; `weight` is |a - b| / |b| of the parameters after
the steps. `q=1` is one process on compact rows whose routers count each row once: it must not hold, or the comparison
sees nothing. The exit status is 1 if a row does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch
from parity_bench.rollouts import rollouts
from parity_bench.topology import ALL, ONE, Topology, topology
from parity_bench.verdict import collected, holds, verdict

import harts
from harts.ir.codec import save

HERE = Path(__file__).resolve().parent
FILE = HERE / "parity_bench" / "pipeline.yaml"
BOUND = 1e-5
"""Largest difference in float32."""
ADAM = ("train.optimizer=adamw", "train.learning_rate=0.001")
FIELDS = ("gradient", "weight", "loss", "logprob", "router", "gradient_norm")


def main(argv: list[str] | None = None) -> int:
    """Run the command; 1 if a row does not hold."""
    given = parser().parse_args(argv)
    if given.worker is not None:
        from parity_bench.worker import work  # noqa: PLC0415  (heavy)

        work(given.worker)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        rows = matrix(given, Path(folder))
    ok = all(row["ok"] for row in rows)
    if given.json:
        print(json.dumps({"rows": rows, "bound": BOUND, "device": given.device, "ok": ok}))
    return 0 if ok else 1


def matrix(given: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run everything; rows are told on stdout, or with --json on stderr, as they come."""
    print(heading(), file=_out(given), flush=True)
    rows = []
    for rule, attention, recompute in product(given.rules, given.attentions, given.recompute):
        case = {"rule": rule, "attention": attention, "recompute": recompute}
        place = folder / "-".join(case.values())
        place.mkdir()
        rows += _case(given, case, place)
    return rows


def _case(given: argparse.Namespace, case: dict[str, str], folder: Path) -> list[dict[str, Any]]:
    overrides = [f"model.{key}={value}" for key, value in case.items()] + [f"device={given.device}", *given.overrides]
    layouts = _planned(overrides, folder)
    wanted = [topology(name) for name in given.topologies]
    jobs = {
        1: [
            _job("flat", ONE, overrides, layouts["flat"]),
            _job("one", ONE, overrides, layouts["compact"]),
            _job("q=1", ONE, overrides, layouts["compact"], ones=True),
        ]
    }
    for each in wanted:
        listed = jobs.setdefault(each.processes, [])
        if not each.distributed_optimizer:
            listed.append(_job(each.name, each, overrides, layouts["compact"]))
            continue
        adam = [*overrides, *ADAM]
        listed.append(_job(each.name, each, adam, layouts["compact"]))
        listed.append(_job(f"{each.name} without", each.replicated(), adam, layouts["compact"]))
    for processes, listed in sorted(jobs.items()):
        _run(processes, listed, folder / f"of_{processes}", given.timeout)
    rows = []
    for name, processes in [("one", 1), ("q=1", 1), *((each.name, each.processes) for each in wanted)]:
        place = folder / f"of_{processes}"
        without = place / f"{name} without"
        row = {"topology": name, "processes": processes, **case}
        row |= _compared(name, place / name, without if without.exists() else folder / "of_1" / "flat")
        print(line(row), file=_out(given), flush=True)
        rows.append(row)
    return rows


def _compared(name: str, folder: Path, reference: Path) -> dict[str, Any]:
    try:
        row = verdict(collected(folder), collected(reference))
    except FileNotFoundError as error:
        return {"ok": False, "error": str(error)}
    return row | {"ok": holds(row, BOUND) != (name == "q=1")}


def _planned(overrides: list[str], folder: Path) -> dict[str, str]:
    """Files of the step's layouts, compact and flat."""
    pipeline = harts.load(FILE, overrides, scope="plan")
    made = pipeline.plan(harts.rollout_batch(rollouts(seed=3), "random"))
    found = {"compact": made, "flat": pipeline.replan(made, "flat")}
    for name, layouts in found.items():
        save(layouts, folder / f"{name}.harts")
    return {name: str(folder / f"{name}.harts") for name in found}


def _job(name: str, of: Topology, overrides: list[str], layouts: str, ones: bool = False) -> dict[str, Any]:
    return {
        "name": name,
        "file": str(FILE),
        "overrides": [*overrides, *of.overrides()],
        "layouts": layouts,
        "replicas": of.replicas,
        "ones": ones,
    }


def _run(processes: int, jobs: list[dict[str, Any]], folder: Path, timeout: float) -> None:
    """Processes of one number run their jobs one after another; what they print goes to stderr if they fail."""
    folder.mkdir()
    (folder / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *launcher, str(HERE / "parity_matrix.py"), "--worker", str(folder)]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    outputs: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment, **outputs) as launched:
        try:
            told, _ = launched.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            launched.terminate()  # and it ends its workers
            told = f"{processes} processes: not done after {timeout:.0f} s"
    if launched.returncode:
        print(told, file=sys.stderr)


def heading() -> str:
    """Names of the columns."""
    return f"{'topology':16} {'model':16} " + " ".join(f"{name:>9.9}" for name in FIELDS) + "  load bias  holds"


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    head = f"{row['topology']:16} {row['rule'] + ' ' + row['attention'] + ' ' + row['recompute']:16} "
    if "error" in row:
        return head + row["error"]
    numbers = " ".join("        -" if row[name] is None else f"{row[name]:9.1e}" for name in FIELDS)
    told = {True: "equal", False: "DIFFER"}
    text = f"{head}{numbers}  {told[row['equal_load']]} {told[row['equal_bias']]}  {'yes' if row['ok'] else 'NO'}"
    return text + ("  (is noticed)" if row["topology"] == "q=1" and row["ok"] else "")


def _out(given: argparse.Namespace) -> Any:
    return sys.stderr if given.json else sys.stdout


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--topologies", nargs="+", default=list(ALL), metavar="NAME")
    made.add_argument("--rules", nargs="+", default=["kda", "gdn"], choices=["kda", "gdn"])
    made.add_argument("--attentions", nargs="+", default=["mla", "gqa"], choices=["mla", "gqa"])
    made.add_argument("--recompute", nargs="+", default=["none", "full"], choices=["none", "full"])
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    made.add_argument("--timeout", type=float, default=900.0, help="seconds for the processes of one number")
    made.add_argument("--json", action="store_true", help="one JSON object on stdout")
    made.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return made


if __name__ == "__main__":
    raise SystemExit(main())
