"""Older versions of values: one small function for each step from a version to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harts.errors import CodecError
from harts.ir.base import Value

Fields = dict[str, Any]

upgrades: dict[tuple[str, int], Callable[[Fields], Fields]] = {}
"""(kind, version) to the function that makes the fields of the next version out of those of this one."""


def upgraded(cls: type[Value], version: int, fields: Fields) -> Fields:
    """The fields in the version that this release reads.

    Raises:
        CodecError: the version is newer, or so old that nothing leads from it to this one.
    """
    if version > cls.version:
        raise CodecError(f"{cls.kind} v{version} is newer than what this release reads (v{cls.version})")
    for step in range(version, cls.version):
        upgrade = upgrades.get((cls.kind, step))
        if upgrade is None:
            raise CodecError(f"{cls.kind} v{version} is older than what this release reads (v{step + 1} and later)")
        fields = upgrade(fields)
    return fields
