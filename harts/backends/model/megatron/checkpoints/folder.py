"""Folders of checkpoints: config.json, and tensors in files of safetensors, which are read when they are needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from harts.backends.model.megatron.checkpoints.ling import LING
from harts.backends.model.megatron.checkpoints.qwen3_next import QWEN3_NEXT
from harts.backends.model.megatron.checkpoints.rules import Family, Shape
from harts.errors import BackendError, ConfigError

FAMILIES = {"bailing_hybrid": LING, "qwen3_next": QWEN3_NEXT}
INDEX, ALONE = "model.safetensors.index.json", "model.safetensors"


def family_of(values: Mapping[str, Any]) -> Family:
    """The family of a config.json.

    Raises:
        ConfigError: there is none.
    """
    kind = values.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(f"model: checkpoint: model_type is {kind}, served is {' or '.join(FAMILIES)}")
    return FAMILIES[kind]


def described(folder: str) -> dict[str, Any]:
    """config.json of a folder.

    Raises:
        ConfigError: it cannot be read.
    """
    return _read(Path(folder) / "config.json")


def _read(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: checkpoint: {file} cannot be read: {error}") from error
    if not isinstance(read, dict):
        raise ConfigError(f"model: checkpoint: {file} holds a {type(read).__name__}, no settings")
    return read


def completed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a configuration with a checkpoint; those that are not given are the checkpoint's.

    Raises:
        ConfigError: the checkpoint cannot be served, or fields that are given have another shape; it names all of them.
    """
    values = described(given["checkpoint"])
    shape = family_of(values).fields_of(values)
    given = dict(given)
    if isinstance(given.get("pattern"), str):
        given["pattern"] = (given["pattern"] * shape["layers"])[: shape["layers"]]
    if hasattr(given.get("moe"), "model_dump"):
        given["moe"] = given["moe"].model_dump()
    found, faults = _merged(given, shape, "")
    if faults:
        raise ConfigError("\n".join(f"model: {fault}" for fault in faults))
    return found


def _merged(given: Mapping[str, Any], shape: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    found, faults = {**shape, **given}, []
    for name in sorted(set(given) & set(shape)):
        if isinstance(given[name], dict) and isinstance(shape[name], dict):
            found[name], more = _merged(given[name], shape[name], f"{where}{name}.")
            faults += more
        elif given[name] != shape[name]:
            faults.append(f"{where}{name} is {given[name]}, but the checkpoint's is {shape[name]}")
    return found, faults


class Tensors:
    """Of a folder, by name."""

    def __init__(self, folder: str) -> None:
        files = [Path(folder) / name for name in sorted(_files(Path(folder)))]
        opened = [_opened(file) for file in files]
        self._of = {name: file for file in opened for name in file.keys()}  # noqa: SIM118  (no mapping)

    @property
    def shapes(self) -> dict[str, Shape]:
        """Of every tensor."""
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._of.items()}

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._of[name].get_tensor(name)
        return tensor


def _files(folder: Path) -> set[str]:
    return set(_read(folder / INDEX).get("weight_map", {}).values()) if (folder / INDEX).exists() else {ALONE}


def _opened(file: Path) -> Any:
    try:
        library = import_module("safetensors")
    except ImportError as error:
        raise BackendError(f"models: megatron: checkpoint: {error}; pip install 'harts[megatron]'") from error
    try:
        return library.safe_open(file, framework="pt")
    except (OSError, library.SafetensorError) as error:
        raise ConfigError(f"model: checkpoint: {file} cannot be read: {error}") from error
