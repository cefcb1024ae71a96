"""Backends that are compared: registered ones, and FlexAttention with a plain mask."""

from __future__ import annotations

from typing import Any, NamedTuple

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


class Served(NamedTuple):
    """Of one shape."""

    backends: dict[str, FullAttention]
    """Those that serve."""
    refused: dict[str, list[str]]
    """Reasons of the others."""


def serving(wanted: tuple[str, ...], shape: Shape, deterministic: bool) -> Served:
    """Build those that serve a shape, asked for equal bits where they have the choice; tell why others do not."""
    found = Served({}, {})
    for name in wanted:
        try:
            kind: type[Any] = Flex if name == FLEX else resolve("full_attention", name)
        except ConfigError as error:
            found.refused[name] = [str(error)]
            continue
        options = {"deterministic": True} if deterministic and "deterministic" in kind.Config.model_fields else {}
        backend = kind(kind.Config(**options))
        reasons = backend.why_not(shape.need())
        if reasons:
            found.refused[name] = reasons
        else:
            found.backends[name] = backend
    return found
