"""Makes flash-linear-attention's kernels run in Triton's interpreter, for tests on machines without a GPU."""

from __future__ import annotations

import importlib


def prepare() -> None:
    """Replace the one product precision that the interpreter does not know by the exact one."""
    precision = importlib.import_module("triton.language").constexpr("ieee")
    importlib.import_module("fla.ops.kda.chunk_intra").SAFE_GATE_DOT_PRECISION = precision
