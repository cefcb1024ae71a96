"""Options and settings of the whole suite."""

import os
from importlib.util import find_spec

import pytest

if find_spec("torch") is not None:  # a planning-only install has none
    import torch

    # without a GPU, kernels are tested in triton's interpreter, which triton looks for when it is imported
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden texts from what the code gives")
