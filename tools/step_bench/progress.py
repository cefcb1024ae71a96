"""What a long run is doing, a line at a time."""

from __future__ import annotations

import sys
import time

EVERY = 2.0
"""Least seconds between two lines of microbatches."""


class Progress:
    """Lines on stderr with the seconds since the start."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.start = self.last = time.perf_counter()

    def tell(self, text: str) -> None:
        """A new piece of work."""
        self.last = time.perf_counter()
        if not self.quiet:
            print(f"[{self.last - self.start:6.1f} s] {text}", file=sys.stderr, flush=True)

    def count(self, text: str, done: int, of: int) -> None:
        """How far the piece is; most calls say nothing."""
        if time.perf_counter() - self.last >= EVERY:
            self.tell(f"{text}: {done} of {of} microbatches are queued")
