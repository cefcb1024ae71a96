"""Names of topologies: `tp2+sp+pp2+ep2` is tensor, pipeline and expert parallelism of 2 each."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

KEYS = {"tp": "tensor", "cp": "context", "pp": "pipeline", "ep": "expert"}
ALL = (
    "tp2+sp",
    "pp2",
    "ep2",
    "dp2",
    "dp2+do",
    "cp2",
    "tp2+sp+ep2",
    "pp2+ep2",
    "tp2+sp+pp2+ep2",
    "cp2+tp2+sp+ep2",
)


@dataclass(frozen=True)
class Topology:
    """Sizes by their names in the model's section, and the processes that they are of."""

    name: str
    sizes: dict[str, int]
    replicas: int
    sequence: bool
    distributed_optimizer: bool

    @property
    def processes(self) -> int:
        """All of them."""
        inside = self.sizes["tensor"] * self.sizes["context"] * self.sizes["pipeline"]
        return inside * self.replicas

    def replicated(self) -> Topology:
        """The same without the distributed optimizer."""
        return replace(self, distributed_optimizer=False)

    def overrides(self) -> list[str]:
        """What to set in a pipeline file."""
        found = [f"model.parallel.{key}={size}" for key, size in self.sizes.items()]
        found.append(f"model.parallel.sequence={str(self.sequence).lower()}")
        found.append(f"model.parallel.distributed_optimizer={str(self.distributed_optimizer).lower()}")
        return [*found, f"partition.replicas={self.replicas}"]


def topology(name: str) -> Topology:
    """Of a name: parts joined by `+`, each `tp`, `cp`, `pp`, `ep` or `dp` and a size, `sp`, or `do`.

    `sp` is sequence parallelism, `do` the distributed optimizer. Replicas are those that `dp` says, and without it as
    many as expert parallelism needs.

    Raises:
        ValueError: it is no such name.
    """
    sizes = dict.fromkeys(KEYS.values(), 1)
    words, replicas = name.split("+"), 0
    for word in words:
        found = re.fullmatch(r"(tp|cp|pp|ep|dp)(\d+)", word)
        if word in ("sp", "do", "one"):
            continue
        if found is None:
            raise ValueError(f"{word!r} in topology {name!r}: known are tp, cp, pp, ep, dp with a size, sp and do")
        if found[1] == "dp":
            replicas = int(found[2])
        else:
            sizes[KEYS[found[1]]] = int(found[2])
    sharing = sizes["tensor"] * sizes["context"]
    replicas = replicas or max(1, sizes["expert"] // sharing)
    return Topology(name, sizes, replicas, "sp" in words, "do" in words)


ONE = topology("one")
"""One process."""
