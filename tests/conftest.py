"""Options and settings of the whole suite."""

import os
from importlib.util import find_spec

import pytest

from harts import registry

if find_spec("torch") is not None:  # a planning-only install has none
    import torch

    # without a GPU, kernels are tested in triton's interpreter, which triton looks for when it is imported
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")

DTYPES = ("float64", "float32", "float16", "bfloat16")


def pytest_addoption(parser: pytest.Parser) -> None:
    conformance = parser.getgroup("harts", "conformance of linear-attention backends (tests/parity)")
    conformance.addoption("--backend", action="append", metavar="NAME", help="a registered backend; may be repeated")
    conformance.addoption("--device", default="cpu", help="where it runs (cpu)")
    conformance.addoption("--dtype", default="float64", choices=DTYPES, help="of q, k and v (float64)")
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden texts from what the code gives")


@pytest.fixture(autouse=True)
def names_added_by_a_test_end_with_it(monkeypatch):
    """Others list what is registered."""
    monkeypatch.setattr(registry, "_added", {kind: dict(names) for kind, names in registry._added.items()})


@pytest.fixture
def call(capsys):
    """Run a command; give (exit code, stdout, stderr)."""
    from harts.cli import main

    def run(*words):
        capsys.readouterr()
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
