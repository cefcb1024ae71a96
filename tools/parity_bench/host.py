"""Lets Megatron-core run without a GPU: where it names one, it gets the host.

Megatron asks torch for the current device, streams and random states of CUDA wherever it runs. `on_host` answers for
the host, and mends names that only an installed Transformer Engine defines, as long as it lasts.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch

FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "ones_like", "tensor", "zeros", "zeros_like")
HOST = torch.device("cpu")


@contextmanager
def on_host() -> Iterator[None]:
    """Replace what has to be, and take it back at the end."""
    with patch.dict(os.environ, {"TORCHDYNAMO_DISABLE": "1"}):  # read when Megatron's small functions are defined
        import_module("harts.backends.model.megatron.run")
    with ExitStack() as patches:

        def replace(owner: Any, name: str, new: Any) -> None:
            patches.enter_context(patch.object(owner, name, new, create=True))

        _device(replace)
        _factories(replace)
        _random(replace)
        _absent_extensions(replace)
        yield


class _Stream:
    """All work of the host is in order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def record_event(self, *_: Any) -> _Stream:
        return self

    def synchronize(self) -> None: ...


def _device(replace: Any) -> None:
    for name in ("synchronize", "set_device"):
        replace(torch.cuda, name, lambda *_: None)
    for name in ("current_stream", "Stream"):
        replace(torch.cuda, name, _Stream)
    replace(torch.cuda, "current_device", lambda: HOST)
    replace(torch.cuda, "stream", lambda *_: nullcontext())
    replace(torch.Tensor, "cuda", lambda self, *_, **__: self)
    replace(torch.Tensor, "record_stream", lambda *_: None)
    replace(torch.Tensor, "type", _named_as_of_gpu(torch.Tensor.type))


def _named_as_of_gpu(stock: Any) -> Any:
    """Megatron's optimizers ask tensors for the name of their type."""

    def named(self: torch.Tensor, *given: Any, **others: Any) -> Any:
        found = stock(self, *given, **others)
        return found if given or others else found.replace("torch.", "torch.cuda.")

    return named


def _factories(replace: Any) -> None:
    def on_host(make: Any) -> Any:
        @functools.wraps(make)
        def made(*given: Any, **others: Any) -> Any:
            if "cuda" in str(others.get("device")):
                others["device"] = HOST
            return make(*given, **others)

        return made

    for name in FACTORIES:
        replace(torch, name, on_host(getattr(torch, name)))


def _random(replace: Any) -> None:
    random = import_module("megatron.core.tensor_parallel.random")

    def read(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def write(state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    replace(torch.cuda, "get_rng_state", read)
    replace(torch.cuda, "set_rng_state", write)
    replace(torch.cuda, "manual_seed", lambda _: None)
    for name in ("_get_cuda_rng_state", "get_cuda_rng_state"):
        replace(random, name, read)
    replace(random, "_set_cuda_rng_state", write)


def _absent_extensions(replace: Any) -> None:
    multi_latent_attention = import_module("megatron.core.transformer.multi_latent_attention")
    moe_utils = import_module("megatron.core.transformer.moe.moe_utils")
    token_dispatcher = import_module("megatron.core.transformer.moe.token_dispatcher")

    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16: used without a look whether it is there
        replace(moe_utils, "te_general_gemm", None)
    if not isinstance(getattr(multi_latent_attention, "TELinear", None), type):
        replace(multi_latent_attention, "HAVE_TE", False)

    def to_host(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    for module in (moe_utils, token_dispatcher):
        # tensors that are on the host already stay tensors, which the exchange of rows does not take
        replace(module, "maybe_move_tensor_to_cpu", to_host)
