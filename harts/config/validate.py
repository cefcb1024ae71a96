"""One mapping against one `Config` class, with every fault in words that say what to write instead."""

from __future__ import annotations

import json
from pathlib import Path as FilePath
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from harts.config.faults import Faults, Path, closest, dotted, shown, suggestion
from harts.config.yaml_tree import Tree
from harts.schema import StageConfig

Owners = dict[str, list[str]]
"""Sections that have a field, by the field's name; "" for the top level."""

WANTED = {
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "path_type": "a path",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}


def validate(
    tree: Tree, path: Path, data: dict[str, Any], config: type[StageConfig], *, owners: Owners, faults: Faults
) -> StageConfig | None:
    """Build a config from a section's keys (without `type`); None after a fault.

    Args:
        tree: where the section was written.
        path: of the section.
        data: its keys, interpolated.
        config: the class to build.
        owners: where a misplaced key might belong.
        faults: gets every fault.
    """
    try:
        built = config.model_validate_json(json.dumps(data))
    except ValidationError as error:
        _Reporter(tree, path, data, config, owners=owners, faults=faults).report(error)
        return None
    return _absolute(tree, path, built)


def _absolute(tree: Tree, path: Path, built: StageConfig) -> StageConfig:
    """Relative paths that the file holds are relative to its folder; those of a `--set` to the working directory."""
    found = {}
    for name in type(built).model_fields:
        value = getattr(built, name)
        written = tree.value_spot((*path, name))
        if isinstance(value, FilePath) and not value.is_absolute() and written.line is not None:
            found[name] = FilePath(written.source).parent / value
    return built.model_copy(update=found) if found else built


class _Reporter:
    """Faults of one section."""

    def __init__(
        self, tree: Tree, path: Path, data: Any, config: type[BaseModel], *, owners: Owners, faults: Faults
    ) -> None:
        self.tree, self.path, self.data, self.config = tree, path, data, config
        self.owners, self.faults = owners, faults

    def report(self, error: ValidationError) -> None:
        found = error.errors(include_url=False)
        meant = {self._meant(each["loc"]) for each in found if each["type"] == "extra_forbidden"}
        for each in found:
            here = (*self.path, *self._inside(each["loc"]))
            if each["type"] == "extra_forbidden":
                self._unknown(each["loc"])
            elif each["type"] == "missing":
                if each["loc"] not in meant:  # the misspelt key is fault enough
                    missing = (*self.path, *each["loc"])
                    self.faults.add(self.tree.key_spot(here), dotted(missing), "is required" + self._about(each["loc"]))
            else:
                text = self._wrong(each, here)
                self.faults.add(self.tree.value_spot(here), dotted(here), text)

    def _inside(self, loc: Path) -> Path:
        """The part of pydantic's location that exists in the data; the arms of a union do not."""
        here, found = self.data, ()
        for part in loc:
            held = isinstance(here, dict) and part in here
            if not held and not (isinstance(here, list) and isinstance(part, int) and part < len(here)):
                break
            here, found = here[part], (*found, part)  # type: ignore[assignment]
        return found

    def _fields(self, loc: Path) -> dict[str, Any]:
        """Fields of the model that holds the last key of a location."""
        model: Any = self.config
        for part in loc[:-1]:
            field = model.model_fields.get(part)
            inner = next((each for each in _arms(field.annotation) if _is_model(each)), None) if field else None
            if inner is None:
                break
            model = inner
        return dict(model.model_fields)

    def _meant(self, loc: Path) -> Path:
        close = closest(str(loc[-1]), self._fields(loc))
        return (*loc[:-1], close) if close else loc

    def _unknown(self, loc: Path) -> None:
        here = (*self.path, *loc)
        text = unknown_key(str(loc[-1]), list(self._fields(loc)), self.owners)
        self.faults.add(self.tree.key_spot(here), dotted(here), text)

    def _about(self, loc: Path) -> str:
        field = self._fields(loc).get(str(loc[-1]))
        return f": {field.description}" if field is not None and field.description else ""

    def _wrong(self, error: Any, here: Path) -> str:
        value, kind = error["input"], error["type"]
        got = f"got {shown(value, self.tree.value_spot(here).raw)}"
        if kind in WANTED:
            return f"{got}; wanted is {WANTED[kind]}{_rewrite(value, WANTED[kind])}"
        if kind == "value_error":
            return str(error["ctx"]["error"])
        if kind in ("literal_error", "enum"):
            known = [part.strip("' ") for part in error["ctx"]["expected"].replace(" or ", ", ").split(",")]
            return f"{got}; {suggestion(str(value), known)}"
        message = error["msg"].removeprefix("Input ").removeprefix("should ")
        return f"{got}; it should {message}"


def unknown_key(key: str, known: list[str], owners: Owners) -> str:
    """Say where an unknown key belongs, or what it may have meant."""
    name = key.replace("-", "_").lower()
    if closest(key, known) is None or name not in known:
        places = owners.get(name) or owners.get(closest(key, owners) or "") or []
        if places and closest(key, known) is None:
            field = name if name in owners else closest(key, owners)
            return (
                f"is not a key here; {field} belongs in {' or '.join(places)}; known here: {', '.join(known) or 'none'}"
            )
    return f"is not a key; {suggestion(key, known)}"


def _rewrite(value: Any, wanted: str) -> str:
    if wanted == "an integer" and isinstance(value, float) and value.is_integer():
        return f": write {int(value)}"
    if isinstance(value, str) and wanted in ("an integer", "a number") and value.lstrip("+-").isdigit():
        return f": write {value} without quotes"
    if isinstance(value, str) and wanted == "an integer" and value.replace("_", "").replace(",", "").isdigit():
        return f": write {value.replace('_', '').replace(',', '')}"
    if wanted == "true or false" and value in ("on", "yes", "off", "no"):
        return f": write {'true' if value in ('on', 'yes') else 'false'}"
    if wanted == "text" and isinstance(value, int | float):
        return ": put it in quotes"
    return ""


def _arms(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) or (annotation,)


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
