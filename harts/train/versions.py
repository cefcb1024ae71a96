"""What a run depends on beside its file: versions and the GPU. Nothing here needs torch."""

from __future__ import annotations

import platform
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = {"harts": "harts", "numpy": "numpy", "torch": "torch", "triton": "triton", "fla-core": "fla"}
"""Distribution -> module."""
IMPORTED = ("torch", "triton")
"""Modules that are asked themselves: the one that is imported may lie before the one that is installed."""


def versions() -> dict[str, str | None]:
    """Versions of Python and of `PACKAGES`; None is absent."""
    return {"python": platform.python_version()} | {name: _version(name, module) for name, module in PACKAGES.items()}


def _version(distribution: str, module: str) -> str | None:
    loaded = import_if_there(module) if module in IMPORTED else sys.modules.get(module)
    if (told := getattr(loaded, "__version__", None)) is not None:
        return str(told)
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def import_if_there(module: str) -> Any:
    """A module, or None if it cannot be imported."""
    try:
        return import_module(module)
    except ImportError:
        return None


def gpu(device: str) -> dict[str, Any]:
    """The GPU behind a device of the pipeline file; its fields are None without one."""
    found: dict[str, Any] = {"device": device, "name": None, "capability": None, "cuda": None}
    torch = import_if_there("torch")
    if torch is None:
        return found
    found["cuda"] = torch.version.cuda
    if torch.device(device).type == "cuda" and torch.cuda.is_available():
        found["name"] = torch.cuda.get_device_name(device)
        found["capability"] = "{}.{}".format(*torch.cuda.get_device_capability(device))
    return found
