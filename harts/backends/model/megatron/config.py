"""Configuration of the model backend `megatron`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from harts.backends.model.config import ReferenceConfig
from harts.backends.model.megatron.checkpoints.folder import completed
from harts.backends.model.megatron.parallel import ParallelConfig
from harts.errors import ConfigError


class MegatronConfig(ReferenceConfig):
    """A hybrid model of Megatron-core: the shapes of the reference model."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of parameters and activations. Gates, router, and the parameters of gates and convolutions are float32."""
    q_rank: PositiveInt | None = None
    """Channels of the latent that queries come from, for mla; none is queries from the hidden state."""
    head_gate: bool = False
    """Multiply what each head of the A layers gives by sigmoid of a projection of the hidden state, for mla."""
    rotary_percent: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a head's channels that are rotated, its first ones, for gqa."""
    decay: Literal["low_rank", "full"] = "low_rank"
    """Projection to the decays of the K layers, for kda: through `linear_key_dim` channels, or direct."""
    block: Literal["gpt", "hybrid"] = "gpt"
    """Megatron's model that runs the layers: GPTModel, or HybridModel, which megatron-core has from 0.19 on. There a
    layer is two of Megatron's, attention and what follows it: `overrides` that count layers to recompute count these.
    Weights, results and checkpoints are the same."""
    checkpoint: str | None = None
    """Folder of a Hugging Face checkpoint, bailing_hybrid (Ling 3) or qwen3_next. Fields that are not given follow from
    its config.json, the others have to agree with it."""
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    """Processes that share the model."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Further values of Megatron's `TransformerConfig`, by its names."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not isinstance(given.get("checkpoint"), str):
            return given
        try:
            return completed(given)
        except ConfigError as error:
            raise ValueError(str(error).replace("model: ", "")) from error

    @model_validator(mode="after")
    def _check_megatron(self) -> MegatronConfig:
        faults = []
        if self.moe is not None and self.moe.expert_bias_rate and self.moe.scoring != "sigmoid":
            faults.append("moe: expert_bias_rate is for scoring sigmoid in Megatron")
        if self.head_gate and self.attention != "mla":
            faults.append(f"head_gate is for attention mla; {self.attention} has Megatron's attention_output_gate")
        if self.rotary_percent < 1 and self.attention != "gqa":
            faults.append(f"rotary_percent is for attention gqa; {self.attention} has rope_dim")
        rotated = int((self.head_dim or 0) * self.rotary_percent)  # as Megatron rounds
        if self.attention == "gqa" and (rotated % 2 or not rotated):
            faults.append(f"rotary_percent {self.rotary_percent} of head_dim {self.head_dim} is {rotated} channels")
        if self.decay == "full" and self.rule != "kda":
            faults.append(f"decay is full, which is for rule kda, not {self.rule}")
        if faults:
            raise ValueError("; ".join(faults))
        return self
