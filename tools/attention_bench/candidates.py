"""Backends that are compared: registered ones, and FlexAttention with a plain mask."""

from __future__ import annotations

from typing import Any

from attention_bench.flex import Flex
from attention_bench.problem import Shape
from harts.backends.base import FullAttention
from harts.errors import ConfigError
from harts.registry import names, resolve

FLEX = "flex"
ORACLE = "sdpa"


def known() -> list[str]:
    """All names, the oracle included."""
    return [*names("full_attention"), FLEX]


def usual() -> list[str]:
    """What is compared unless names are given: everything but the oracle."""
    return [name for name in known() if name != ORACLE]


def serving(wanted: list[str], shape: Shape) -> tuple[dict[str, FullAttention], dict[str, list[str]]]:
    """Build those that serve a shape, and tell why others do not: name -> reasons."""
    built: dict[str, FullAttention] = {}
    refused: dict[str, list[str]] = {}
    for name in wanted:
        try:
            kind: type[Any] = Flex if name == FLEX else resolve("full_attention", name)
        except ConfigError as error:
            refused[name] = [str(error)]
            continue
        backend = kind(kind.Config())
        reasons = backend.why_not(shape.need())
        if reasons:
            refused[name] = reasons
        else:
            built[name] = backend
    return built, refused
