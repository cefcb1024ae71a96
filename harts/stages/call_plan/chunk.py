"""The one setting of every call plan."""

from __future__ import annotations

from pydantic import PositiveInt

from harts.stages.base import StageConfig


class ChunkConfig(StageConfig):
    """Only the chunk size."""

    chunk_size: PositiveInt
    """Tokens per linear-attention chunk, B; must be the backend's."""
