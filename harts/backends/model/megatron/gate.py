"""Multi-head latent attention with an output gate a head, as Ling 3 has it.

Shape suffixes: R compact rows, P rows of this rank (a part of R under sequence parallelism), H query heads of this
rank, V value channels of a head.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor

from harts.backends.model.megatron.layer import TreeMla
from harts.backends.model.norm import widen


class GatedMla(TreeMla):
    """What attention gives to a head is multiplied by sigmoid(hidden @ g) before the output projection."""

    linear_proj: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.linear_gate = ColumnParallelLinear(
            config.hidden_size,
            config.num_attention_heads,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.pg_collection.tp,
        )

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's, hidden states [P, 1, hidden]."""
        logits, _ = self.linear_gate(hidden_states)
        gate = widen(logits).sigmoid().to(logits.dtype)

        def gated(_: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            mixed = given[0].reshape(*gate.shape, -1)  # [R, 1, H, V]
            return (mixed * gate[..., None]).flatten(-2), *given[1:]

        # Megatron calls the output projection itself, and hands nothing of the layer's input to it
        handle = self.linear_proj.register_forward_pre_hook(gated)
        try:
            return super().forward(hidden_states, *args, **kwargs)
        finally:
            handle.remove()
