"""HARTS: prefix-sharing RL training for hybrid-attention models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harts.ir import RolloutBatch
    from harts.pipeline import Pipeline
    from harts.registry import register
    from harts.schema import StageConfig
    from harts.stages.base import Stage
    from harts.stages.ingest.records import rollout_batch

    load = Pipeline.load

__all__ = ["Pipeline", "RolloutBatch", "Stage", "StageConfig", "load", "register", "rollout_batch"]

_HOMES = {
    "Pipeline": "harts.pipeline",
    "RolloutBatch": "harts.ir",
    "Stage": "harts.stages.base",
    "StageConfig": "harts.schema",
    "register": "harts.registry",
    "rollout_batch": "harts.stages.ingest.records",
}


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used: `import harts.ir` alone stays cheap."""
    if name == "load":
        return import_module("harts.pipeline").Pipeline.load
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'harts' has no attribute {name!r}")
