"""The models by name: pipeline files beside this module, or files of somebody else's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from harts.config import load_settings
from harts.errors import ConfigError
from harts.pipeline import Pipeline
from step_bench.breakdown import Watch, watched

NAMES = ("ling", "ling_megatron", "qwen3_next", "dense", "reference")
LAYERS = {
    "huggingface": "model.overrides.num_hidden_layers",
    "megatron": "model.layers",
    "reference": "model.layers",
}
"""Key of the number of layers, by type of model."""


class Loaded(NamedTuple):
    """A pipeline whose parts can be measured."""

    pipeline: Pipeline
    watch: Watch
    layers: int | None
    """Of the model; None if the file alone does not tell."""
    kind: str
    """Name of the model backend."""


def load(name: str, overrides: Sequence[str] = (), layers: int | None = None) -> Loaded:
    """Load a model's pipeline file; the model itself is built on first use.

    Args:
        name: one of `NAMES`, or the path of a pipeline file whose ingest stage is `batch`.
        overrides: `a.b=c` each.
        layers: of the model; None is as many as the file says.

    Raises:
        ConfigError: with every fault of the file, or the number of layers cannot be set.
    """
    path = Path(__file__).parent / "models" / f"{name}.yaml" if name in NAMES else Path(name)
    settings = load_settings(path, overrides)
    kind = settings.components["model"].name if "model" in settings.components else "no model"
    key = LAYERS.get(kind)
    if layers is not None:
        if key is None:
            known = ", ".join(LAYERS)
            raise ConfigError(f"--layers: the model of {path} is {kind}, known are those of {known}")
        settings = load_settings(path, [*overrides, f"{key}={layers}"])
    watch = Watch()
    return Loaded(Pipeline(watched(settings, watch)), watch, _layers(settings.effective(), key), kind)


def _layers(effective: dict[str, object], key: str | None) -> int | None:
    here: object = effective
    for part in (key or "").split("."):
        if not isinstance(here, dict) or part not in here:
            return None
        here = here[part]
    return here if isinstance(here, int) else None
