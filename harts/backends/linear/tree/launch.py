"""Launching kernels with pinned configurations: no autotuner runs, and every rank and run launches the same code."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from triton.runtime.autotuner import Autotuner, Heuristics

from harts.backends.linear.sizes import power_of_two
from harts.errors import ConfigError

with warnings.catch_warnings():  # that there is no GPU is for `why_not` to say
    warnings.simplefilter("ignore")
    import_module("fla.utils")

DEFAULT = "default"
"""Name of a kernel's configuration for head dims that have none of their own."""

DEFAULTED = {"num_warps", "num_stages"}
"""What a configuration need not say: Triton has values of its own."""

Config = Mapping[str, int]
"""Block sizes, num_warps and num_stages of one launch."""


@dataclass(frozen=True)
class KernelConfigs:
    """Configuration of every kernel on one GPU."""

    device: str
    """Name of the GPU, as torch gives it."""
    kernels: Mapping[str, Mapping[str, Config]]
    """Kernel name -> `KxV` (powers of two), `Kxany` or `default`, the first that is there -> configuration."""

    def of(self, kernel: str, head_dims: tuple[int, int]) -> Config:
        """Configuration of a kernel for head dims (K, V)."""
        found = self.kernels[kernel]
        key = head_dims_key(head_dims)
        any_value_dim = key.split("x")[0] + "xany"
        return found.get(key, found.get(any_value_dim, found[DEFAULT]))


def head_dims_key(head_dims: tuple[int, int]) -> str:
    """Name of the configuration for head dims (K, V): kernels are compiled for the next powers of two."""
    return "x".join(str(power_of_two(dim)) for dim in head_dims)


@dataclass(frozen=True)
class Launcher:
    """Launches kernels for one pair of head dims (K, V)."""

    configs: KernelConfigs
    head_dims: tuple[int, int]

    def config(self, kernel: Any) -> Config:
        """Pinned configuration of a kernel."""
        return self.configs.of(kernel.__name__, self.head_dims)

    def run(self, kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
        """Launch a kernel on a grid; an empty grid is nothing to do."""
        if all(grid):
            kernel[grid](**arguments, **self.config(kernel))


def bare(kernel: Any) -> Any:
    """The compiled function under the autotuner and the heuristics of a library's kernel."""
    while isinstance(kernel, Autotuner | Heuristics):
        kernel = kernel.fn
    return kernel


def read_configs(path: str | Path) -> KernelConfigs:
    """Read a file that `harts tune` has written.

    Raises:
        ConfigError: the file is missing, is not JSON, or lacks a kernel's default configuration.
    """
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
        kernels = {name: {key: dict(config) for key, config in each.items()} for name, each in table["kernels"].items()}
        configs = KernelConfigs(str(table["device"]), kernels)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"kernel_configs: {path} cannot be read: {type(error).__name__}: {error}") from error
    bad = sorted(name for name, each in kernels.items() if DEFAULT not in each)
    if bad:
        raise ConfigError(f"kernel_configs: {path} has no default configuration of {', '.join(bad)}")
    return configs


def faults_of(configs: KernelConfigs, kernels: Iterable[str]) -> list[str]:
    """Kernels of which a table says nothing, or not all block sizes that the shipped ones say."""
    known = read_configs(next(iter(shipped().values()))).kernels
    found = []
    for name in kernels:
        if name not in configs.kernels:
            found.append(f"nothing is said of {name}")
            continue
        for key, config in configs.kernels[name].items():
            missing = sorted(set(known[name][DEFAULT]) - set(config) - DEFAULTED)
            if missing:
                found.append(f"{name} for {key} lacks {', '.join(missing)}")
    return found


def shipped() -> dict[str, Path]:
    """Shipped tables: GPU name as torch gives it -> file."""
    folder = Path(str(files("harts.backends.linear.tree").joinpath("configs")))
    return {json.loads(path.read_text(encoding="utf-8"))["device"]: path for path in sorted(folder.glob("*.json"))}


@cache
def configs_for(device: torch.device, path: str | None) -> KernelConfigs:
    """The table named by the user, or the shipped one of a GPU.

    Without a GPU kernels are interpreted, and the configuration decides nothing but block sizes: any table serves.

    Raises:
        ConfigError: no table is shipped for the GPU, or the user's is of another one.
    """
    tables = shipped()
    if device.type != "cuda":
        return read_configs(path or next(iter(tables.values())))
    name = torch.cuda.get_device_name(device)
    if path is None:
        if name not in tables:
            raise ConfigError(
                f"kernel_configs: none is shipped for {name} (shipped: {', '.join(sorted(tables))}); "
                "make one with `harts tune` and name it in kernel_configs"
            )
        return read_configs(tables[name])
    configs = read_configs(path)
    if configs.device != name:
        raise ConfigError(f"kernel_configs: {path} was made on {configs.device}, this GPU is {name}")
    return configs
