"""These tests run where Megatron-core is installed, on the host if there is no GPU."""

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "tools"))
from parity_bench.host import on_host

ON_GPU = torch.cuda.is_available()


def _why_not(gpu: bool) -> str | None:
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        return "megatron-core is not installed: pip install 'harts[megatron]'"
    return "runs on the host, and Megatron-core takes the GPU" if ON_GPU and not gpu else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in (each for each in items if here in each.path.parents):
        reason = _why_not("gpu" in item.keywords)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module", autouse=True)
def megatron_on_host() -> Iterator[None]:
    if ON_GPU or _why_not(gpu=False) is not None:
        yield
        return
    with on_host():
        yield
        from megatron.core import parallel_state
        from torch import distributed

        if distributed.is_initialized():
            parallel_state.destroy_model_parallel()
            distributed.destroy_process_group()
