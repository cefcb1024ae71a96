"""Index arrays from the host to a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def place(array: np.ndarray | Tensor, device: Any) -> Tensor:
    """A host array as a tensor of a device; arrays of numpy are copied.

    The host does not wait for what is queued there, as it would for memory that is not pinned: so that it can prepare a
    microbatch while the device computes the one before.
    """
    if isinstance(array, np.ndarray):
        array = torch.from_numpy(np.array(array))
    if torch.device(device).type != "cuda":
        return array.to(device)
    return array.pin_memory().to(device, non_blocking=True)
