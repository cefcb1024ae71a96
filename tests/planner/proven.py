"""Proven optima of the suite, kept beside it because proving them all takes half a minute.

python -m tests.planner.proven      proves them anew and rewrites optima.json
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path

from tests.planner.instances import instance, instances
from tests.planner.optimum import Optimum, optimum

FILE = Path(__file__).with_name("optima.json")


@cache
def _kept() -> dict[str, list[int]]:
    held: dict[str, list[int]] = json.loads(FILE.read_text())
    return held


@cache
def proven(seed: int) -> Optimum:
    """The proven optimum of one instance of the suite.

    Raises:
        LookupError: the instance is not the one that was proven.
    """
    given = instance(seed)
    digest = given.digest()
    if digest not in _kept():
        raise LookupError(f"{given.name}: {FILE.name} has no optimum of {digest}; run python -m {__spec__.name}")
    work, *label = _kept()[digest]
    return Optimum(work, True, tuple(label))


def main() -> int:
    """Prove all optima and write them as digest: [work, microbatch of each trajectory]."""
    found = {given.digest(): (given.name, optimum(given)) for given in instances()}
    open_ends = [name for name, best in found.values() if not best.proven]
    if open_ends:
        print(f"not proven: {', '.join(open_ends)}", file=sys.stderr)
        return 1
    lines = [f"{json.dumps(digest)}: {[best.work, *best.label]}" for digest, (_, best) in sorted(found.items())]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
