"""What kernels have to know of the machine."""

from __future__ import annotations

import re

import torch
import triton

from harts.backends.devices import has_cuda


def version(text: str) -> tuple[int, ...]:
    """Leading numbers of a version: `3.7.1+git` is (3, 7, 1)."""
    return tuple(int(number) for number in re.findall(r"\d+", text.partition("+")[0])[:3])


def capability(device: str) -> tuple[int, int] | None:
    """Compute capability of a CUDA device; none for another device or one that is not here."""
    if not has_cuda(device):
        return None
    found: tuple[int, int] = torch.cuda.get_device_capability(device)
    return found


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU: slow, for tests."""
    return bool(triton.knobs.runtime.interpret)
