"""Gated linear attention, token by token: S_t = diag(exp g_t) S_{t-1} + k_t v_t^T, o_t = S_t^T q_t / sqrt(K).

Shapes: T packed rows, N sequences, P requested states, H heads, K and V head dims.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from harts.backends.base import LinearAttention, Need, RoundOutput
from harts.backends.linear.checks import check_call
from harts.backends.linear.dtypes import wide_dtype
from harts.backends.plan_tensors import PackedCall


class GatedLinearAttention(LinearAttention):
    """q, k, g [T, H, K] and v [T, H, V]; g is a log-decay, at most 0. Any floating dtype and device, autograd."""

    token_inputs = ("q", "k", "v", "g")
    rules = ("gla",)
    bitwise = True  # every token is computed by itself

    def why_not(self, need: Need) -> list[str]:
        """Every reason why this backend cannot serve `need`; empty if it can."""
        query_heads, value_heads = need.linear_heads
        found = []
        if need.rule != "gla":
            found.append(f"the rule is {need.rule!r}, only 'gla' is served")
        if not need.dtype.is_floating_point:
            found.append(f"the dtype {need.dtype} is not a floating-point type")
        if query_heads != value_heads:
            found.append(f"{value_heads} value heads on {query_heads} query heads: they must be as many")
        if min(need.linear_head_dims) < 1 or need.chunk_size < 1:
            found.append("head dims and the chunk size must be positive")
        return found

    def draw_inputs(self, rows: int, need: Need, draw: torch.Generator) -> dict[str, Tensor]:
        """Random valid inputs for tests, on the host."""
        (heads, _), (key_dim, value_dim) = need.linear_heads, need.linear_head_dims

        def normal(width: int) -> Tensor:
            return torch.randn(rows, heads, width, generator=draw, dtype=torch.float64)

        q, k, v, gate = normal(key_dim), normal(key_dim), normal(value_dim), normal(key_dim)
        wide = torch.promote_types(need.dtype, torch.float32)
        g = (torch.nn.functional.logsigmoid(gate) / 4).to(wide)
        return {"q": q.to(need.dtype), "k": k.to(need.dtype), "v": v.to(need.dtype), "g": g}

    def call(self, rows: dict[str, Tensor], packed: PackedCall, initial_state: Tensor, /) -> RoundOutput:
        """Run N independent sequences, each from its own state [N, H, K, V]."""
        check_call(rows, packed, initial_state)
        dtype = wide_dtype(initial_state, *rows.values())
        q, k, v, g = (rows[name].to(dtype) for name in self.token_inputs)
        outputs, taken = [], {}
        for sequence, (begin, end) in enumerate(pairwise(packed.cu_seqlens.tolist())):
            state = taken[sequence, 0] = initial_state[sequence].to(dtype)
            for t in range(begin, end):
                state = g[t, :, :, None].exp() * state + k[t, :, :, None] * v[t, :, None, :]
                outputs.append((q[t, :, :, None] * state).sum(1) * q.shape[-1] ** -0.5)
                taken[sequence, t + 1 - begin] = state
        requested = zip(packed.state_sequence.tolist(), packed.state_offset.tolist(), strict=True)
        states = [initial_state.new_zeros(0, *initial_state.shape[1:], dtype=dtype)]
        states += [taken[sequence, offset][None] for sequence, offset in requested]
        return RoundOutput(torch.stack(outputs).to(rows["v"].dtype), torch.cat(states))
