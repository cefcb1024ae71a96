"""Sizes of blocks on the host; Triton's own are made for kernels, and are slow there."""

from __future__ import annotations


def ceil_div(size: int, block: int) -> int:
    """Blocks that cover `size`."""
    return -(-size // block)


def power_of_two(size: int) -> int:
    """The least power of two that is not below `size`, which is at least 1."""
    return 1 << (size - 1).bit_length()
