"""Tensors and numpy scalars of a record as plain host values. A tensor is what has `detach`: torch is optional."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts.errors import InputError
from harts.ir.base import as_numpy


def array(value: Any) -> NDArray[Any]:
    """Whatever numpy can read as an array, of any shape and dtype; bfloat16 tensors become float32, the same numbers.

    Raises:
        InputError: it cannot be read, as a tensor without storage or of a dtype that numpy does not have.
    """
    try:
        return as_numpy(value) if hasattr(value, "detach") else np.asarray(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        kind = f"{type(value).__name__} of {value.dtype}" if hasattr(value, "dtype") else type(value).__name__
        raise InputError(f"is a {kind} that cannot be read as an array: {error}") from error


def scalar(value: Any) -> Any:
    """A numpy scalar, or an array or tensor of no dimension, as the Python value it holds; others are left alone.

    Raises:
        InputError: as `array`.
    """
    if isinstance(value, np.generic | np.ndarray) or hasattr(value, "detach"):
        found = array(value)
        return found.item() if found.ndim == 0 else value
    return value
