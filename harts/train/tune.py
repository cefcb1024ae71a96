"""Measure which launch configuration of each kernel is fastest on a GPU, and pin those whose results are right."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from triton.errors import TritonError
from triton.runtime.autotuner import Autotuner, Heuristics

from harts.backends.base import Need
from harts.backends.linear.tree.backend import TreeBackend
from harts.backends.linear.tree.launch import Config, KernelConfigs, Launcher, head_dims_key, read_configs, shipped
from harts.backends.linear.tree.states import KERNELS as STATE_KERNELS
from harts.errors import BackendError, ConfigError
from harts.pipeline import Pipeline
from harts.train.doctor import built, need_of
from harts.train.doctor_checks import Check, guarded, kernel_checks, linear_checks, operator_check, tree_backend
from harts.train.kernel_cases import Case, case, run, tuning_spec
from harts.train.precompile import precompile
from harts.train.versions import versions

DEFAULTS = "NVIDIA H200"
"""GPU whose shipped table serves where a GPU has none."""

MARGIN = 0.02
"""Gain in time below which a pinned configuration is kept: one tree and a few runs do not tell more."""


class Timer(Protocol):
    """What measures launches."""

    def time(self, launch: Callable[[], None]) -> None:
        """Launch once, and measure it."""

    def taken(self) -> float:
        """Milliseconds of everything measured since this was last asked; waits for the device."""


class CudaTimer:
    """Measures launches by events on the current stream.

    Raises:
        ConfigError: the device is no CUDA device, or it is not there.
    """

    def __init__(self, device: str) -> None:
        if torch.device(device).type != "cuda":
            raise ConfigError(f"tuning needs a CUDA device; the pipeline's is {device} (--set device=cuda)")
        if not torch.cuda.is_available():
            raise ConfigError("tuning needs a CUDA device; torch finds none")
        self.device = device
        self.events: list[tuple[Any, Any]] = []

    def time(self, launch: Callable[[], None]) -> None:  # noqa: D102  (as Timer says)
        events: Any = torch.cuda.Event
        begin, end = (events(enable_timing=True) for _ in range(2))
        begin.record()
        launch()
        end.record()
        self.events.append((begin, end))

    def taken(self) -> float:  # noqa: D102
        torch.cuda.synchronize(self.device)
        found = float(sum(begin.elapsed_time(end) for begin, end in self.events))
        self.events.clear()
        return found


class Effort(NamedTuple):
    """How much is measured."""

    rows: int
    """Compact rows of the microbatch."""
    repeats: int
    """Timed runs of each configuration, after one to compile; the best counts."""


@dataclass(frozen=True)
class _Timed(Launcher):
    """Measures the launches of one kernel, and lists all."""

    target: str
    timer: Timer
    launched: dict[str, Any]
    """Kernels by name, as they are launched."""

    def run(self, kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
        self.launched.setdefault(kernel.__name__, kernel)
        if kernel.__name__ == self.target and all(grid):
            self.timer.time(lambda: Launcher.run(self, kernel, grid, **arguments))
        else:
            super().run(kernel, grid, **arguments)


class Candidate(NamedTuple):
    """A configuration of a kernel, and what a pass takes with it."""

    config: Config
    milliseconds: float
    """Infinite if it does not compile."""


class Tuning:
    """The table as tuned so far, and what it is tuned on."""

    def __init__(self, backend: TreeBackend, need: Need, effort: Effort, timer: Timer) -> None:
        self.backend, self.need, self.effort, self.timer = backend, need, effort, timer
        self.key = head_dims_key(need.linear_head_dims)
        self.table = read_configs(base_table(need.device)[1])
        backend.launchers = lambda head_dims: Launcher(self.table, head_dims)
        self.microbatch: Case = case(backend, need, tuning_spec(effort.rows))

    def kernels(self) -> dict[str, Any]:
        """Kernels of a forward and backward pass, in the order of their first launches."""
        launched: dict[str, Any] = {}
        self._pass(self.table, "", launched)
        return launched

    def kernel(self, kernel: Any, candidates: list[Config]) -> dict[str, Any]:
        """Time all candidates, pin the first of their ranking that is right, and tell what was measured.

        Raises:
            BackendError: none of them gives right results, nor does what was pinned.
        """
        pinned = self._timed(kernel, self.table.of(kernel.__name__, self.need.linear_head_dims))
        tried = [self._timed(kernel, config) for config in candidates]
        compiled = [each for each in tried if math.isfinite(each.milliseconds)]
        for refused, each in enumerate(ranked(pinned, compiled)):
            table = with_config(self.table, kernel.__name__, self.key, each.config)
            faults = self._faults(table)
            if not faults:
                self.table = table
                return {
                    "config": dict(each.config),
                    "chosen_ms": each.milliseconds,
                    "pinned_ms": pinned.milliseconds,
                    "candidates": len(candidates),
                    "skipped": len(candidates) - len(compiled),
                    "refused": refused,
                }
        raise BackendError(f"{kernel.__name__}: no configuration of {len(candidates)} is right: harts doctor --gpu")

    def _timed(self, kernel: Any, config: Config) -> Candidate:
        table = with_config(self.table, kernel.__name__, self.key, config)
        best = math.inf
        try:
            for turn in range(self.effort.repeats + 1):
                self._pass(table, kernel.__name__, {})
                taken = self.timer.taken()
                best = min(best, taken) if turn else best  # the first run compiles
        except (TritonError, RuntimeError) as error:
            if not _does_not_compile(error):
                raise
            self.timer.taken()
            return Candidate(config, math.inf)
        return Candidate(config, best)

    def _pass(self, table: KernelConfigs, target: str, launched: dict[str, Any]) -> None:
        self._use(lambda head_dims: _Timed(table, head_dims, target, self.timer, launched))
        run(self.backend, self.microbatch)

    def _use(self, launchers: Callable[[tuple[int, int]], Launcher]) -> None:
        self.backend.launchers = launchers

    def _faults(self, table: KernelConfigs) -> list[Check]:
        """Checks of kernels and operator that fail with a table."""
        self._use(lambda head_dims: Launcher(table, head_dims))
        checks = guarded("kernels", lambda: kernel_checks(self.backend, self.need))
        checks += guarded("operator", lambda: operator_check(self.backend, self.need))
        return [check for check in checks if not check.ok]


def ranked(pinned: Candidate, tried: list[Candidate]) -> list[Candidate]:
    """Fastest first, ties in the given order; what is pinned comes before all that are not clearly faster."""
    fastest = sorted(tried, key=lambda each: each.milliseconds)
    clear = [each for each in fastest if each.milliseconds < (1 - MARGIN) * pinned.milliseconds]
    kept = [pinned] if math.isfinite(pinned.milliseconds) else []
    return clear + kept + fastest[len(clear) :]


def _does_not_compile(error: Exception) -> bool:
    """Too much shared memory, most of the time. An error of the device is none: nothing that follows could run."""
    return isinstance(error, TritonError) or "PassManager" in str(error)


def tune(
    pipeline: Pipeline,
    effort: Effort,
    timer: Timer,
    say: Callable[[str], None],
    candidates: Callable[[Any, Config], list[Config]] | None = None,
    *,
    jobs: int = 1,
) -> dict[str, Any]:
    """Tune every kernel of a pipeline's linear-attention backend for its model's head dims, one after another.

    Args:
        pipeline: of scope `all`, on the device to tune for.
        effort: how much is measured.
        timer: what measures.
        say: told of each kernel, in one line.
        candidates: configurations to try for a kernel whose pinned one is given; None: `candidates_of`.
        jobs: compilations at a time, before anything is timed; 1: each configuration is compiled when it is timed.

    Returns:
        The file's content: the table merged over the shipped one, and under `measured` what was measured.

    Raises:
        ConfigError: the backend launches no kernels that could be tuned, or cannot serve.
        BackendError: no configuration of a kernel gives right results, or all together do not.
    """
    need = need_of(pipeline)
    backend = tree_backend(built(pipeline, "linear_attention"))
    if backend is None:
        name = pipeline.settings.components["linear_attention"].name
        raise ConfigError(f"{pipeline.settings.path}: linear_attention: {name} has no kernels to tune")
    backend.launchers = lambda head_dims: Launcher(read_configs(base_table(need.device)[1]), head_dims)
    faults = backend.why_not(need)
    if faults:
        raise ConfigError("\n".join(f"{pipeline.settings.path}: linear_attention: {fault}" for fault in faults))
    tuning = Tuning(backend, need, effort, timer)
    kernels = tuning.kernels()
    found = {
        name: (candidates or candidates_of)(kernel, tuning.table.of(name, need.linear_head_dims))
        for name, kernel in kernels.items()
    }
    tried = {name: configs for name, configs in found.items() if len(configs) > 1}
    if jobs > 1:
        say(f"compiling {sum(map(len, tried.values()))} configurations, {jobs} at a time")
        precompile(backend, tuning.microbatch, tuning.table, tried, jobs)
    measured: dict[str, Any] = {}
    for name, configs in tried.items():
        measured[name] = tuning.kernel(kernels[name], configs)
        say(f"{name}: {measured[name]['chosen_ms']:.3f} ms, {measured[name]['config']}")
    backend.launchers = lambda head_dims: Launcher(tuning.table, head_dims)
    wrong = [check for check in linear_checks(backend, need) if not check.ok]
    if wrong:
        raise BackendError("\n".join(f"{check.name}: {check.about}" for check in wrong))
    return tuned_table(tuning, measured)


def candidates_of(kernel: Any, pinned: Config) -> list[Config]:
    """Configurations to try: those of flash-linear-attention's autotuner on this GPU, or ours of the state kernels.

    Of the library's, only what is pinned is varied: other block sizes are arguments of our launches.
    """
    if kernel in STATE_KERNELS:
        return [
            {"BV": block, "num_warps": warps, "num_stages": stages}
            for block, warps, stages in product((16, 32, 64), (4, 8), (2, 3, 4))
        ]
    found: dict[tuple[tuple[str, int], ...], Config] = {}
    varied = {*pinned, "num_warps", "num_stages"}
    for each in _autotuned(getattr(import_module(kernel.fn.__module__), kernel.__name__)):
        config = {name: value for name, value in each.all_kwargs().items() if name in varied and value is not None}
        found.setdefault(tuple(sorted(config.items())), config)
    return list(found.values())


def _autotuned(kernel: Any) -> Iterator[Any]:
    """Configurations of the autotuner around a library's kernel."""
    while isinstance(kernel, Autotuner | Heuristics):
        if isinstance(kernel, Autotuner):
            yield from kernel.configs
        kernel = kernel.fn


