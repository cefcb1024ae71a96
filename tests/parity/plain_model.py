"""The reference model once more, written the plainest way: one trajectory, token by token, no rows, views or plans.

It shares nothing with the code under test but the names of the parameters. float64 throughout.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


class RouterSums(NamedTuple):
    """Sums over the tokens of one trajectory in one MoE layer."""

    z: Tensor
    mass: Tensor
    load: Tensor


class PlainModel:
    """Logits of a trajectory from a named set of parameters."""

    def __init__(self, config: Any, parameters: dict[str, Tensor]) -> None:
        self.config = config
        self.parameters = parameters

    def weight(self, name: str) -> Tensor:
        return self.parameters[name]

    def logits(self, tokens: list[int]) -> tuple[Tensor, list[RouterSums]]:
        x = self.weight("embedding.weight")[tokens]
        sums = []
        for index, kind in enumerate(self.config.kinds):
            block = f"blocks.{index}."
            mix = self._linear if kind == "K" else self._attention
            x = x + mix(rms_norm(x, self.weight(block + "mixer_norm.weight")), block + "mixer.")
            normed = rms_norm(x, self.weight(block + "mlp_norm.weight"))
            moe = self.config.moe
            if moe is None or index < moe.dense_layers:
                x = x + self._mlp(normed, block + "mlp.")
            else:
                out, found = self._experts(normed, block + "moe.")
                x = x + out
                sums.append(found)
        return rms_norm(x, self.weight("norm.weight")) @ self.weight("head.weight").T, sums

    def _linear(self, x: Tensor, name: str) -> Tensor:
        c, count = self.config, len(x)
        heads, values, key, value = c.linear_heads, c.linear_value_heads, c.linear_key_dim, c.linear_value_dim
        mixed = self._conv(x @ self.weight(name + "qkv.weight").T, self.weight(name + "conv"))
        q, k, v = mixed.split([heads * key, heads * key, values * value], dim=1)
        share = values // heads
        q = unit(q.reshape(count, heads, key)).repeat_interleave(share, 1) / math.sqrt(key)
        k = unit(k.reshape(count, heads, key)).repeat_interleave(share, 1)
        v = v.reshape(count, values, value)
        beta = (x @ self.weight(name + "beta.weight").T).sigmoid()
        decay = self._decay(x, name)
        state, outputs = x.new_zeros(values, key, value), []
        for t in range(count):
            state = state * decay[t][..., None]
            error = v[t] - torch.einsum("hk,hkv->hv", k[t], state)
            state = state + torch.einsum("h,hk,hv->hkv", beta[t], k[t], error)
            outputs.append(torch.einsum("hk,hkv->hv", q[t], state))
        normed = rms_norm(torch.stack(outputs), self.weight(name + "norm.weight"))
        gate = (x @ self.weight(name + "gate.weight").T).reshape(count, values, value)
        gate = gate.sigmoid() if c.rule == "kda" else silu(gate)
        return (normed * gate).reshape(count, -1) @ self.weight(name + "out.weight").T

    def _decay(self, x: Tensor, name: str) -> Tensor:
        """Factor on the state at each token, [n, HV, K] or [n, HV, 1]."""
        c, rate = self.config, self.weight(name + "a_log").exp()
        if c.rule == "kda":
            raw = x @ self.weight(name + "decay.0.weight").T @ self.weight(name + "decay.1.weight").T
            step = softplus(raw + self.weight(name + "dt_bias")).reshape(len(x), c.linear_value_heads, -1)
        else:
            step = softplus(x @ self.weight(name + "decay.weight").T + self.weight(name + "dt_bias"))[..., None]
        return (-rate[:, None] * step).exp()

    @staticmethod
    def _conv(x: Tensor, taps: Tensor) -> Tensor:
        rows = []
        for t in range(len(x)):
            window = [x[s] * taps[:, s - t - 1] for s in range(max(0, t - taps.shape[1] + 1), t + 1)]
            rows.append(silu(torch.stack(window).sum(0)))
        return torch.stack(rows)

    def _attention(self, x: Tensor, name: str) -> Tensor:
        c, count = self.config, len(x)
        if c.attention == "gqa":
            q, k, v = (
                (x @ self.weight(f"{name}{part}.weight").T).reshape(count, heads, c.head_dim)
                for part, heads in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads))
            )
            q, k = rotary(q, c.rope_theta), rotary(k, c.rope_theta)
        else:
            q, k, v = self._latent(x, name)
        k, v = (part.repeat_interleave(c.heads // part.shape[1], 1) for part in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
        future = torch.ones(count, count, dtype=torch.bool).triu(1)
        mixed = torch.einsum("hij,jhd->ihd", scores.masked_fill(future, -torch.inf).softmax(-1), v)
        return mixed.reshape(count, -1) @ self.weight(name + "out.weight").T

    def _latent(self, x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        c, count = self.config, len(x)
        q = (x @ self.weight(name + "q.weight").T).reshape(count, c.heads, c.nope_dim + c.rope_dim)
        q = torch.cat([q[..., : c.nope_dim], rotary(q[..., c.nope_dim :], c.rope_theta)], -1)
        latent, shared = (x @ self.weight(name + "kv_down.weight").T).split([c.kv_rank, c.rope_dim], dim=1)
        up = rms_norm(latent, self.weight(name + "kv_norm.weight")) @ self.weight(name + "kv_up.weight").T
        k, v = up.reshape(count, c.heads, -1).split([c.nope_dim, c.value_dim], dim=2)
        rotated = rotary(shared[:, None], c.rope_theta).expand(count, c.heads, c.rope_dim)
        return q, torch.cat([k, rotated], -1), v

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        hidden = silu(x @ self.weight(name + "gate.weight").T) * (x @ self.weight(name + "up.weight").T)
        return hidden @ self.weight(name + "down.weight").T

    def _experts(self, x: Tensor, name: str) -> tuple[Tensor, RouterSums]:
        moe = self.config.moe
        logits = x @ self.weight(name + "router.weight").T
        scores = logits.softmax(-1) if moe.scoring == "softmax" else logits.sigmoid()
        bias = self.weight(name + "expert_bias")
        rows, load = [], torch.zeros(moe.experts, dtype=torch.float64)
        for t in range(len(x)):
            ranked = sorted(range(moe.experts), key=lambda e, t=t: (-float(scores[t, e].detach() + bias[e]), e))
            chosen = ranked[: moe.top_k]
            total = sum(scores[t, e] for e in chosen)
            rows.append(sum(scores[t, e] / total * self._expert(x[t], name, e) for e in chosen))
            load[chosen] += 1
        out = torch.stack(rows)
        if moe.shared_intermediate_size:
            out = out + self._mlp(x, name + "shared.")
        mass = (scores / scores.sum(-1, keepdim=True)).sum(0)
        return out, RouterSums(logits.logsumexp(-1).square().sum(), mass, load)

    def _expert(self, row: Tensor, name: str, expert: int) -> Tensor:
        size = self.config.moe.intermediate_size
        mine = slice(expert * size, (expert + 1) * size)
        gate, up = self.weight(name + "experts.gate.weight")[mine], self.weight(name + "experts.up.weight")[mine]
        return self.weight(name + "experts.down.weight")[:, mine] @ (silu(gate @ row) * (up @ row))


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def silu(x: Tensor) -> Tensor:
    return x * x.sigmoid()


def softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


def rotary(x: Tensor, theta: float) -> Tensor:
    """Rotate the two halves of each head [n, H, D] by position."""
    count, _, width = x.shape
    frequency = theta ** (-2 * torch.arange(width // 2, dtype=torch.float64) / width)
    angle = (torch.arange(count, dtype=torch.float64)[:, None] * frequency)[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
