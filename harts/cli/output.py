"""Results go to stdout, as text or as one JSON object; messages go to stderr."""

from __future__ import annotations

import json
import math
import os
import sys
from argparse import Namespace
from typing import Any

import yaml

from harts.config import Settings
from harts.errors import HartsError


def result(report: dict[str, Any], text: str, as_json: bool) -> None:
    """Print a command's result; of several ranks, the first one's."""
    if leads():
        print(json.dumps(_finite(report), indent=2, allow_nan=False) if as_json else text)


def leads() -> bool:
    """Whether this process speaks for all that `torchrun` started."""
    return os.environ.get("RANK", "0") == "0"


def printed(settings: Settings, given: Namespace) -> bool:
    """Whether the effective values were asked for, and so printed."""
    if given.print_config:
        values = settings.effective()
        result(values, yaml.safe_dump(values, sort_keys=False).rstrip(), given.json)
    return bool(given.print_config)


def failure(error: HartsError, as_json: bool) -> None:
    """Print an expected error: its text and its notes, no trace."""
    notes = getattr(error, "__notes__", [])
    rank = "" if "RANK" not in os.environ else f"rank {os.environ['RANK']}: "
    print(rank + "\n".join([str(error), *notes]), file=sys.stderr)
    if as_json and leads():
        lines = str(error).splitlines()
        print(json.dumps({"error": type(error).__name__, "messages": lines, "notes": notes}, indent=2))


def _finite(item: Any) -> Any:
    """JSON has no NaN and no infinity: they become text."""
    if isinstance(item, dict):
        return {str(key): _finite(value) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return [_finite(value) for value in item]
    if isinstance(item, float) and not math.isfinite(item):
        return str(item)
    return item
