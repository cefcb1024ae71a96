"""A pipeline file as validated settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from harts.config.extends import read_tree
from harts.config.faults import Faults
from harts.config.observe import ObserveConfig
from harts.config.overrides import apply_overrides
from harts.registry import STAGE_KINDS
from harts.schema import StageConfig

Scope = Literal["plan", "all"]

PLANNING = STAGE_KINDS[: STAGE_KINDS.index("layout") + 1]
"""Kinds of the stages that run once a step and never import torch."""

BACKEND_SECTIONS = {"model": "models", "linear_attention": "linear_attention", "full_attention": "full_attention"}
"""Section -> kind in the registry."""

WORK_MODEL = "work_model"
"""Section of the measure that partitions are searched in; `DEFAULT_WORK_MODEL` serves where it is absent."""

DEFAULT_WORK_MODEL = "compact"

TOP_LEVEL = ("pipeline", *STAGE_KINDS, WORK_MODEL, *BACKEND_SECTIONS, "device", "train", "observe")


def dumped(config: StageConfig) -> dict[str, Any]:
    """Values of a config with its defaults; paths are absolute, so that they mean the same in another folder."""
    values = config.model_dump(mode="json")
    for name in values:
        held = getattr(config, name)
        if isinstance(held, Path):
            values[name] = str(held.absolute())
    return values


@dataclass(frozen=True)
class Component:
    """A registered class that a section names, with its config."""

    section: str
    kind: str
    name: str
    cls: type[Any]
    config: StageConfig

    def shown(self) -> dict[str, Any]:
        """The section with its defaults."""
        return {"type": self.name, **dumped(self.config)}


@dataclass(frozen=True)
class Settings:
    """Everything that a file, with its overrides, says."""

    path: Path
    overrides: tuple[str, ...]
    scope: Scope
    order: tuple[str, ...]
    """Stage kinds that run, in order; in scope `plan` only the planning ones."""
    components: dict[str, Component]
    """By section; the objective is `train.objective`."""
    observe: ObserveConfig
    device: str
    train: StageConfig | None
    untouched: dict[str, Any] = field(default_factory=dict)
    """Sections that this scope leaves alone, as they were written."""
    listed: tuple[str, ...] = ()
    """Stage kinds of the file's `pipeline`, whatever the scope."""

    def effective(self) -> dict[str, Any]:
        """The whole file with overrides and defaults, as plain data."""
        found: dict[str, Any] = {"pipeline": list(self.listed)}
        for name in TOP_LEVEL[1:]:
            if name in self.components:
                found[name] = self.components[name].shown()
            elif name in self.untouched:
                found[name] = self.untouched[name]
        found["device"] = self.device
        if self.train is not None:
            objective = self.components["train.objective"].shown()
            found["train"] = {**dumped(self.train), "objective": objective}
        found["observe"] = dumped(self.observe)
        return found


def load_settings(path: str | Path, overrides: Sequence[str] = (), scope: Scope = "all") -> Settings:
    """Read and validate a pipeline file.

    Args:
        path: the YAML file.
        overrides: `a.b=c`, applied in order.
        scope: `plan` leaves everything alone that planning does not use, and imports no torch.

    Raises:
        ConfigError: with every fault of the file and the overrides.
    """
    from harts.config.sections import Sections  # noqa: PLC0415  (it builds Settings)

    faults = Faults()
    tree = read_tree(Path(path), faults)
    if tree is None:
        faults.raise_any()
        raise AssertionError("a tree that is None comes with a fault")
    apply_overrides(tree, overrides, faults)
    settings = Sections(tree, faults, scope).settings(Path(path), tuple(overrides))
    faults.raise_any()
    assert settings is not None
    return settings
