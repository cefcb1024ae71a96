"""Configuration of the reference model."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, NegativeFloat, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from harts.backends.base import Rule
from harts.schema import StageConfig

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


class MoeConfig(StageConfig):
    """Mixture of experts in place of the dense MLP."""

    experts: PositiveInt
    """Routed experts of a layer."""
    top_k: PositiveInt
    """Experts that each token is sent to; no token is dropped."""
    intermediate_size: PositiveInt
    """Hidden units of each routed expert."""
    shared_intermediate_size: NonNegativeInt = 0
    """Hidden units of the expert that every token passes; 0 is none."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """How router logits become scores."""
    expert_bias_rate: NonNegativeFloat = 0.0
    """Step of the selection bias, in units of a score, at every optimizer step; 0 is no bias."""
    dense_layers: NonNegativeInt = 0
    """First layers that keep the dense MLP."""

    @model_validator(mode="after")
    def _check(self) -> MoeConfig:
        if self.top_k > self.experts:
            raise ValueError(f"top_k is {self.top_k}, but there are {self.experts} experts")
        return self


class ReferenceConfig(StageConfig):
    """A small hybrid model of linear-attention and full-attention layers."""

    vocab_size: PositiveInt
    """Token ids are below it."""
    hidden_size: PositiveInt
    """Width of the residual stream, in channels."""
    layers: PositiveInt
    """Number of layers."""
    pattern: Annotated[str, Field(pattern="^[KA]+$")]
    """Kinds of the layers, repeated and cut to `layers`: K is linear attention, A full attention."""
    rule: Rule
    """Delta rule of the K layers."""
    linear_heads: PositiveInt
    """Query and key heads of the K layers, H."""
    linear_value_heads: PositiveInt
    """Value heads of the K layers, HV: a multiple of H."""
    linear_key_dim: PositiveInt
    """Channels of a query or key head of the K layers."""
    linear_value_dim: PositiveInt
    """Channels of a value head of the K layers."""
    least_gate: NegativeFloat | None = None
    """Bound of the log decays of the K layers: g = least_gate * sigmoid(exp(A_log) * step); none is
    g = -exp(A_log) * softplus(step), without a bound."""
    conv_width: PositiveInt
    """Tokens in a window of the short convolution, the current one included."""
    attention: Literal["gqa", "mla"]
    """Kind of the A layers: grouped query attention, or multi-head latent attention."""
    heads: PositiveInt
    """Query heads of the A layers."""
    kv_heads: PositiveInt | None = None
    """Key/value heads, for gqa: it divides `heads`."""
    head_dim: PositiveInt | None = None
    """Channels of a head, for gqa: even, all rotated."""
    kv_rank: PositiveInt | None = None
    """Channels of the latent that keys and values come from, for mla."""
    nope_dim: PositiveInt | None = None
    """Channels of a query or key head that are not rotated, for mla."""
    rope_dim: PositiveInt | None = None
    """Channels of a query or key head that are rotated, for mla: even."""
    value_dim: PositiveInt | None = None
    """Channels of a value head, for mla."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary frequencies."""
    intermediate_size: PositiveInt
    """Hidden units of the dense MLP."""
    moe: MoeConfig | None = None
    """Experts of the layers past `moe.dense_layers`; none is a dense model."""
    recompute: Literal["none", "full"] = "none"
    """`full`: keep only the input of each layer, and run the layer again in the backward pass."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Of parameters and activations. Gates, norms, router and their parameters are float32 or wider in any case."""
    seed: NonNegativeInt = 0
    """Of the initial parameters."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""

    @model_validator(mode="after")
    def _check(self) -> ReferenceConfig:
        faults = [*self._linear_faults(), *self._attention_faults(), *self._moe_faults()]
        if faults:
            raise ValueError("; ".join(faults))
        return self

    def _linear_faults(self) -> list[str]:
        if self.linear_value_heads % self.linear_heads == 0:
            return []
        return [f"linear_value_heads is {self.linear_value_heads}, no multiple of linear_heads {self.linear_heads}"]

    def _attention_faults(self) -> list[str]:
        wanted = {"gqa": ("kv_heads", "head_dim"), "mla": ("kv_rank", "nope_dim", "rope_dim", "value_dim")}
        faults = [f"attention is {self.attention}, which needs {name}" for name in self._absent(wanted[self.attention])]
        if self.attention == "gqa" and self.kv_heads and self.heads % self.kv_heads:
            faults.append(f"heads is {self.heads}, no multiple of kv_heads {self.kv_heads}")
        rotated = "head_dim" if self.attention == "gqa" else "rope_dim"
        if (getattr(self, rotated) or 0) % 2:
            faults.append(f"{rotated} is {getattr(self, rotated)}; rotary embeddings need an even number of channels")
        return faults

    def _absent(self, names: tuple[str, ...]) -> list[str]:
        return [name for name in names if getattr(self, name) is None]

    def _moe_faults(self) -> list[str]:
        if self.moe is None or self.moe.dense_layers < self.layers:
            return []
        return [f"moe.dense_layers is {self.moe.dense_layers}, so none of the {self.layers} layers has experts"]

    @property
    def kinds(self) -> str:
        """Kind of each layer, `layers` letters."""
        return (self.pattern * self.layers)[: self.layers]

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch names it."""
        return DTYPES[self.dtype]

    @property
    def wide_dtype(self) -> torch.dtype:
        """Of gates, router and statistics: float32 or wider."""
        return torch.promote_types(self.torch_dtype, torch.float32)

    @property
    def full_heads(self) -> tuple[int, int]:
        """(query heads, key/value heads) of the A layers."""
        return self.heads, self.kv_heads if self.attention == "gqa" and self.kv_heads else self.heads

    @property
    def full_head_dims(self) -> tuple[int, int]:
        """(query/key dim, value dim) of the A layers."""
        if self.attention == "gqa":
            return self.head_dim or 0, self.head_dim or 0
        return (self.nope_dim or 0) + (self.rope_dim or 0), self.value_dim or 0
