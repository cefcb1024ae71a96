"""Softmax attention of compact rows in the place of Megatron's `core_attention`.

Shape suffixes: R compact rows of this process, H and G query and key/value heads of its tensor-parallel part, Dk and Dv
their channels.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import pad

from harts.backends.model.megatron.call import plan_of
from harts.backends.model.megatron.ulysses import to_heads, to_rows
from harts.errors import BackendError


class TreeCoreAttention(MegatronModule):  # type: ignore[misc]  # megatron has no types
    """The rest of an attention layer is Megatron's: projections, norms, rotation, output."""

    def __init__(  # noqa: PLR0917  (as Megatron calls it)
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        *,
        pg_collection: Any,
        **others: Any,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.scale = softmax_scale or (k_channels or config.kv_channels) ** -0.5
        self.v_channels = v_channels or config.kv_channels
        self.cp = pg_collection.cp

    def forward(  # noqa: PLR0917  (as Megatron calls it)
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **others: Any,
    ) -> Tensor:
        """Attend.

        Args:
            query: [R, H, Dk], rotated.
            key: [R, G, Dk], rotated.
            value: [R, G, Dv], or with further channels of zeros: from 0.19 on MLA pads it to Dk.
            attention_mask: none: the plan says what a row sees.
            attn_mask_type: of Megatron's own attention.
            attention_bias: none.
            packed_seq_params: the carrier of the plan.
            others: what Megatron's own attention needs.

        Returns:
            [R, H * Dv], padded as `value`.

        Raises:
            BackendError: there is no plan, or something else decides what a row sees.
        """
        call = plan_of(packed_seq_params, self.layer_number, "full")
        if attention_mask is not None or attention_bias is not None:
            has = "mask" if attention_mask is not None else "bias"
            raise BackendError(f"layer {self.layer_number}: has an attention {has}; on compact rows there is none")
        padding = value.shape[-1] - self.v_channels
        q, k, v = (to_heads(each, self.cp).contiguous() for each in (query, key, value[..., : self.v_channels]))
        mixed = to_rows(call.full.attend(q, k, v, call.plan.views, self.scale), self.cp)
        return pad(mixed, (0, padding)).reshape(len(query), -1)
