"""Kernels run in Triton's interpreter where there is no GPU."""

import pytest
import torch

pytest.importorskip("fla")

from tests.backends.linear import interpreter


@pytest.fixture(scope="session")
def device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    interpreter.prepare()
    return "cpu"
