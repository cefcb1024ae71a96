"""Token mixers of the A layers: grouped query attention and multi-head latent attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from harts.backends.base import FullAttention
from harts.backends.model.config import ReferenceConfig
from harts.backends.model.norm import RmsNorm
from harts.backends.model.parameters import Projection
from harts.backends.model.rope import rotate
from harts.backends.plan_tensors import PlanTensors


class GqaLayer(nn.Module):
    """`heads` query heads over `kv_heads` key/value heads; all channels are rotated."""

    def __init__(self, config: ReferenceConfig, backend: FullAttention) -> None:
        super().__init__()
        assert config.kv_heads is not None and config.head_dim is not None  # the config has checked it
        self.backend, self.theta = backend, config.rope_theta
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        hidden, dtype = config.hidden_size, config.torch_dtype
        self.q = Projection(hidden, self.heads * self.head_dim, dtype)
        self.k = Projection(hidden, self.kv_heads * self.head_dim, dtype)
        self.v = Projection(hidden, self.kv_heads * self.head_dim, dtype)
        self.out = Projection(self.heads * self.head_dim, hidden, dtype)

    def forward(self, x: Tensor, plan: PlanTensors) -> Tensor:
        """[R, hidden] to [R, hidden]."""
        rows = x.shape[0]
        q = rotate(self.q(x).reshape(rows, self.heads, self.head_dim), plan.position_ids, self.theta)
        k = rotate(self.k(x).reshape(rows, self.kv_heads, self.head_dim), plan.position_ids, self.theta)
        v = self.v(x).reshape(rows, self.kv_heads, self.head_dim)
        mixed = self.backend.attend(q, k, v, plan.views, self.head_dim**-0.5)
        out: Tensor = self.out(mixed.reshape(rows, -1))
        return out


class MlaLayer(nn.Module):
    """Keys and values from one latent a token; one rotated key part that all heads share."""

    def __init__(self, config: ReferenceConfig, backend: FullAttention) -> None:
        super().__init__()
        assert config.kv_rank is not None and config.nope_dim is not None  # the config has checked it
        assert config.rope_dim is not None and config.value_dim is not None
        self.backend, self.theta, self.heads = backend, config.rope_theta, config.heads
        self.kv_rank, self.nope_dim, self.rope_dim = config.kv_rank, config.nope_dim, config.rope_dim
        self.value_dim = config.value_dim
        hidden, dtype = config.hidden_size, config.torch_dtype
        self.q = Projection(hidden, self.heads * (self.nope_dim + self.rope_dim), dtype)
        self.kv_down = Projection(hidden, self.kv_rank + self.rope_dim, dtype)
        self.kv_norm = RmsNorm(self.kv_rank, dtype)
        self.kv_up = Projection(self.kv_rank, self.heads * (self.nope_dim + self.value_dim), dtype)
        self.out = Projection(self.heads * self.value_dim, hidden, dtype)

    def forward(self, x: Tensor, plan: PlanTensors) -> Tensor:
        """[R, hidden] to [R, hidden]."""
        rows = x.shape[0]
        dim = self.nope_dim + self.rope_dim
        q_nope, q_rope = self.q(x).reshape(rows, self.heads, dim).split([self.nope_dim, self.rope_dim], dim=2)
        latent, k_rope = self.kv_down(x).split([self.kv_rank, self.rope_dim], dim=1)
        expanded = self.kv_up(self.kv_norm(latent)).reshape(rows, self.heads, self.nope_dim + self.value_dim)
        k_nope, v = expanded.split([self.nope_dim, self.value_dim], dim=2)
        k_rope = rotate(k_rope[:, None], plan.position_ids, self.theta).expand(-1, self.heads, -1)
        q = torch.cat((q_nope, rotate(q_rope, plan.position_ids, self.theta)), dim=2)
        k = torch.cat((k_nope, k_rope), dim=2)
        mixed = self.backend.attend(q, k, v, plan.views, dim**-0.5)
        out: Tensor = self.out(mixed.reshape(rows, -1))
        return out
