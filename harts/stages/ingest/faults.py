"""Every fault of one record or file at once, each with its place and field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from harts.errors import InputError

T = TypeVar("T")


class Faults:
    """Collects the faults of what is read from one place."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.found: list[str] = []

    def add(self, field: str, what: str) -> None:
        """Note a fault: `place: field FIELD: what`."""
        self.found.append(f"{self.place}: field {field}: {what}")

    def read(self, record: Mapping[str, Any], field: str, reader: Callable[[Any], T], *, required: bool) -> T | None:
        """Read one field; None, with a fault unless it may be absent, if it is not there or null."""
        value = record.get(field)
        if value is None:
            if required:
                self.add(field, "is missing" if field not in record else "is null")
            return None
        try:
            return reader(value)
        except InputError as error:
            self.add(field, str(error))
            return None

    def raise_any(self) -> None:
        """Raise all faults, one a line.

        Raises:
            InputError: there is at least one.
        """
        if self.found:
            raise InputError("\n".join(self.found))


class RecordFaults(Faults):
    """The faults of one record.

    Args:
        where: `file:line`, or the index of a record that was handed over.
        record: names the trajectory, if its `id` is usable.
    """

    def __init__(self, where: str, record: Mapping[str, Any]) -> None:
        name = record.get("id")
        super().__init__(
            f"{where}: trajectory {name!r}" if isinstance(name, str) else f"{where}: trajectory without an id"
        )
