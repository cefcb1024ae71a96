"""A package as pip leaves it, made from its pyproject.toml: no network, no build, this environment stays as it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GLA = ROOT / "tests/plugins/gla"


def install(package: Path, site: Path) -> None:
    """Copy a package's modules and write its dist-info, entry points and all, into a folder for PYTHONPATH."""
    told = tomllib.loads((package / "pyproject.toml").read_text())
    project, modules = told["project"], told["tool"]["setuptools"]["py-modules"]
    for module in modules:
        shutil.copy(package / f"{module}.py", site)
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(head)
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def run_python(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this Python in the checkout with the installed packages beside its own."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    path = os.pathsep.join(filter(None, [str(site), outer.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**outer, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
