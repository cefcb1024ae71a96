"""Whether a pipeline's backends can serve, and whether their kernels are right on this machine."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from harts.backends.base import Need
from harts.backends.build import refusals
from harts.errors import ConfigError
from harts.pipeline import Pipeline
from harts.train.doctor_checks import BOUNDS, Check, conv_checks, guarded, linear_checks, tree_backend
from harts.train.versions import import_if_there

SECTIONS = ("linear_attention", "full_attention")


def examine(pipeline: Pipeline, on_gpu: bool) -> dict[str, Any]:
    """Ask every backend why it could not serve, and check the kernels of those that could.

    Args:
        pipeline: of scope `all`; its model is not built if its config tells what it needs.
        on_gpu: whether kernels are checked, too.

    Returns:
        Parts of the report: `need`, `serving`, `configs`, and with `on_gpu` `checks`.

    Raises:
        ConfigError: the pipeline has no model, or kernels are to be checked where none can run.
    """
    need = need_of(pipeline)
    serving = {section: reasons(pipeline, section, need) for section in SECTIONS}
    report: dict[str, Any] = {
        "need": _shown(need),
        "serving": {
            section: {"type": pipeline.settings.components[section].name, "why_not": found}
            for section, found in serving.items()
        },
        "configs": None if serving["linear_attention"] else kernel_configs(pipeline, need),
    }
    if on_gpu:
        require_kernels(pipeline)
        checks = [] if serving["linear_attention"] else all_checks(pipeline, need)
        report["checks"] = [asdict(each) | {"fix": "" if each.ok else each.fix} for each in checks]
    return report


def need_of(pipeline: Pipeline) -> Need:
    """What the model asks of its backends; the model is built only if its config does not tell.

    Raises:
        ConfigError: the file has no model or no chunk size, or the model has to be built and the device is not there.
    """
    settings = pipeline.settings
    absent = [section for section in ("model", *SECTIONS, "call_plan", "layout") if section not in settings.components]
    if absent:
        raise ConfigError(f"{settings.path}: {absent[0]}: there is none, so that no backend is asked for anything")
    model, chunk_size = settings.components["model"], getattr(settings.components["call_plan"].config, "chunk_size", 0)
    found: Need | None = model.cls.need_of(model.config, chunk_size, settings.device)
    return pipeline.need() if found is None else found


def built(pipeline: Pipeline, section: str) -> Any:
    """The backend of a section."""
    component = pipeline.settings.components[section]
    return component.cls(component.config)


def reasons(pipeline: Pipeline, section: str, need: Need) -> list[str]:
    """Every reason why a section's backend cannot serve, its part of the layout included."""
    found = refusals(built(pipeline, section), need)
    width = getattr(pipeline.settings.components["layout"].config, "conv_width", need.conv_width)
    if section == "linear_attention" and width != need.conv_width:
        found = [*found, f"the model's conv_width is {need.conv_width}, the layout prepares windows of {width}"]
    return found


def require_kernels(pipeline: Pipeline) -> None:
    """Refuse to check kernels where none can run.

    Raises:
        ConfigError: the device is no CUDA device, and kernels are not interpreted; or triton is missing.
    """
    path, device = pipeline.settings.path, pipeline.settings.device
    machine = import_if_there("harts.backends.linear.tree.machine")  # needs triton
    if machine is None:
        raise ConfigError("--gpu: triton cannot be imported: install the extra `fla`")
    if torch.device(device).type != "cuda" and not machine.interpreted():
        raise ConfigError(f"--gpu: {path}: device is {device}; name the GPU with --set device=cuda")


def all_checks(pipeline: Pipeline, need: Need) -> list[Check]:
    """Everything that is checked on the device of a pipeline whose linear-attention backend can serve."""
    backend = built(pipeline, "linear_attention")
    found = linear_checks(backend, need) if need.dtype in BOUNDS and has_oracle(need) else []
    conv = need.conv_width > 1 and torch.promote_types(need.dtype, torch.float32) == torch.float32
    return found + (guarded("conv", lambda: conv_checks(need)) if conv else [])


def has_oracle(need: Need) -> bool:
    """Whether `naive` computes the model's rule."""
    from harts.backends.linear.naive import Naive  # noqa: PLC0415  (its checks are not needed by others)

    return need.rule in Naive.rules


def kernel_configs(pipeline: Pipeline, need: Need) -> dict[str, Any] | None:
    """Name and hash of the table of kernel configurations that runs use; None if the backend has none."""
    backend = tree_backend(built(pipeline, "linear_attention"))
    if backend is None:
        return None
    from harts.backends.linear.tree.launch import configs_for, shipped  # noqa: PLC0415  (needs triton)

    device = torch.device(need.device)
    named = backend.config.kernel_configs
    table = configs_for(device, named)
    path = Path(named) if named is not None else shipped()[table.device]
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return {"file": path.name if named is None else str(path), "device": table.device, "sha256": digest}


def _shown(need: Need) -> dict[str, Any]:
    return asdict(need) | {"dtype": str(need.dtype).removeprefix("torch.")}
