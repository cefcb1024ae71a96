"""Commands of the folder tools, as modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

TOOLS = Path(__file__).resolve().parents[1] / "tools"


@contextmanager
def script(name: str) -> Iterator[ModuleType]:
    """A command, which is a script beside its modules: they can be imported meanwhile."""
    sys.path.insert(0, str(TOOLS))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(TOOLS))
