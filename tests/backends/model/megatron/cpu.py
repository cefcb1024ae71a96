"""Lets Megatron-core run without a GPU: where it names one, it gets the host.

Megatron asks torch for the current device, streams and random states of CUDA wherever it runs. `patched` answers for
the host, and mends names that only an installed Transformer Engine defines, as long as a test lasts.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import pytest
import torch

FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "ones_like", "tensor", "zeros", "zeros_like")
HOST = torch.device("cpu")


def patched(patch: pytest.MonkeyPatch) -> None:
    """Replace what has to be, until `patch` is undone."""
    with pytest.MonkeyPatch.context() as first:
        first.setenv("TORCHDYNAMO_DISABLE", "1")  # read when Megatron's small functions are defined
        backend = import_module("harts.backends.model.megatron.backend")
    assert backend is not None
    _device(patch)
    _factories(patch)
    _random(patch)
    _absent_extensions(patch)


class _Stream:
    """All work of the host is in order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def record_event(self, *_: Any) -> _Stream:
        return self

    def synchronize(self) -> None: ...


def _device(patch: pytest.MonkeyPatch) -> None:
    for name in ("synchronize", "set_device"):
        patch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("current_stream", "Stream"):
        patch.setattr(torch.cuda, name, _Stream)
    patch.setattr(torch.cuda, "current_device", lambda: HOST)
    patch.setattr(torch.cuda, "stream", lambda *_: nullcontext())
    patch.setattr(torch.Tensor, "cuda", lambda self, *_, **__: self)
    patch.setattr(torch.Tensor, "record_stream", lambda *_: None)


def _factories(patch: pytest.MonkeyPatch) -> None:
    def on_host(make: Any) -> Any:
        @functools.wraps(make)
        def made(*given: Any, **others: Any) -> Any:
            if "cuda" in str(others.get("device")):
                others["device"] = HOST
            return make(*given, **others)

        return made

    for name in FACTORIES:
        patch.setattr(torch, name, on_host(getattr(torch, name)))


def _random(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.tensor_parallel import random

    def read(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def write(state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    patch.setattr(torch.cuda, "get_rng_state", read)
    patch.setattr(torch.cuda, "set_rng_state", write)
    patch.setattr(torch.cuda, "manual_seed", lambda _: None)
    for name in ("_get_cuda_rng_state", "get_cuda_rng_state"):
        patch.setattr(random, name, read, raising=False)
    patch.setattr(random, "_set_cuda_rng_state", write)


def _absent_extensions(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16: used without a look whether it is there
        patch.setattr(moe_utils, "te_general_gemm", None, raising=False)
    if not isinstance(getattr(multi_latent_attention, "TELinear", None), type):
        patch.setattr(multi_latent_attention, "HAVE_TE", False)

    def to_host(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    for module in (moe_utils, token_dispatcher):
        # tensors that are on the host already stay tensors, which the exchange of rows does not take
        patch.setattr(module, "maybe_move_tensor_to_cpu", to_host)
