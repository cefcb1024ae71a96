"""Rotary position embedding by positions in the original trajectory."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, position_ids: Tensor, theta: float) -> Tensor:
    """Rotate channel pairs (i, i + D/2) by position * theta^(-2i/D).

    A row's place in the batch means nothing: neighbours may be of different branches, so positions are given.

    Args:
        x: [R, H, D], D even.
        position_ids: int64, [R].
        theta: base of the frequencies.

    Returns:
        [R, H, D] in x's dtype. Angles are float64, for positions past 2^24 as well.
    """
    half = x.shape[-1] // 2
    power = torch.arange(half, dtype=torch.float64, device=x.device) / half
    angle = position_ids.to(torch.float64)[:, None] * theta**-power
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = angle.cos().to(wide)[:, None], angle.sin().to(wide)[:, None]
    first, second = x[..., :half].to(wide), x[..., half:].to(wide)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