def base_table(device: str) -> tuple[str, Path]:
    """Name of the GPU, and the shipped table that is tuned on: its own, or that of `DEFAULTS`."""
    tables = shipped()
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "interpreter"
    return name, tables.get(name, tables[DEFAULTS])


def with_config(table: KernelConfigs, kernel: str, key: str, config: Config) -> KernelConfigs:
    """The table with another configuration of a kernel for some head dims."""
    changed: Mapping[str, Config] = {**table.kernels[kernel], key: config}
    return replace(table, kernels={**table.kernels, kernel: changed})


def tuned_table(tuning: Tuning, measured: dict[str, Any]) -> dict[str, Any]:
    """The file's content."""
    need = tuning.need
    name, path = base_table(need.device)
    before = json.loads(path.read_text(encoding="utf-8")).get("measured", {})
    about = {
        "heads": list(need.linear_heads),
        "head_dims": list(need.linear_head_dims),
        "dtype": str(need.dtype).removeprefix("torch."),
        "rows": tuning.microbatch.plan.rows,
        "rounds": len(tuning.microbatch.plan.rounds),
        "repeats": tuning.effort.repeats,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "kernels": measured,
    }
    case_name = f"{need.rule} {tuning.key}"
    kept = {key: value for key, value in before.items() if key != case_name}  # what is measured now comes last
    kernels = {name: {key: dict(each) for key, each in found.items()} for name, found in tuning.table.kernels.items()}
    return {"device": name, "kernels": kernels, "measured": kept | {case_name: about}}


def write_tuned(table: dict[str, Any], path: Path) -> None:
    """Write the file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
