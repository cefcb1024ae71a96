"""`extends: other.yaml`: a pipeline file that writes down only what it changes of another."""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import Any

from harts.config.faults import Faults, Path
from harts.config.yaml_tree import Tree, TreeReader
from harts.errors import ConfigError

KEY = "extends"


def read_tree(path: FilePath, faults: Faults, extending: tuple[FilePath, ...] = ()) -> Tree | None:
    """Read a file over the one that it extends; None if it is not a mapping. Positions name the file of each value.

    Args:
        path: the file.
        faults: gets every fault.
        extending: files that lead here.

    Raises:
        ConfigError: a file cannot be read.
    """
    tree = Tree(str(path))
    data = TreeReader(tree, faults).read(_text(path))
    if not isinstance(data, dict):
        if not faults.found:
            got = "is empty" if data is None else f"is a {type(data).__name__}"
            faults.add(tree.whole, "", f"{got}; wanted is a mapping of sections")
        return None
    tree.data = data
    if KEY not in data:
        return tree
    name = data.pop(KEY)
    spot = tree.values[KEY,]
    if not isinstance(name, str):
        faults.add(spot, KEY, f"got {name!r}; wanted is the path of a pipeline file")
        return tree
    base_path = path.parent / name
    if base_path.resolve() in (each.resolve() for each in (*extending, path)):
        faults.add(spot, KEY, f"{name} extends this file in turn")
        return tree
    base = read_tree(base_path, faults, (*extending, path))
    return tree if base is None else _overlaid(base, tree)


def _overlaid(base: Tree, tree: Tree) -> Tree:
    """The base with this file's values over it: mappings are merged, everything else is replaced."""
    base.whole = tree.whole
    _merge(base, tree, base.data, tree.data, ())
    return base


def _merge(base: Tree, tree: Tree, under: dict[str, Any], over: dict[str, Any], path: Path) -> None:
    for key, value in over.items():
        here = (*path, key)
        if isinstance(value, dict) and isinstance(under.get(key), dict):
            base.keys[here], base.values[here] = tree.keys[here], tree.values[here]
            _merge(base, tree, under[key], value, here)
        else:
            base.forget(here)
            base.keys.update({known: spot for known, spot in tree.keys.items() if known[: len(here)] == here})
            base.values.update({known: spot for known, spot in tree.values.items() if known[: len(here)] == here})
            under[key] = value


def _text(path: FilePath) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from error
