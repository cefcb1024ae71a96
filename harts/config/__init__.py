"""Pipeline files: read, overridden, interpolated and validated, with every fault reported at once."""

from harts.config.edges import Lift, lifts
from harts.config.observe import ObserveConfig
from harts.config.settings import BACKEND_SECTIONS, PLANNING, WORK_MODEL, Component, Scope, Settings, load_settings

__all__ = [
    "BACKEND_SECTIONS",
    "PLANNING",
    "WORK_MODEL",
    "Component",
    "Lift",
    "ObserveConfig",
    "Scope",
    "Settings",
    "lifts",
    "load_settings",
]
