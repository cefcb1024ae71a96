"""Random inputs of the delta rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

if TYPE_CHECKING:  # the class draws its default inputs here
    from harts.backends.base import Need


def delta_inputs(rows: int, need: Need, draw: torch.Generator) -> dict[str, Tensor]:
    """Inputs of `kda` or `gdn` on the host: q and k of length 1, log-decays of -0.2 or so, beta in (0, 1).

    Returns:
        q, k [rows, H, K] and v [rows, HV, V] in the dtype of `need`; g [rows, HV, K] or [rows, HV] and beta [rows, HV]
        in float32 or wider, as the reference model keeps them.
    """
    (heads, value_heads), (key_dim, value_dim) = need.linear_heads, need.linear_head_dims
    gates = (value_heads, key_dim) if need.rule == "kda" else (value_heads,)
    wide = torch.promote_types(need.dtype, torch.float32)

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, *shape, generator=draw, dtype=torch.float64)

    return {
        "q": normalize(normal(heads, key_dim), dim=-1).to(need.dtype),
        "k": normalize(normal(heads, key_dim), dim=-1).to(need.dtype),
        "v": normal(value_heads, value_dim).to(need.dtype),
        "g": (logsigmoid(normal(*gates)) * 0.3).to(wide),
        "beta": normal(value_heads).sigmoid().to(wide),
    }
