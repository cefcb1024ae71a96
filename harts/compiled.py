"""Loops that numpy cannot say, compiled: integers in, integers out, the same on every machine.

A compiled function runs without the interpreter's lock, so that threads share the cores. It is kept on disk, so that
only the first process of a machine compiles it. numba would go on using a kept function when another one that it calls
has changed in another file; so what is kept belongs to the text of all compiled files together.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def digest(package: Path) -> str:
    """Of all files of a package that hold compiled functions. 16 hexadecimal digits."""
    state = hashlib.blake2b(digest_size=8)
    for path in sorted(package.rglob("*.py")):
        text = path.read_bytes()
        if b"\n@compiled\n" in text:
            state.update(path.relative_to(package).as_posix().encode() + b"\0" + text + b"\0")
    return state.hexdigest()


def folder(package: Path) -> Path:
    """Where compiled functions are kept: below NUMBA_CACHE_DIR, or the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("NUMBA_CACHE_DIR") or cache) / "harts" / digest(package)


FOLDER = folder(Path(__file__).parent)


def compiled(function: Function) -> Function:
    """Compile a function on its first call; NUMBA_DISABLE_JIT=1 runs it as it is written."""
    config: Any = numba.config
    elsewhere = config.CACHE_DIR
    config.CACHE_DIR = str(FOLDER)
    try:
        return cast(Function, numba.njit(cache=True, nogil=True)(function))
    finally:
        config.CACHE_DIR = elsewhere
