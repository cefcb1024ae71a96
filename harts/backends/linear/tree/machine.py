"""What kernels have to know of the machine."""

from __future__ import annotations

import re

import torch
import triton


def version(text: str) -> tuple[int, ...]:
    """Leading numbers of a version: `3.7.1+git` is (3, 7, 1)."""
    return tuple(int(number) for number in re.findall(r"\d+", text.partition("+")[0])[:3])


def capability(device: str) -> tuple[int, int] | None:
    """Compute capability of a CUDA device; none for another device."""
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return None
    found: tuple[int, int] = torch.cuda.get_device_capability(device)
    return found


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU: slow, for tests."""
    return bool(triton.knobs.runtime.interpret)
