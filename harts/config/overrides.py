"""`--set a.b=c`, and `${a.b}` through OmegaConf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harts.config.faults import Faults, Path, Spot, dotted
from harts.config.yaml_tree import Tree, TreeReader


def apply_overrides(tree: Tree, overrides: Sequence[str], faults: Faults) -> None:
    """Put each `a.b=c` into the tree, in order; c is read as YAML. A number in the path indexes a list."""
    for text in overrides:
        spot = Spot(f"--set {text}")
        name, equals, value = text.partition("=")
        path = _path(name.strip())
        if not equals or not path or "" in path:
            faults.add(spot, "", "is not of the form a.b=c")
            continue
        tree.forget(path)
        data = TreeReader(tree, faults, spot).read(value, path)
        made = [path[:i] for i in range(1, len(path)) if tree.get(path[:i]) is None]
        for new in [*made, path]:
            tree.keys[new] = tree.values[new] = spot
        fault = _put(tree.data, path, data)
        if fault:
            faults.add(spot, dotted(path), fault)


def _path(name: str) -> Path:
    return tuple(int(part) if part.isascii() and part.isdigit() else part for part in name.split("."))


def _put(data: Any, path: Path, value: Any) -> str | None:
    """Set one value, making the mappings on the way; return why it cannot be set, or None."""
    here = data
    for i, part in enumerate(path):
        last = i == len(path) - 1
        if isinstance(here, list):
            if not isinstance(part, int) or part >= len(here):
                return f"{dotted(path[:i])} is a list of {len(here)}; {part!r} is not an index of it"
        elif isinstance(here, dict):
            part = str(part)  # noqa: PLW2901
            if not last and here.get(part) is None:
                here[part] = {}
        else:
            return f"{dotted(path[:i])} is {here!r}, which holds no keys"
        if last:
            here[part] = value
        here = here[part]
    return None


class Interpolation:
    """Values of `${...}`, looked up in the whole file when they are asked for."""

    def __init__(self, tree: Tree, faults: Faults) -> None:
        self.tree = tree
        self.faults = faults
        self.root = OmegaConf.create(self._clean(tree.data, ()), flags={"allow_objects": False})

    def _clean(self, value: Any, path: Path) -> Any:
        """The data without the texts that OmegaConf cannot parse, each a fault."""
        if isinstance(value, dict):
            return {key: self._clean(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [self._clean(item, (*path, i)) for i, item in enumerate(value)]
        if isinstance(value, str) and "${" in value:
            try:
                OmegaConf.create([value])
            except OmegaConfBaseException as error:
                self._fault(path, value, error)
                return None
        return value

    def resolved(self, path: Path) -> Any:
        """Plain data at a path with every `${...}` in it replaced."""
        return self._resolve(self.tree.get(path), path)

    def _resolve(self, value: Any, path: Path) -> Any:
        if isinstance(value, dict):
            return {key: self._resolve(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [self._resolve(item, (*path, i)) for i, item in enumerate(value)]
        if isinstance(value, str) and "${" in value:
            return self._look_up(value, path)
        return value

    def _look_up(self, value: str, path: Path) -> Any:
        try:
            here: Any = self.root
            for part in path:
                here = here[part]
            return OmegaConf.to_container(here, resolve=True) if OmegaConf.is_config(here) else here
        except OmegaConfBaseException as error:
            self._fault(path, value, error)
            return None

    def _fault(self, path: Path, value: str, error: OmegaConfBaseException) -> None:
        why = str(error).splitlines()[0]
        self.faults.add(self.tree.value_spot(path), dotted(path), f"{value}: {why}")
