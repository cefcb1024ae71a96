"""Devices that backends ask for."""

from __future__ import annotations

import torch


def has_cuda(name: str) -> bool:
    """Whether it is a CUDA device that torch finds on this machine."""
    device = torch.device(name)
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return device.index is None or device.index < torch.cuda.device_count()


def capability(device: str) -> tuple[int, int] | None:
    """Compute capability of a CUDA device; none for another device or one that is not here."""
    if not has_cuda(device):
        return None
    found: tuple[int, int] = torch.cuda.get_device_capability(device)
    return found
