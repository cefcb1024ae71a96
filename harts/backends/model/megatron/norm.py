"""RMS norm with the arguments with which Megatron builds norms; its own one refuses sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from harts.backends.model.norm import widen


class RmsNorm(nn.Module):
    """Of the last dimension; torch sums in float32. Megatron's option decides whether weights are centred at 0."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **others: Any) -> None:
        super().__init__()
        self.eps = eps
        self.centred = config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.full((hidden_size,), 1.0 - self.centred, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron reads it

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to [..., hidden]."""
        if self.centred:  # 1 + weight is no bfloat16 value
            return rms_norm(widen(x), self.weight.shape, 1.0 + widen(self.weight), self.eps).to(x.dtype)
        return rms_norm(x, self.weight.shape, self.weight, self.eps)
