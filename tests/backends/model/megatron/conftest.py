"""These tests run where Megatron-core is installed and there is no GPU."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest


def _reason() -> str | None:
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        return "megatron-core is not installed: pip install 'harts[megatron]'"
    import torch

    return "these run on the host, and Megatron-core takes the GPU" if torch.cuda.is_available() else None


REASON = _reason()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if REASON is not None and here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(scope="module", autouse=True)
def on_host() -> Iterator[None]:
    if REASON is not None:
        yield
        return
    from tests.backends.model.megatron.cpu import patched

    with pytest.MonkeyPatch.context() as patch:
        patched(patch)
        yield
        from megatron.core import parallel_state
        from torch import distributed

        if distributed.is_initialized():
            parallel_state.destroy_model_parallel()
            distributed.destroy_process_group()
