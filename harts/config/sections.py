"""The sections of a pipeline file: which class each names, its config, and whether they fit together."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path as FilePath
from typing import Any

from harts.config.edges import lifts
from harts.config.faults import Faults, Path, closest, dotted, shown, suggestion
from harts.config.observe import ObserveConfig
from harts.config.overrides import Interpolation
from harts.config.settings import (
    BACKEND_SECTIONS,
    DEFAULT_WORK_MODEL,
    PLANNING,
    TOP_LEVEL,
    WORK_MODEL,
    Component,
    Scope,
    Settings,
)
from harts.config.validate import Owners, unknown_key, validate
from harts.config.yaml_tree import Tree
from harts.errors import ConfigError
from harts.registry import STAGE_KINDS, names, resolve
from harts.schema import StageConfig

TRAIN_CONFIG = "harts.train.config:TrainConfig"


class Sections:
    """Validates one tree; faults are gathered, so nothing here stops at the first."""

    def __init__(self, tree: Tree, faults: Faults, scope: Scope) -> None:
        self.tree, self.faults, self.scope = tree, faults, scope
        self.values = Interpolation(tree, faults)
        self.listed = self._listed()
        self.order = tuple(kind for kind in self.listed if scope == "all" or kind in PLANNING)
        self.classes: dict[str, tuple[str, str, type[Any]]] = {}
        """Section -> (kind, name, class)."""
        self.owners: Owners = {}

    def settings(self, path: FilePath, overrides: tuple[str, ...]) -> Settings | None:
        """All sections; None after a fault."""
        wanted = self._wanted()
        for section, kind in wanted.items():
            self._resolve(section, kind)
        train_config = self._train_config()
        self._note_owners(train_config)
        self._unknown_sections()
        components = {section: self._component(section) for section in self.classes}
        components |= self._work_model(components)
        train = self._plain("train", train_config, drop=("objective",)) if train_config else None
        observe = self._plain("observe", ObserveConfig)
        device = self._device()
        self._edges()
        if self.faults.found:
            return None
        built = {section: each for section, each in components.items() if each is not None}
        used = {*wanted, "pipeline", "observe", "device", *(["train"] if self.scope == "all" else [])}
        untouched = {key: value for key, value in self.tree.data.items() if key not in used}
        assert isinstance(observe, ObserveConfig)
        return Settings(path, overrides, self.scope, self.order, built, observe, device, train, untouched, self.listed)

    def _listed(self) -> tuple[str, ...]:
        """The stage kinds of `pipeline`, without those at fault."""
        path: Path = ("pipeline",)
        value = self.values.resolved(path)
        if not isinstance(value, list) or not value:
            text = "is required" if path[0] not in self.tree.data else f"got {shown(value)}; wanted is a list"
            self.faults.add(
                self.tree.value_spot(path), "pipeline", f"{text}: the stages in order, {', '.join(PLANNING)}"
            )
            return ()
        kept: list[str] = []
        for i, kind in enumerate(value):
            here = (*path, i)
            if kind not in STAGE_KINDS:
                text = f"got {shown(kind)}; {suggestion(str(kind), STAGE_KINDS)}"
                self.faults.add(self.tree.value_spot(here), dotted(here), text)
            elif kind in kept:
                self.faults.add(self.tree.value_spot(here), dotted(here), f"{kind} is listed twice")
            else:
                kept.append(kind)
                if kind not in self.tree.data:
                    self.faults.add(self.tree.value_spot(here), dotted(here), f"{kind} has no section in this file")
        return tuple(kept)

    def _wanted(self) -> dict[str, str]:
        """Sections of registered components to validate, with their kinds."""
        data = self.tree.data
        found = {kind: kind for kind in self.order if kind in data}
        found |= {WORK_MODEL: "work_models"} if data.get(WORK_MODEL) is not None else {}
        for kind in STAGE_KINDS:
            if kind in data and self.listed and kind not in self.listed and (self.scope == "all" or kind in PLANNING):
                self.faults.add(self.tree.key_spot((kind,)), kind, "has no effect: `pipeline` does not list it")
        if self.scope == "plan":
            return found
        found |= {section: kind for section, kind in BACKEND_SECTIONS.items() if section in data}
        if "execute" in self.order:
            for section in [section for section in BACKEND_SECTIONS if section not in data]:
                self.faults.add(self.tree.key_spot(("execute",)), section, "is required: execute runs it")
        if data.get("train") is not None:
            found["train.objective"] = "objectives"
        return found

    def _resolve(self, section: str, kind: str) -> None:
        path: Path = tuple(section.split("."))
        data = self.tree.get(path)
        try:
            known = sorted(names(kind))
        except ConfigError as error:
            self.faults.add(self.tree.key_spot(path), section, str(error))
            return
        if not isinstance(data, dict) or data.get("type") is None:
            text = "is required" if isinstance(data, dict) or data is None else f"got {shown(data)}"
            self.faults.add(self.tree.value_spot(path), f"{section}.type", f"{text}; known: {', '.join(known)}")
            return
        here = (*path, "type")
        name = self.values.resolved(here)
        if name not in known:
            text = f"got {shown(name)}; {suggestion(str(name), known)}"
            self.faults.add(self.tree.value_spot(here), dotted(here), text)
            return
        try:
            self.classes[section] = (kind, name, resolve(kind, name))
        except ConfigError as error:
            self.faults.add(self.tree.value_spot(here), dotted(here), str(error))

    def _train_config(self) -> type[StageConfig] | None:
        if self.scope == "plan" or self.tree.data.get("train") is None:
            return None
        for kind in [kind for kind in ("execute", "restore") if kind not in self.listed]:
            self.faults.add(self.tree.key_spot(("train",)), "train", f"needs the stage {kind} in `pipeline`")
        module, _, name = TRAIN_CONFIG.partition(":")
        found: type[StageConfig] = getattr(import_module(module), name)
        return found

    def _note_owners(self, train_config: type[StageConfig] | None) -> None:
        configs = {section: cls.Config for section, (_, _, cls) in self.classes.items()}
        configs |= {"observe": ObserveConfig} | ({"train": train_config} if train_config else {})
        for section, config in configs.items():
            for name in config.model_fields:
                self.owners.setdefault(name, []).append(section)
        for name in TOP_LEVEL:
            self.owners.setdefault(name, []).append("the top level")

    def _unknown_sections(self) -> None:
        for key, value in self.tree.data.items():
            if key in TOP_LEVEL:
                continue
            inner = value if isinstance(value, dict) and closest(key, TOP_LEVEL) is None else {}
            moved = [name for name in inner if name in self.owners]
            for name in moved:
                text = f"{key} is no section; {name} belongs in {' or '.join(self.owners[name])}"
                self.faults.add(self.tree.key_spot((key, name)), f"{key}.{name}", text)
            if not moved:
                text = unknown_key(key, list(TOP_LEVEL), self.owners)
                self.faults.add(self.tree.key_spot((key,)), key, text)

    def _component(self, section: str) -> Component | None:
        kind, name, cls = self.classes[section]
        path: Path = tuple(section.split("."))
        data = {key: value for key, value in self.values.resolved(path).items() if key != "type"}
        config = validate(self.tree, path, data, cls.Config, owners=self.owners, faults=self.faults)
        return None if config is None else Component(section, kind, name, cls, config)

    def _work_model(self, components: dict[str, Component | None]) -> dict[str, Component]:
        """The default where a stage needs a work model and the file names none; faults of one that does not fit."""
        path: Path = (WORK_MODEL,)
        needed = [kind for kind in self.order if kind in self.classes and self.classes[kind][2].needs_work_model]
        if WORK_MODEL not in self.classes:
            if not needed or self.tree.data.get(WORK_MODEL) is not None:
                return {}
            cls = resolve("work_models", DEFAULT_WORK_MODEL)
            return {WORK_MODEL: Component(WORK_MODEL, "work_models", DEFAULT_WORK_MODEL, cls, cls.Config())}
        if not needed:
            self.faults.add(self.tree.key_spot(path), WORK_MODEL, "has no effect: no stage of `pipeline` asks for one")
        chosen, call_plan = components[WORK_MODEL], components.get("call_plan")
        if chosen is None:
            return {}
        ours, planned = (getattr(each and each.config, "chunk_size", None) for each in (chosen, call_plan))
        if ours is not None and planned is not None and ours != planned:
            here = (*path, "chunk_size")
            self.faults.add(
                self.tree.value_spot(here), dotted(here), f"is {ours}, but call_plan.chunk_size is {planned}"
            )
        try:
            chosen.cls(chosen.config)
        except ConfigError as error:
            self.faults.add(self.tree.value_spot(path), WORK_MODEL, str(error))
        return {}

    def _plain(self, section: str, config: type[StageConfig], drop: tuple[str, ...] = ()) -> StageConfig | None:
        data = self.values.resolved((section,))
        if data is not None and not isinstance(data, dict):
            spot = self.tree.value_spot((section,))
            self.faults.add(spot, section, f"got {shown(data)}; wanted is a mapping")
            return None
        kept = {key: value for key, value in (data or {}).items() if key not in drop}
        return validate(self.tree, (section,), kept, config, owners=self.owners, faults=self.faults)

    def _device(self) -> str:
        value = self.values.resolved(("device",))
        if value is not None and not isinstance(value, str):
            self.faults.add(
                self.tree.value_spot(("device",)), "device", f"got {shown(value)}; wanted is text, like cpu"
            )
        return "cpu" if value is None else str(value)

    def _edges(self) -> None:
        if not self.order or any(kind not in self.classes for kind in self.order):
            return
        chain = [(kind, self.classes[kind][2]) for kind in self.order]
        for kind, lift in zip(self.order, lifts(chain), strict=True):
            if isinstance(lift, str):
                here = ("pipeline", self.tree.get(("pipeline",)).index(kind))
                self.faults.add(self.tree.value_spot(here), dotted(here), lift)
