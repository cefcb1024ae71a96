"""The delta rule token by token, as it is defined: the independent oracle of every chunkwise backend.

Shapes: T packed rows, N sequences, P requested states, H query and key heads, HV value heads, K and V head dims.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

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
        tokens = _tokens({name: tensor.to(dtype) for name, tensor in rows.items()})
        wanted = list(zip(packed.state_sequence.tolist(), packed.state_offset.tolist(), strict=True))
        outputs, taken = [], {}
        bounds = packed.cu_seqlens.tolist()
        for sequence, (begin, end) in enumerate(pairwise(bounds)):
            state = initial_state[sequence].to(dtype)
            for token in range(begin, end):
                taken[sequence, token - begin] = state
                output, state = _step(tokens[token], state)
                outputs.append(output)
            taken[sequence, end - begin] = state
        states = [taken[key] for key in wanted]
        shape = initial_state.shape[1:]
        return RoundOutput(
            torch.stack(outputs).to(rows["v"].dtype),
            torch.stack(states) if states else initial_state.new_zeros((0, *shape), dtype=dtype),
        )


class _Token(NamedTuple):
    """One row, every value head with its query and key."""

    q: Tensor
    """[HV, K, 1]."""
    k: Tensor
    """[HV, K, 1]."""
    v: Tensor
    """[HV, V]."""
    decay: Tensor
    """exp g, [HV, K, 1] or [HV, 1, 1]."""
    beta: Tensor
    """[HV, 1, 1]."""


def _tokens(rows: dict[str, Tensor]) -> list[_Token]:
    value_heads = rows["v"].shape[1]
    groups = value_heads // rows["k"].shape[1]
    q, k = (rows[name].repeat_interleave(groups, 1)[..., None] for name in ("q", "k"))
    decay = rows["g"].exp().reshape(len(q), value_heads, -1, 1)
    columns = (q, k, rows["v"], decay, rows["beta"][..., None, None])
    return [_Token(*each) for each in zip(*(column.unbind(0) for column in columns), strict=True)]


def _step(token: _Token, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token: output [HV, V] and the state after it [HV, K, V]."""
    state = token.decay * state
    error = token.v - (token.k * state).sum(1)
    state = state + token.beta * token.k * error[:, None]
    return (token.q * state).sum(1) * state.shape[1] ** -0.5, state
