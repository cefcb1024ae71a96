"""Build the model with its backends, or say everything that stands in the way."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from pydantic import ValidationError

from harts.backends.base import Backend, Env, FullAttention, LinearAttention, Model, Need
from harts.backends.full.probe import probe_faults
from harts.errors import BackendError, ConfigError
from harts.registry import names, resolve
from harts.schema import StageConfig


class Prepared(NamedTuple):
    """What the planning stages of a file prepare."""

    chunk_size: int
    """Tokens a chunk, of the call plan."""
    conv_width: int
    """Tokens in a window of the short convolution, of the layout."""
    row_multiple: int = 1
    """Rows of a layout are a multiple of it."""
    replicas: int | None = None
    """Data-parallel replicas that microbatches are for, of the partition; none if it does not say."""


def build_env(  # noqa: PLR0917
    model: tuple[type[Any], StageConfig],
    linear: tuple[type[LinearAttention], StageConfig],
    full: tuple[type[FullAttention], StageConfig],
    prepared: Prepared,
    device: str,
    module: Any = None,
) -> Env:
    """Build what executes.

    Args:
        model: class of a `Model` and its config; it is built as `cls(config, linear, full, device)`.
        linear: class of the linear-attention backend and its config.
        full: class of the full-attention backend and its config.
        prepared: what its inputs will be like.
        device: as torch names it.
        module: the caller's own, which the model is to run instead of one that it builds.

    Raises:
        BackendError: a part cannot serve. The text lists every reason of every part, and the registered backends
            that could serve instead.
    """
    check_device(device)
    linear_backend, full_backend = linear[0](linear[1]), full[0](full[1])
    if module is not None and not model[0].takes_module:
        raise BackendError(f"models: {model[0].__name__}: builds its own module and takes none")
    given = {} if module is None else {"module": module}
    built: Model = model[0](model[1], linear_backend, full_backend, device, **given)
    need = built.need(prepared.chunk_size)
    reasons = [f"models: {_name(built)}: {reason}" for reason in built.why_not(need)]
    reasons += [f"models: {_name(built)}: {fault}" for fault in _unprepared(built, need, prepared)]
    for kind, backend in (("linear_attention", linear_backend), ("full_attention", full_backend)):
        faults = refusals(backend, need)
        reasons += [f"{kind}: {_name(backend)}: {fault}" for fault in faults]
        if faults:
            reasons.append(f"{kind}: could serve: {', '.join(able(kind, need)) or 'none of those registered'}")
    if reasons:
        raise BackendError("\n".join(reasons))
    built.install()
    return Env(built, device, need.dtype)


def _unprepared(model: Model, need: Need, prepared: Prepared) -> list[str]:
    """Why a model cannot take what is planned."""
    faults, split = [], model.split
    if need.conv_width != prepared.conv_width:
        faults.append(f"its conv_width is {need.conv_width}, but the layout prepares windows of {prepared.conv_width}")
    if prepared.row_multiple % split.row_multiple:
        text = f"layout.row_multiple is {prepared.row_multiple}"
        faults.append(f"its rows are split over processes in {split.row_multiple} parts, but {text}")
    if prepared.replicas is not None and split.replicas not in (1, prepared.replicas):
        text = f"partition.replicas is {prepared.replicas}"
        faults.append(f"it has {split.replicas} data-parallel replicas, but {text}")
    return faults


def check_device(device: str) -> None:
    """Ask torch for a device.

    Raises:
        BackendError: torch does not know the device, or this machine does not have it.
    """
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise BackendError(f"device: {device!r} cannot be used: {str(error).splitlines()[0]}") from error


def refusals(backend: Backend, need: Need) -> list[str]:
    """Every reason why a backend does not serve: its own; of full attention without any, what the start-up probe finds.

    Args:
        backend: of attention, on a device that is here.
        need: what it is asked for.
    """
    found = backend.why_not(need)
    return probe_faults(backend, need) if isinstance(backend, FullAttention) and not found else found


def able(kind: str, need: Need) -> list[str]:
    """Names of the registered backends of a kind that serve `need` with their default config, sorted."""
    return [name for name in sorted(names(kind)) if _serves(kind, name, need)]


def _serves(kind: str, name: str, need: Need) -> bool:
    try:
        cls = resolve(kind, name)
        backend = cls(cls.Config())
    except (ConfigError, ValidationError):  # not installed here, or it has no default config
        return False
    return not refusals(backend, need)


def _name(backend: Any) -> str:
    return type(backend).__name__
