"""Where the shared third-party test data lies, if it does."""

import os
from pathlib import Path

import pytest


def shared_data() -> Path:
    """The `data` folder of the shared material; skips the test where it is absent."""
    root = Path(os.environ.get("HARTS_SHARED", Path(__file__).resolve().parents[2] / "shared"))
    if not (root / "data").is_dir():
        pytest.skip(f"needs the shared rollout data; not found under {root} (set HARTS_SHARED)")
    return root / "data"
