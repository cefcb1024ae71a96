"""The delta rule token by token, as it is defined: the independent oracle of every chunkwise backend.

Shapes: T packed rows, N sequences, P requested states, H query and key heads, HV value heads, K and V head dims.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from harts.backends.base import LinearAttention, Need, RoundOutput
from harts.backends.linear.checks import check_call, why_not
from harts.backends.linear.dtypes import wide_dtype
from harts.backends.plan_tensors import PackedCall


class Recurrent(LinearAttention):
    """S = Diag(exp g) S; S += beta k (v - k^T S)^T; o = S^T q K^-1/2. Any floating dtype, kda and gdn, autograd."""

    bitwise = True

    def why_not(self, need: Need) -> list[str]:
        """Every reason why this backend cannot serve `need`; empty if it can."""
        return why_not(need)

    def call(self, rows: dict[str, Tensor], packed: PackedCall, initial_state: Tensor, /) -> RoundOutput:
        """Run N independent sequences; see `LinearAttention.call`.

        Raises:
            ValueError: the call breaks the contract (shapes, an empty sequence, a state inside a chunk).
        """
        check_call(rows, packed, initial_state)
        dtype = wide_dtype(initial_state, *rows.values())
        wide = {name: tensor.to(dtype) for name, tensor in rows.items()}
        wanted = list(zip(packed.state_sequence.tolist(), packed.state_offset.tolist(), strict=True))
        outputs, taken = [], {}
        bounds = packed.cu_seqlens.tolist()
        for sequence, (begin, end) in enumerate(pairwise(bounds)):
            state = initial_state[sequence].to(dtype)
            for token in range(begin, end):
                taken[sequence, token - begin] = state
                output, state = _step({name: tensor[token] for name, tensor in wide.items()}, state)
                outputs.append(output)
            taken[sequence, end - begin] = state
        states = [taken[key] for key in wanted]
        shape = initial_state.shape[1:]
        return RoundOutput(
            torch.stack(outputs).to(rows["v"].dtype),
            torch.stack(states) if states else initial_state.new_zeros((0, *shape), dtype=dtype),
        )


def _step(token: dict[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """One token: output [HV, V] and the state after it [HV, K, V]."""
    value_heads, key_dim = state.shape[:2]
    groups = value_heads // token["k"].shape[0]
    q, k = token["q"].repeat_interleave(groups, 0), token["k"].repeat_interleave(groups, 0)
    gate = token["g"].reshape(value_heads, -1, 1)
    state = gate.exp() * state
    error = token["v"] - torch.einsum("hk,hkv->hv", k, state)
    state = state + torch.einsum("h,hk,hv->hkv", token["beta"], k, error)
    return torch.einsum("hk,hkv->hv", q, state) * key_dim**-0.5, state
