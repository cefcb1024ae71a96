"""The base of every configuration class, of stages and backends alike."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StageConfig(BaseModel):
    """Unknown keys are faults, types are strict, instances are frozen.

    A field is described by the string under it, with its unit.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)
