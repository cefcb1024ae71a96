"""What the benchmarks tell besides their results."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch


def machine(device: str, packages: Iterable[str]) -> dict[str, Any]:
    """Name of the device, and versions of packages; None of those that are not installed."""
    cuda = torch.device(device).type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else device,
        "versions": {name: _version(name) for name in packages},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def refused(text: str) -> int:
    """Say on stderr why a command cannot run; its exit status."""
    print(text, file=sys.stderr)
    return 2
