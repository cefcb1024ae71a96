"""Routed experts of a Megatron layer as two grouped products, instead of one expert after another.

Shape suffixes: E experts of this rank, T rows that came to them, expert after expert, I hidden units of an expert.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, silu

from harts.errors import ConfigError

UNSERVED = ("moe_apply_probs_on_input", "moe_latent_size", "activation_func_clamp_value", "glu_linear_offset")
"""Options of Megatron's own experts."""
ALIGNMENT = 16
"""Bytes; grouped products want rows of weights that are multiples of it."""


class GroupedExperts(MegatronModule):  # type: ignore[misc]  # megatron has no types
    """down(silu(gate(x)) * up(x)) of every expert, without biases; an expert that nobody chose has zero gradients."""

    def __init__(self, num_local_experts: int, config: Any, pg_collection: Any, **others: Any) -> None:
        super().__init__(config)
        _check(config)
        hidden, units = config.hidden_size, config.moe_ffn_hidden_size
        self.gate_up = nn.Parameter(torch.empty(num_local_experts, hidden, 2 * units, dtype=config.params_dtype))
        """Gates, then ups, [E, hidden, 2 * I]."""
        self.down = nn.Parameter(torch.empty(num_local_experts, units, hidden, dtype=config.params_dtype))
        """[E, I, hidden]."""
        for each in (self.gate_up, self.down):
            # Megatron sums gradients of experts over processes that have other rows, tensor-parallel ones included
            each.allreduce = False  # type: ignore[attr-defined]

    def forward(self, rows: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Run.

        Args:
            rows: [T, hidden].
            tokens_per_expert: rows of each expert, on the host or the device, [E].
            probs: routing weight of each row, [T].

        Returns:
            [T, hidden] times the weights, and no bias.
        """
        if not len(rows):
            return self._of_nothing(rows, probs), None
        ends = tokens_per_expert.to(rows.device).cumsum(0).to(torch.int32)
        gate, up = grouped_mm(rows, self.gate_up, offs=ends).chunk(2, dim=1)
        weighted = (silu(gate) * up * probs[:, None]).to(rows.dtype)
        return grouped_mm(weighted, self.down, offs=ends), None

    def _of_nothing(self, rows: Tensor, probs: Tensor) -> Tensor:
        """No row came to this rank: gradients of its experts are zeros.

        The result follows from all inputs nevertheless: in the backward pass other ranks wait for the exchange of each.
        """
        nothing = self.gate_up[:0].sum() + self.down[:0].sum()
        return (rows * probs[:, None] * (1.0 + nothing)).to(rows.dtype)  # grouped products of no row have no backward


def _check(config: Any) -> None:
    faults = [f"{name} is {getattr(config, name)}" for name in UNSERVED if getattr(config, name, None)]
    step = ALIGNMENT // config.params_dtype.itemsize
    faults += [
        f"{name} is {getattr(config, name)}, no multiple of {step}"
        for name in ("hidden_size", "moe_ffn_hidden_size")
        if getattr(config, name) % step
    ]
    if (config.expert_tensor_parallel_size or 1) != 1:
        faults.append(f"expert_tensor_parallel_size is {config.expert_tensor_parallel_size}")
    if faults:
        raise ConfigError("\n".join(f"model: grouped experts: {fault}" for fault in faults))
