"""Devices that backends ask for."""

from __future__ import annotations

import torch


def has_cuda(name: str) -> bool:
    """Whether it is a CUDA device that torch finds on this machine."""
    device = torch.device(name)
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return device.index is None or device.index < torch.cuda.device_count()
