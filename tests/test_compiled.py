"""Where compiled functions are kept, and when they are compiled again."""

import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from harts.compiled import compiled, digest, folder
from harts.stages.partition.search.rng import below, seeded

PROGRAM = """
from harts.stages.partition.search.rng import below, seeded
print(below(seeded(1), 1000), sum(below.stats.cache_hits.values()), sum(below.stats.cache_misses.values()))
"""


def package(root: Path) -> Path:
    (root / "inner").mkdir()
    (root / "inner" / "a.py").write_text("import x\n\n@compiled\ndef f(): return 1\n")
    (root / "b.py").write_text("def g(): return 2\n")
    return root


def test_any_compiled_file_changes_what_is_kept_and_no_other_does(tmp_path: Path) -> None:
    root = package(tmp_path)
    before = digest(root)
    (root / "b.py").write_text("def g(): return 3\n")
    assert digest(root) == before
    (root / "c.py").write_text("\n@compiled\ndef h(): return f()\n")
    added = digest(root)
    assert added != before
    (root / "inner" / "a.py").write_text("import x\n\n@compiled\ndef f(): return 2\n")
    assert digest(root) not in (before, added)


def test_the_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = package(tmp_path)
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/somewhere")
    assert folder(root) == Path("/somewhere/harts") / digest(root)
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert folder(root) == Path("/cache/harts") / digest(root)


def test_the_second_process_does_not_compile(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    value = str(below(seeded(1), 1000))
    assert [run.stdout.split() for run in runs] == [[value, "0", "1"], [value, "1", "0"]]


def test_other_users_of_numba_keep_their_folder() -> None:
    before = numba.config.CACHE_DIR
    compiled(abs_of)
    assert before == numba.config.CACHE_DIR


def abs_of(x: int) -> int:
    return abs(x)
