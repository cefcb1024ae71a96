"""A layer of Megatron that tells its router which call it is in, and a model that knows where its rows are."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.nn.functional import linear

from harts.backends.model.megatron.call import TreeParams
from harts.backends.model.megatron.rotary import RowRotary


class TreeLayer(TransformerLayer):  # type: ignore[misc]  # megatron has no types
    """Recomputation of whole layers runs its forward again, with the same call."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's."""
        router = getattr(self.mlp, "router", None)
        if router is None:
            return super().forward(*args, **kwargs)
        with router.running(kwargs.get("packed_seq_params")):
            output = super().forward(*args, **kwargs)
        dispatcher = self.mlp.token_dispatcher
        dispatcher.probs = dispatcher.routing_map = None  # their graph would hold the layer's input and its gradient
        return output


class Alone:
    """Group of one process, for Megatron's rotation: rows know their positions, whichever process has them."""

    def size(self) -> int:
        """One."""
        return 1

    def rank(self) -> int:
        """The first."""
        return 0


def _rotated_as_one(attention: Any) -> None:
    """Core attention has its groups by now."""
    attention.pg_collection = copy(attention.pg_collection)
    attention.pg_collection.cp = Alone()


class TreeAttention(SelfAttention):  # type: ignore[misc]  # megatron has no types
    """Grouped query attention."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _rotated_as_one(self)


class Latent(nn.Module):
    """Projection to a latent that all heads share; every tensor-parallel process has it whole, for its own rows.

    Split by columns, as Megatron would without Transformer Engine, gradients of the rotated key that all heads share
    are lost: each process keeps those of its own heads.
    """

    def __init__(self, config: Any, stock: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(stock.output_size, stock.input_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron reads it

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[..., hidden] to [..., latent], and no bias."""
        return linear(x, self.weight), None


class TreeMla(MLASelfAttention):  # type: ignore[misc]  # megatron has no types
    """Multi-head latent attention, which rotates by tables of its own."""

    rotary_pos_emb: Any
    linear_kv_down_proj: Any
    linear_q_down_proj: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rotary_pos_emb = RowRotary(self.rotary_pos_emb)
        self.linear_kv_down_proj = Latent(self.config, self.linear_kv_down_proj)
        if self.config.q_lora_rank is not None:
            self.linear_q_down_proj = Latent(self.config, self.linear_q_down_proj)
        _rotated_as_one(self)

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """What the spec says. From 0.19 on Megatron would add a norm before queries that have no latent."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


class TreeGpt(GPTModel):  # type: ignore[misc]  # megatron has no types
    """In a call with a plan it gives the last stage's hidden states: log-probs are restored from them in blocks."""

    sublayers = 1
    """Megatron's layers that make one of the configuration."""
    rotary_pos_emb: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "rotary_pos_emb" in self._modules:  # MLA has its own
            self.rotary_pos_emb = RowRotary(self.rotary_pos_emb)

    def _postprocess(self, hidden_states: Tensor, *given: Any, **others: Any) -> Any:
        if self.post_process and isinstance(others.get("packed_seq_params"), TreeParams):
            return hidden_states.squeeze(1)
        return super()._postprocess(hidden_states, *given, **others)
