"""Token mixer of the K layers: short convolution, delta rule with decay gates, gated norm.

Shape suffixes: R compact rows, H query and key heads, HV value heads, K and V head dims.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from harts.backends.base import LinearAttention
from harts.backends.linear.conv import short_conv
from harts.backends.model.config import ReferenceConfig
from harts.backends.model.norm import RmsNorm, l2norm, widen
from harts.backends.model.parameters import Draw, Projection, Seeded
from harts.backends.plan_tensors import PlanTensors


class LinearLayer(Seeded):
    """KDA or GDN. Every projection, convolution and norm is computed once a compact row; only the rule is replayed."""

    def __init__(self, config: ReferenceConfig, backend: LinearAttention) -> None:
        super().__init__()
        self.backend, self.rule = backend, config.rule
        self.heads, self.value_heads = config.linear_heads, config.linear_value_heads
        self.key_dim, self.value_dim = config.linear_key_dim, config.linear_value_dim
        self.least_gate = config.least_gate
        hidden, dtype = config.hidden_size, config.torch_dtype
        keys, values = self.heads * self.key_dim, self.value_heads * self.value_dim
        self.sizes = [keys, keys, values]
        self.qkv = Projection(hidden, sum(self.sizes), dtype)
        self.conv = nn.Parameter(torch.empty(sum(self.sizes), config.conv_width, dtype=dtype))
        self.beta = Projection(hidden, self.value_heads, dtype)
        self.gate = Projection(hidden, values, dtype)
        self.norm = RmsNorm(self.value_dim, dtype)
        self.out = Projection(values, hidden, dtype)
        self.decay: nn.Module
        if self.rule == "kda":
            gates = self.value_heads * self.key_dim
            self.decay = nn.Sequential(Projection(hidden, self.key_dim, dtype), Projection(self.key_dim, gates, dtype))
        else:
            gates = self.value_heads
            self.decay = Projection(hidden, gates, dtype)
        # decays are exponentiated over whole trajectories: bfloat16 would be too coarse
        self.a_log = nn.Parameter(torch.empty(self.value_heads, dtype=config.wide_dtype))
        self.dt_bias = nn.Parameter(torch.empty(gates, dtype=config.wide_dtype))

    def reset(self, draw: Draw) -> None:
        """Decay rates from 1 to 16, steps from 0.001 to 0.1, convolution weights as torch draws them."""
        self.a_log.copy_(draw.uniform(self.a_log, 1.0, 16.0).log())
        step = torch.pow(10.0, draw.uniform(self.dt_bias, -3.0, -1.0))
        self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # softplus of it is the step
        bound = self.conv.shape[1] ** -0.5
        self.conv.copy_(draw.uniform(self.conv, -bound, bound))

    def forward(self, x: Tensor, plan: PlanTensors) -> Tensor:
        """[R, hidden] to [R, hidden]."""
        rows = x.shape[0]
        q, k, v = torch.split(short_conv(self.qkv(x), self.conv, plan), self.sizes, dim=1)
        inputs = {
            "q": l2norm(q.reshape(rows, self.heads, self.key_dim)),
            "k": l2norm(k.reshape(rows, self.heads, self.key_dim)),
            "v": v.reshape(rows, self.value_heads, self.value_dim),
            "g": self._log_decay(x),
            "beta": widen(self.beta(x)).sigmoid(),
        }
        mixed = self.norm(self.backend.mix(inputs, plan)).to(x.dtype)
        gate = self.gate(x).reshape(rows, self.value_heads, self.value_dim)
        gated = mixed * (gate.sigmoid() if self.rule == "kda" else functional.silu(gate))
        out: Tensor = self.out(gated.reshape(rows, -1))
        return out

    def _log_decay(self, x: Tensor) -> Tensor:
        """Log decays, [R, HV, K] for kda, [R, HV] for gdn; see `ReferenceConfig.least_gate`."""
        step, rate = widen(self.decay(x)) + self.dt_bias, self.a_log.exp()
        if self.rule == "kda":
            step, rate = step.reshape(-1, self.value_heads, self.key_dim), rate[:, None]
        if self.least_gate is None:
            return -rate * functional.softplus(step)
        return self.least_gate * torch.sigmoid(rate * step)
