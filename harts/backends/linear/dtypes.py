"""The dtype of states and sums."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """The widest dtype of some tensors, float32 at least: what states and sums are kept in."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype
