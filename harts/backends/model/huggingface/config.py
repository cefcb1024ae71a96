"""Configuration of the model backend `huggingface`."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, model_validator

from harts.schema import StageConfig

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


class HuggingFaceConfig(StageConfig):
    """A hybrid model of transformers: a checkpoint, a family with random weights, or with neither the caller's own."""

    path: str | None = None
    """Folder of a checkpoint."""
    family: str | None = None
    """Registered family, for random weights; see `harts backends`."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Values of the configuration of transformers, for random weights."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Of parameters and activations. What a family keeps in float32 stays there, but float64 is throughout: no cast to
    float32 is made. The caller's own model has its own."""
    recompute: Literal["none", "full"] = "none"
    """`full`: gradient checkpointing of every layer."""
    experts: Literal["grouped_mm", "eager"] = "grouped_mm"
    """How transformers computes routed experts: one grouped product, or expert after expert, which serves any dtype."""
    expert_bias_rate: NonNegativeFloat = 0.0
    """Step of the routers' selection bias at every optimizer step, for families that have one; 0 leaves it alone."""
    seed: NonNegativeInt = 0
    """Of random weights."""

    @model_validator(mode="after")
    def _check(self) -> HuggingFaceConfig:
        if self.path is not None and self.family is not None:
            raise ValueError("give path, a checkpoint, or family, for random weights, and not both")
        if self.family is None and self.overrides:
            raise ValueError("overrides are for random weights of a family")
        if self.dtype == "float64" and self.experts == "grouped_mm":
            raise ValueError("experts: grouped_mm has no float64; set experts: eager")
        return self

    @property
    def torch_dtype(self) -> torch.dtype:
        """As torch has it."""
        return DTYPES[self.dtype]
