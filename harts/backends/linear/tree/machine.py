"""What kernels have to know of the machine."""

from __future__ import annotations

import re

import triton


def version(text: str) -> tuple[int, ...]:
    """Leading numbers of a version: `3.7.1+git` is (3, 7, 1)."""
    return tuple(int(number) for number in re.findall(r"\d+", text.partition("+")[0])[:3])


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU: slow, for tests."""
    return bool(triton.knobs.runtime.interpret)
