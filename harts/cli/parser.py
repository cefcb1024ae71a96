"""Commands and options."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from harts.cli import calibration, doctor, files, pipelines
from harts.errors import ConfigError

Command = Callable[[argparse.Namespace], int]


class _Parser(argparse.ArgumentParser):
    """Wrong usage is an error like any other: its text on stderr, or with `--json` one object on stdout."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.format_usage().rstrip()}\n{self.prog}: {message}")


def build_parser() -> argparse.ArgumentParser:
    """The parser; the chosen command is its result's `command`."""
    parser = _Parser(
        prog="harts",
        description="Prefix-sharing RL training: plan and train rollout trees, each unique token once.",
        epilog="exit code: 0 ok, 1 the run or comparison failed, 2 bad config or usage",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"harts {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, about: str, command: Command) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        added.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        added.set_defaults(command=command)
        return added

    check = add("check", "Validate a pipeline file and say every fault of it.", pipelines.check)
    _pipeline(check, planning=True)
    explain = add("explain", "Show stages, edges, configs and which backends serve; run nothing.", pipelines.explain)
    _pipeline(explain, planning=True)
    explain.add_argument(
        "--from", metavar="DUMP", dest="start", type=Path,
        help="explain a dumped plan, too; of one with layouts, what full attention costs by each backend",
    )  # fmt: skip
    plan = add("plan", "Run the planning stages; needs no torch.", pipelines.plan)
    _pipeline(plan)
    _running(plan)
    plan.add_argument("--split", metavar="DIR", type=Path, help="write the plan to DIR, one file a microbatch")
    run = add("run", "Plan, then train as the `train` section says, or compute log-probs.", pipelines.run)
    _pipeline(run)
    _running(run)
    measure = add(
        "calibrate", "Measure what microbatches cost here, for the work model `calibrated`.", calibration.calibrate
    )
    _pipeline(measure)
    _measuring(measure)
    _kernels(add)
    _files(add)
    return parser


def _pipeline(parser: argparse.ArgumentParser, planning: bool = False) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="pipeline file (YAML)")
    parser.add_argument(
        "--set", metavar="A.B=C", dest="overrides", action="append", default=[],
        help="replace a value of the file; C is YAML; may be repeated",
    )  # fmt: skip
    parser.add_argument("--print-config", action="store_true", help="print the effective values as YAML, and stop")
    if planning:
        parser.add_argument("--plan", action="store_true", help="look at the planning sections only")


def _running(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--from", metavar="DUMP", dest="start", type=Path, help="resume from a dumped value")
    parser.add_argument("--dump", metavar="DIR", type=Path, help="write the value of every edge to DIR/NN_stage.harts")
    parser.add_argument("--verify", choices=("off", "on", "roundtrip"), help="check every value between two stages")
    parser.add_argument("--quiet", action="store_true", help="no progress and no printed values on stderr")


def _measuring(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="TABLE", type=Path, help="write the table to this JSON file")
    parser.add_argument(
        "--repeats",
        metavar="N",
        type=_positive,
        default=2,
        help="timed runs of each microbatch, the fastest counts (2)",
    )
    parser.add_argument(
        "--rows", metavar="N", type=_positive, help="compact rows of the largest (a quarter of partition.capacity)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress and no printed values on stderr")


def _kernels(add: Callable[[str, str, Command], argparse.ArgumentParser]) -> None:
    about = "Print versions, say which backends serve, and check kernels against float64."
    check = add("doctor", about, doctor.doctor)
    _pipeline(check)
    check.add_argument("--gpu", action="store_true", help="run every kernel at the model's shapes and check it")
    tune = add("tune", "Measure which launch configuration of each kernel is fastest on this GPU.", doctor.tune)
    _pipeline(tune)
    tune.add_argument("--out", metavar="FILE", type=Path, required=True, help="write the table of configurations here")
    tune.add_argument(
        "--rows", metavar="N", type=_positive, default=65536, help="compact rows of what is timed (65536)"
    )
    tune.add_argument(
        "--repeats",
        metavar="N",
        type=_positive,
        default=5,
        help="timed runs of each configuration, the best counts (5)",
    )
    tune.add_argument(
        "--jobs", metavar="N", type=_positive, help="compilations at a time (one a CPU that may be used, at most 16)"
    )
    tune.add_argument("--quiet", action="store_true", help="no progress on stderr")


def _files(add: Callable[[str, str, Command], argparse.ArgumentParser]) -> None:
    inspect = add("inspect", "Print a dumped value.", files.inspect)
    inspect.add_argument("dump", metavar="DUMP", type=Path)
    form = inspect.add_mutually_exclusive_group()
    form.add_argument("--dot", action="store_true", help="as a graph in Graphviz's language")
    form.add_argument("--digest", action="store_true", help="only the hash of the content")
    inspect.add_argument(
        "--limit", metavar="LINES", type=_count, default=200, help="lines of text at most (200); 0: all"
    )
    inspect.add_argument("--item", metavar="K", type=int, help="only microbatch K, from 0, of a value a microbatch")
    diff = add("diff", "Compare two dumped values field by field; exit code 1 if they differ.", files.diff)
    diff.add_argument("first", metavar="A", type=Path)
    diff.add_argument("second", metavar="B", type=Path)
    diff.add_argument("--tolerance", type=float, help="floats may differ by this much, relative above 1 (exact)")
    diff.add_argument("--limit", metavar="LINES", type=_count, default=200, help="differences at most (200); 0: all")
    add("backends", "List every registered name, its package, and whether it can be imported.", files.backends)


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _version() -> str:
    try:
        return version("harts")
    except PackageNotFoundError:
        return "(not installed)"
