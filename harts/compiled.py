"""Loops that numpy cannot say, compiled: integers in, integers out, the same on every machine.

A compiled function runs without the interpreter's lock, so that threads share the cores, and is kept on disk (beside
the package, or where NUMBA_CACHE_DIR says), so that only the first process of a machine compiles it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile a function on its first call; NUMBA_DISABLE_JIT=1 runs it as it is written."""
    return cast(Function, numba.njit(cache=True, nogil=True)(function))
