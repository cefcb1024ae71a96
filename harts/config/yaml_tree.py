"""YAML with positions: data only, no tag is executed, and the scalars of YAML 1.2.

`on`, `off`, `yes` and `no` are text, 1e-3 is a number, 010 is ten. Aliases are not read: `${section.key}` does their
work, and a file of aliases could expand without bound.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from typing import Any

import yaml

from harts.config.faults import Faults, Path, Spot, dotted

PREFIX = "tag:yaml.org,2002:"
SCALARS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}


class _Loader(yaml.SafeLoader):
    """Composes nodes and nothing else; resolves plain scalars by `SCALARS`."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  (PyYAML's name)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            text = "aliases (*name) are not read; write ${section.key} to use a value twice"
            raise yaml.composer.ComposerError(None, None, text, event.start_mark)
        return super().compose_node(parent, index)


for _name, _pattern in SCALARS.items():
    _Loader.add_implicit_resolver(PREFIX + _name, re.compile(f"(?:{_pattern})\\Z"), None)


def _integer(text: str) -> int:
    return int(text, 0) if text.startswith(("0o", "0x")) else int(text)


def _fraction(text: str) -> float:
    return float(text.replace(".inf", "inf").replace(".nan", "nan")) if text[-1].isalpha() else float(text)


_MAKE: dict[str, Callable[[str], Any]] = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": _integer,
    "float": lambda text: _fraction(text.lower()),
    "str": str,
}


class Tree:
    """Plain data, and where each key and value of it was written."""

    def __init__(self, source: str) -> None:
        self.whole = Spot(source)
        self.data: dict[str, Any] = {}
        self.keys: dict[Path, Spot] = {}
        self.values: dict[Path, Spot] = {}

    def key_spot(self, path: Path) -> Spot:
        """Where a key stands; of a key that is absent, where the mapping that lacks it does."""
        while path:
            if path in self.keys or path in self.values:
                return self.keys.get(path) or self.values[path]
            path = path[:-1]
        return self.whole

    def value_spot(self, path: Path) -> Spot:
        """Where a value stands."""
        return self.values.get(path) or self.key_spot(path)

    def forget(self, path: Path) -> None:
        """Drop the positions of a value and of everything inside it."""
        for spots in (self.keys, self.values):
            for known in [known for known in spots if known[: len(path)] == path]:
                del spots[known]

    def get(self, path: Path) -> Any:
        """The value at a path; None if there is none."""
        here: Any = self.data
        for part in path:
            try:
                here = here[part]
            except (KeyError, IndexError, TypeError):
                return None
        return here


class TreeReader:
    """Turn YAML text into data, noting positions in a tree and faults beside it."""

    def __init__(self, tree: Tree, faults: Faults, inline: Spot | None = None) -> None:
        self.tree = tree
        self.faults = faults
        self.inline = inline
        """Everything read stands at this spot, if given."""

    def read(self, text: str, path: Path = ()) -> Any:
        """Data of a text; None after a syntax fault, which ends the reading."""
        try:
            node = yaml.compose(text, Loader=_Loader)
            return None if node is None else self._build(node, path)
        except RecursionError:
            self.faults.add(self.inline or self.tree.whole, "", "is nested too deeply")
            return None
        except yaml.MarkedYAMLError as error:
            self.faults.add(self._spot(error.problem_mark or error.context_mark), "", _syntax(error))
            return None
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            spot = self.inline or Spot(self.tree.whole.source, line, 1)
            self.faults.add(spot, "", f"the character #x{int(error.character):04x} is not allowed in YAML")
            return None

    def _spot(self, mark: Any, raw: str | None = None) -> Spot:
        if self.inline is not None or mark is None:
            return self.inline or self.tree.whole
        return Spot(self.tree.whole.source, mark.line + 1, mark.column + 1, raw)

    def _build(self, node: yaml.Node, path: Path) -> Any:
        raw = None
        if isinstance(node, yaml.ScalarNode):
            raw = node.value if node.style is None else f'"{node.value}"'
        self.tree.values[path] = self._spot(node.start_mark, raw)
        kind = node.tag.removeprefix(PREFIX)
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return [self._build(item, (*path, i)) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and kind in _MAKE:
            return self._scalar(node, kind, path)
        tag = node.tag.replace(PREFIX, "!!")
        self._fault(node, path, f"the tag {tag} is refused: a pipeline file holds data only")
        return None

    def _scalar(self, node: yaml.ScalarNode, kind: str, path: Path) -> Any:
        try:
            return _MAKE[kind](node.value)
        except ValueError:
            self._fault(node, path, f"{node.value!r} is not of the type that its tag says")
            return None

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[Hashable, Any]:
        data: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != PREFIX + "str":
                self._fault(key_node, path, "a key must be text")
                continue
            key = key_node.value
            here = (*path, key)
            if key in data:
                self._fault(key_node, here, f"is written twice; first on line {self.tree.keys[here].line}")
                continue
            self.tree.keys[here] = self._spot(key_node.start_mark)
            data[key] = self._build(value_node, here)
        return data

    def _fault(self, node: yaml.Node, path: Path, text: str) -> None:
        self.faults.add(self._spot(node.start_mark), dotted(path), text)


def _syntax(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or error.context or "is not YAML"
    if "'\\t'" in problem:
        return "YAML is indented with spaces, but here is a tab"
    return f"is not YAML: {problem}" + (f" ({error.context})" if error.context and error.problem else "")
