"""The stage protocol: `Stage[In, Out]` states the edge types once; `run` is pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar, get_args

from harts.ir.base import Value
from harts.schema import StageConfig

__all__ = ["Stage", "StageConfig"]

In = TypeVar("In", bound=Value | None)
Out = TypeVar("Out", bound=Value)


class Stage(ABC, Generic[In, Out]):
    """One step of the pipeline. A subclass names its edge types as `Stage[In, Out]` and nests its `Config`.

    `In` is None for a source. A stage whose `needs_env` is set gets the built backends and model as `env`,
    one whose `needs_work_model` is set the built work model.
    """

    Config: ClassVar[type[StageConfig]] = StageConfig
    needs_env: ClassVar[bool] = False
    needs_work_model: ClassVar[bool] = False
    edge: ClassVar[tuple[Any, Any]]
    """(In, Out) as written in the class statement."""

    def __init__(self, config: Any, env: Any = None) -> None:
        self.config = config
        self.env = env

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in getattr(cls, "__orig_bases__", ()):
            arguments = get_args(base)
            if len(arguments) == 2:
                cls.edge = arguments

    @abstractmethod
    def run(self, value: In, /) -> Out:
        """Make this stage's value out of the one before it."""
