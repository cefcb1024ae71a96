"""Configuration of the model backend `megatron`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from harts.backends.model.config import ReferenceConfig
from harts.backends.model.megatron.parallel import ParallelConfig


class MegatronConfig(ReferenceConfig):
    """A hybrid model of Megatron-core: the shapes of the reference model."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of parameters and activations. Gates, router, and the parameters of gates and convolutions are float32."""
    q_rank: PositiveInt | None = None
    """Channels of the latent that queries come from, for mla; none is queries from the hidden state."""
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    """Processes that share the model."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Further values of Megatron's `TransformerConfig`, by its names."""

    @model_validator(mode="after")
    def _check_experts(self) -> MegatronConfig:
        if self.moe is not None and self.moe.expert_bias_rate and self.moe.scoring != "sigmoid":
            raise ValueError("moe: expert_bias_rate is for scoring sigmoid in Megatron")
        return self
