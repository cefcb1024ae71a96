"""Where the time of one microbatch goes: marks around parts of a model, in forward, recomputation and backward.

Every moment belongs to the innermost part that is running. In the backward pass a part runs from the gradient of its
outputs to that of its inputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from step_bench.passes import Clock

PHASES = ("forward", "recompute", "backward")
OTHER = "other"


class Key(NamedTuple):
    """What an interval counts for."""

    part: str
    phase: str


class Trace:
    """Beginnings and ends of parts, in the order of the queue."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.marks: list[tuple[Any, Key, bool]] = []
        """(mark, what, whether it begins)."""
        self.backward = False

    def begin(self, part: str, phase: str | None = None) -> None:
        """A part begins; what runs forward during the backward pass is recomputation."""
        self.marks.append((self.clock.mark(), Key(part, phase or self._phase()), True))

    def end(self, part: str, phase: str | None = None) -> None:
        """It ends."""
        self.marks.append((self.clock.mark(), Key(part, phase or self._phase()), False))

    def _phase(self) -> str:
        return "recompute" if self.backward else "forward"

    @contextmanager
    def span(self, part: str, phase: str | None = None) -> Iterator[None]:
        """Whatever runs inside."""
        self.begin(part, phase)
        try:
            yield
        finally:
            self.end(part, phase)

    def call(self, part: str, function: Callable[..., Any], *tensors: Tensor) -> Any:
        """Call a function of tensors as a part; its backward pass counts as well."""
        with self.span(part):
            given, watched = self.enter(part, tensors)
            made = function(*given)
            return self.leave(part, made) if watched else made

    def enter(self, part: str, tensors: tuple[Any, ...]) -> tuple[tuple[Any, ...], bool]:
        """(the tensors, whether the backward pass will tell when their gradients are done)."""
        places = [i for i, each in enumerate(tensors) if isinstance(each, Tensor) and each.requires_grad]
        if not places or not torch.is_grad_enabled():
            return tensors, False
        given = list(tensors)
        for i, each in zip(places, _Border.apply(self, part, False, *(given[i] for i in places)), strict=True):
            given[i] = each
        return tuple(given), True

    def leave(self, part: str, made: Any) -> Any:
        """The output, or its parts in a tuple, with what tells when their gradients arrive."""
        if isinstance(made, Tensor):
            return _Border.apply(self, part, True, made)[0] if made.requires_grad else made
        if type(made) is tuple:
            first = next((i for i, each in enumerate(made) if isinstance(each, Tensor) and each.requires_grad), None)
            if first is not None:
                return (*made[:first], self.leave(part, made[first]), *made[first + 1 :])
        return made

    def seconds(self) -> dict[str, dict[str, float]]:
        """Of each part in each phase, after the queue was waited for; together the time from first to last mark."""
        found: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PHASES, 0.0))
        running: list[Key] = []
        before: Any = None
        for mark, key, begins in self.marks:
            if running:
                found[running[-1].part][running[-1].phase] += self.clock.seconds(before, mark)
            if begins:
                running.append(key)
            elif key in running:
                while running.pop() != key:
                    pass
            before = mark
        return dict(found)


class _Border(torch.autograd.Function):
    """Passes tensors through; in the backward pass a part begins or ends here."""

    @staticmethod
    def forward(ctx: Any, trace: Trace, part: str, begins: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.trace, ctx.part, ctx.begins = trace, part, begins
        return tuple(each.view_as(each) for each in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        (ctx.trace.begin if ctx.begins else ctx.trace.end)(ctx.part, "backward")
        return None, None, None, *gradients
