"""The modules of tools/bench_plan.py, which is a script."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
