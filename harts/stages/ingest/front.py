"""Front-coded rollouts: each line says how much of the line before it repeats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from harts.errors import InputError
from harts.ir.base import Int32
from harts.stages.ingest import values
from harts.stages.ingest.faults import RecordFaults
from harts.stages.ingest.names import FRONT_ONLY

FORMAT = "rollout-front-1"


def is_header(first: Any, where: str) -> bool:
    """True if the first line of a file announces the front-coded form.

    Raises:
        InputError: it announces a form that is not known.
    """
    if not isinstance(first, Mapping) or "format" not in first or "id" in first:
        return False
    if first["format"] != FORMAT:
        raise InputError(f"{where}: field format: is {values.shown(first['format'])}, known is {FORMAT!r}")
    return True


class FrontDecoder:
    """Turns the lines of one file, in order, into records of the full form."""

    def __init__(self) -> None:
        self._before: Int32 = np.zeros(0, dtype=np.int32)

    def decode(self, where: str, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Replace `lcp`, `suffix` and `loss_spans` by `tokens` and `loss_mask`.

        Raises:
            InputError: all faults of these fields.
        """
        faults = RecordFaults(where, record)
        for field in ("tokens", "loss_mask"):
            if field in record:
                faults.add(field, "does not belong to the front-coded form, which holds lcp, suffix and loss_spans")
        lcp = faults.read(record, "lcp", values.count, required=True)
        suffix = faults.read(record, "suffix", values.token_ids, required=True)
        spans = faults.read(record, "loss_spans", values.spans, required=True)
        if lcp is not None and lcp > len(self._before):
            faults.add("lcp", f"is {lcp}, the line before has {len(self._before)} tokens")
        length = (lcp or 0) + (len(suffix) if suffix is not None else 0)
        if spans and suffix is not None and spans[-1][1] > length:
            faults.add(
                "loss_spans", f"entry {len(spans) - 1} ends at {spans[-1][1]}, the trajectory has {length} tokens"
            )
        faults.raise_any()
        assert suffix is not None
        self._before = np.concatenate((self._before[:lcp], suffix))
        mask = np.zeros(length, dtype=np.bool_)
        for start, end in spans or ():
            mask[start:end] = True
        rest = {field: value for field, value in record.items() if field not in FRONT_ONLY}
        return {**rest, "tokens": self._before, "loss_mask": mask}
