"""What the README names is there."""

import re
from pathlib import Path

from harts.registry import BUILT_IN, STAGE_KINDS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_every_registered_stage_is_in_the_table():
    for kind in STAGE_KINDS:
        row = next(line for line in README.splitlines() if line.startswith(f"| {kind} |"))
        for name in BUILT_IN[kind]:
            assert f"`{name}`" in row, f"{kind}: {name}"


def test_files_that_are_named_exist():
    for name in re.findall(r"\]\(([^)]+)\)", README) + re.findall(r"bash (tools/\S+)", README):
        assert (ROOT / name).exists(), name
