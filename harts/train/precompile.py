"""Compile configurations of kernels side by side, before they are timed one after another."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from triton import AsyncCompileMode

from harts.backends.linear.tree.backend import TreeBackend
from harts.backends.linear.tree.launch import Config, KernelConfigs, Launcher
from harts.train.kernel_cases import Case, run

MOST_JOBS = 16
"""A compilation holds Python's lock for about a fifteenth of its time: more threads wait for each other."""


def default_jobs() -> int:
    """As many as the process may use CPUs, up to `MOST_JOBS`."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cpus, MOST_JOBS)


@dataclass(frozen=True)
class _Compiling(Launcher):
    """Has a kernel compiled in every configuration to try, for the arguments of its launch; launches it as pinned."""

    tried: Mapping[str, Sequence[Config]]

    def run(self, kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
        if all(grid):
            for config in self.tried.get(kernel.__name__, ()):
                kernel.warmup(grid=grid, **arguments, **config)
        super().run(kernel, grid, **arguments)


def precompile(
    backend: TreeBackend, microbatch: Case, table: KernelConfigs, tried: Mapping[str, Sequence[Config]], jobs: int
) -> None:
    """Compile what launches of a forward and backward pass would, in threads; later launches find it in Triton's cache.

    A configuration that does not compile says so when it is launched.

    Args:
        backend: whose kernels are compiled; its launchers are replaced.
        microbatch: what the pass runs on.
        table: configurations that the pass itself is launched with, compiled before.
        tried: configurations to compile, by the kernel's name.
        jobs: compilations at a time.
    """
    backend.launchers = lambda head_dims: _Compiling(table, head_dims, tried)
    with (
        torch.autograd.set_multithreading_enabled(False),  # the mode is this thread's: the backward pass stays in it
        ThreadPoolExecutor(jobs) as threads,
        AsyncCompileMode(threads, ignore_errors=True),
    ):
        run(backend, microbatch)
