"""Observers: what is checked, printed, kept, timed and shown of every value between two stages."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections import deque
from pathlib import Path
from threading import Timer
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from harts.config import ObserveConfig
from harts.errors import CodecError, VerifyError
from harts.ir import Value
from harts.ir.codec import decode, encode, save
from harts.ir.text import format_value

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress


class Observer:
    """Told of every stage: `begin`, `advance` after each microbatch, a call with the value, `finish` in any case."""

    def begin(self, stage: str, items: int) -> None:
        """A stage starts, on this many values."""

    def given(self, value: Value) -> None:
        """A value comes from outside, to be resumed from."""

    def advance(self) -> None:
        """One of its values is done."""

    def __call__(self, stage: str, value: Value, seconds: float) -> None:
        """A stage gave a value; an exception stops the pipeline."""

    def finish(self) -> None:
        """The stage is over, well or not."""


class News:
    """Tells which parts of each value the value before it did not hold."""

    def __init__(self) -> None:
        self._known: dict[int, Value] = {}
        """By id; the values are held, so that no id is used again."""

    def of(self, value: Value) -> list[Value]:
        """The value and what it holds, if new, from the inside out."""
        held: dict[int, Value] = {}
        waiting = deque([value])
        while waiting:
            each = waiting.popleft()
            if id(each) not in held:
                held[id(each)] = each
                waiting.extend(each.parents())
        found = [each for key, each in reversed(held.items()) if key not in self._known]
        self._known = held
        return found


class Verify(Observer):
    """Checks the invariants of each value and of what is new in it; optionally also that it survives the codec."""

    def __init__(self, roundtrip: bool) -> None:
        self.roundtrip = roundtrip
        self.news = News()

    def given(self, value: Value) -> None:  # noqa: D102
        for each in self.news.of(value):
            each.verify()

    def __call__(self, stage: str, value: Value, seconds: float) -> None:  # noqa: D102
        self.given(value)
        if self.roundtrip and decode(encode(value)).digest() != value.digest():
            raise VerifyError(f"{value.kind}: after {stage}, encoding and decoding it gives another digest")


class Print(Observer):
    """Prints values of some kinds as text when they first appear."""

    def __init__(self, kinds: tuple[str, ...], limit: int, stream: TextIO) -> None:
        self.kinds, self.limit, self.stream = kinds, limit, stream
        self.news = News()

    def __call__(self, stage: str, value: Value, seconds: float) -> None:  # noqa: D102
        for each in reversed(self.news.of(value)):
            if each.kind in self.kinds:
                print(format_value(each, self.limit), file=self.stream)


class Dump(Observer):
    """Writes one file an edge: `NN_stage.harts`."""

    def __init__(self, folder: Path, order: tuple[str, ...]) -> None:
        self.folder, self.order = folder, order

    def __call__(self, stage: str, value: Value, seconds: float) -> None:  # noqa: D102
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CodecError(f"{self.folder}: cannot be made: {error.strerror}") from error
        save(value, self.folder / f"{self.order.index(stage) + 1:02}_{stage}.harts")


class Times(Observer):
    """Keeps the seconds of each stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, stage: str, value: Value, seconds: float) -> None:  # noqa: D102
        self.seconds[stage] = seconds


class Progress(Observer):
    """A bar on a terminal for work that takes a while, gone when its stage is over."""

    def __init__(self, stream: TextIO, delay: float = 1.0) -> None:
        self.stream = stream
        self.delay = delay
        """Seconds of work before the bar appears."""
        self._bar: RichProgress | None = None
        self._timer: Timer | None = None

    def begin(self, stage: str, items: int) -> None:  # noqa: D102
        from rich.console import Console  # noqa: PLC0415  (only on a terminal)
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415
        from rich.progress import Progress as RichProgress  # noqa: PLC0415

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console(file=self.stream)
        self._bar = RichProgress(
            *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._bar.add_task(stage, total=items)
        self._timer = Timer(self.delay, self._bar.start)
        self._timer.daemon = True
        self._timer.start()

    def advance(self) -> None:  # noqa: D102
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0])

    def __call__(self, stage: str, value: Value, seconds: float) -> None:  # noqa: D102
        self.finish()  # before anything is printed

    def finish(self) -> None:  # noqa: D102
        if self._bar is not None and self._timer is not None:
            self._timer.cancel()
            self._timer.join()  # a bar that is just appearing must be there to be removed
            self._bar.stop()
            self._bar = self._timer = None


def build_observers(config: ObserveConfig, order: tuple[str, ...], times: Times) -> list[Observer]:
    """The observers that a file asks for."""
    observers: list[Observer] = [times]
    if config.verify != "off":
        observers.append(Verify(config.verify == "roundtrip"))
    if config.dump is not None:
        observers.append(Dump(config.dump, order))
    if config.progress and sys.stderr.isatty():
        observers.append(Progress(sys.stderr))
    if config.print:
        observers.append(Print(config.print, config.print_limit, sys.stderr))
    return observers


class SavedOnFailure:
    """Saves a stage's input if the stage fails, and notes on the error which command reruns it from there."""

    def __init__(self, stage: str, value: Value | None, folder: Path | None, command: str) -> None:
        self.stage, self.value, self.folder, self.command = stage, value, folder, command

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not isinstance(error, Exception) or hasattr(error, "__notes__"):
            return
        if self.value is None:
            error.add_note(f"the stage {self.stage} failed; rerun it with: {self.command}")
            return
        folder = self.folder or Path(tempfile.mkdtemp(prefix="harts-"))
        target = folder / f"failed_{self.stage}_input.harts"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save(self.value, target)
        except (OSError, CodecError) as why:
            error.add_note(f"the stage {self.stage} failed; its input could not be saved: {why}")
            return
        error.add_note(
            f"the stage {self.stage} failed; rerun it with: {self.command} --from {shlex.quote(str(target))}"
        )
