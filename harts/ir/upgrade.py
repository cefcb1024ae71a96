"""Older versions of values: one small function for each step from a version to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from harts.errors import CodecError
from harts.ir.base import Value

Fields = dict[str, Any]


def partitions_1(fields: Fields) -> Fields:
    """Costs were the work, and no bound was kept: each unique prefix is computed once is one."""
    trie, labels = fields["trie"], fields["microbatch"]
    members = [np.flatnonzero(row == k) for row in labels for k in range(int(row.max()) + 1)]
    cost = np.array([trie.index.set_work(each) for each in members], dtype=np.int64)
    added = {"objective": "paper", "unit": "compact tokens", "lower_bound": trie.compact_tokens, "cost": cost}
    return fields | added


def step_plan_1(fields: Fields) -> Fields:
    """As `partitions_1`."""
    added = {"objective": "paper", "unit": "compact tokens", "lower_bound": fields["compact_tokens"]}
    return fields | added | {"cost": fields["work"]}


upgrades: dict[tuple[str, int], Callable[[Fields], Fields]] = {
    ("partitions", 1): partitions_1,
    ("step_plan", 1): step_plan_1,
}
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
