"""RMS norm with the arguments with which Megatron builds norms; its own one refuses sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm


class RmsNorm(nn.Module):
    """Of the last dimension; torch sums in float32."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **others: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron reads it

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to [..., hidden]."""
        return rms_norm(x, self.weight.shape, self.weight, self.eps)
