"""A launcher that checks every launch against float64, and keeps the worst of each kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from harts.backends.linear.tree.expected import expected
from harts.backends.linear.tree.launch import Config, Launcher
from harts.backends.linear.tree.reference import relative_error


@dataclass(frozen=True)
class Worst:
    """The output of a kernel that is furthest from float64."""

    output: str
    """Name of the kernel's parameter."""
    error: float
    """Relative, in the Frobenius norm; infinite if something is not finite."""
    launches: int
    config: Config
    """Configuration of the launches."""


@dataclass(frozen=True)
class WatchingLauncher(Launcher):
    """Launches as `Launcher` does; each launch is then computed again from its own arguments."""

    seen: dict[str, Worst]
    """By kernel, in the order of their first launches; filled as kernels are launched."""

    def run(self, kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
        """Launch a kernel on a grid, and check what it has written."""
        before = {name: x.clone() if isinstance(x, Tensor) else x for name, x in arguments.items()}
        try:
            super().run(kernel, grid, **arguments)
        except Exception as error:
            error.add_note(f"launching {kernel.__name__} with {dict(self.config(kernel))}")
            raise
        if not all(grid):
            return
        pairs = expected(kernel.__name__, before, arguments)
        errors = {output: relative_error(*pair) for output, pair in pairs.items()}
        output = max(errors, key=errors.__getitem__)
        worst = Worst(output, errors[output], 1, self.config(kernel))
        self.seen[kernel.__name__] = _worse(worst, self.seen.get(kernel.__name__))


def _worse(new: Worst, old: Worst | None) -> Worst:
    if old is None:
        return new
    kept = new if new.error > old.error else old
    return Worst(kept.output, kept.error, old.launches + 1, new.config)
