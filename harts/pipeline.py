"""Run the stages of a pipeline file, from the start or from any value between two of them."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harts.config import (
    BACKEND_SECTIONS,
    WORK_MODEL,
    Component,
    Lift,
    ObserveConfig,
    Scope,
    Settings,
    lifts,
    load_settings,
)
from harts.config.edges import type_name
from harts.errors import BackendError, ConfigError, InputError
from harts.ir import CompactLayout, PerMicrobatch, RolloutBatch, RoundPlan, SegmentTree, SemanticOutputs, Value
from harts.observe import Observer, SavedOnFailure, Times, build_observers
from harts.registry import resolve

if TYPE_CHECKING:
    from harts.backends.base import Env, Need


class Pipeline:
    """The stages of one file. Planning needs no torch; the model and its backends are built on first use."""

    def __init__(self, settings: Settings, module: Any = None) -> None:
        self.settings = settings
        self._module = module
        self.times = Times()
        self.observers: list[Observer] = build_observers(settings.observe, settings.order, self.times)
        chain = [(kind, settings.components[kind].cls) for kind in settings.order]
        self.lifts: tuple[Lift, ...] = tuple(lift for lift in lifts(chain) if isinstance(lift, Lift))
        self._stages: dict[str, Any] = {}
        self._env: Env | None = None

    @classmethod
    def load(
        cls, path: str | Path, overrides: Sequence[str] = (), scope: Scope = "all", *, module: Any = None
    ) -> Pipeline:
        """Read, check and prepare a pipeline file.

        Args:
            path: the YAML file.
            overrides: `a.b=c` each, the value as YAML.
            scope: `plan` reads only what planning uses and imports no torch.
            module: the trainer's own model, for model backends that run one (`model: {type: huggingface}`). It is
                checked here, with the backends; a model of the file's is built on first use.

        Raises:
            ConfigError: with every fault of the file, edge types included, or every reason why the module cannot run.
        """
        pipeline = cls(load_settings(path, overrides, scope), module)
        if module is not None:
            pipeline._check_module()
        return pipeline

    def _check_module(self) -> None:
        if "model" not in self.settings.components:
            raise ConfigError(f"{self.settings.path}: a model is handed over, and there is no section model to run it")
        _ = self.env

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each stage that ran."""
        return self.times.seconds

    @property
    def env(self) -> Env:
        """The built model with its backends.

        Raises:
            ConfigError: with every reason why the file's choice cannot serve, and what could.
        """
        if self._env is None:
            from harts.backends.build import Prepared, build_env  # noqa: PLC0415  (imports torch)

            model, linear, full = (self._pair(section) for section in BACKEND_SECTIONS)
            prepared = Prepared(
                chunk_size=self._number("call_plan", "chunk_size"),
                conv_width=self._number("layout", "conv_width"),
                row_multiple=self._value("layout", "row_multiple") or 1,
                replicas=self._value("partition", "replicas"),
            )
            try:
                self._env = build_env(model, linear, full, prepared, self.settings.device, self._module)
            except (BackendError, ConfigError) as error:
                lines = str(error).splitlines()
                raise ConfigError("\n".join(f"{self.settings.path}: {line}" for line in lines)) from error
        return self._env

    @property
    def waits_for_module(self) -> bool:
        """Whether the file's model is one that the caller of `load` hands over, and has not."""
        model = self.settings.components.get("model")
        return model is not None and self._module is None and bool(model.cls.waits_for_module(model.config))

    def need(self) -> Need:
        """What the model asks of the attention backends, whether or not the file's choice can serve.

        Raises:
            ConfigError: the device cannot be used: the model is built on it.
        """
        from harts.backends.build import check_device  # noqa: PLC0415  (imports torch)

        try:
            check_device(self.settings.device)
        except BackendError as error:
            raise ConfigError(f"{self.settings.path}: {error}") from error
        linear, full = (cls(config) for cls, config in map(self._pair, ("linear_attention", "full_attention")))
        cls, config = self._pair("model")
        given = {} if self._module is None else {"module": self._module}
        built = cls(config, linear, full, self.settings.device, **given)
        need: Need = built.need(self._number("call_plan", "chunk_size"))
        return need

    def _pair(self, section: str) -> tuple[type[Any], Any]:
        component = self.settings.components[section]
        return component.cls, component.config

    def _number(self, section: str, field: str) -> int:
        found = self._value(section, field)
        if found is None:
            raise ConfigError(
                f"{self.settings.path}: {section}.{field}: the backends need it, and it is not configured"
            )
        return found

    def _value(self, section: str, field: str) -> int | None:
        component = self.settings.components.get(section)
        value: int | None = None if component is None else getattr(component.config, field, None)
        return value

    def stage(self, kind: str) -> Any:
        """The built stage of a kind."""
        if kind not in self._stages:
            self._stages[kind] = self._build(self.settings.components[kind])
        return self._stages[kind]

    def _build(self, component: Component) -> Any:
        env: Any = self.env if component.cls.needs_env else None
        if component.cls.needs_work_model:
            cls, config = self._pair(WORK_MODEL)
            env = cls(config)
        return component.cls(component.config, env)

    def plan(self, batch: RolloutBatch | None = None) -> PerMicrobatch[CompactLayout]:
        """Run the planning stages.

        Args:
            batch: trajectories to plan, if the ingest stage takes them (`ingest: {type: batch}`).

        Raises:
            InputError: the rollouts are wrong, or no stage takes the batch.
            ConfigError: a batch is missing, or the file ends elsewhere.
            PlanError: no plan exists.
        """
        if batch is None:
            return self._planned(self.run(until="layout"))
        return self._planned(self.resume(batch, until="layout"))

    def _planned(self, value: Value) -> PerMicrobatch[CompactLayout]:
        if not isinstance(value, PerMicrobatch) or not all(isinstance(item, CompactLayout) for item in value.items):
            got = type_name(type_of(value))
            raise ConfigError(f"{self.settings.path}: pipeline: gives {got}; a plan is PerMicrobatch[CompactLayout]")
        return value

    def run(self, until: str | None = None) -> Value:
        """Run the stages from the file's own source.

        Args:
            until: kind of the last stage to run; None is the file's last.

        Raises:
            InputError: the rollouts are wrong.
            ConfigError: the ingest stage takes a batch.
        """
        if self.lifts[0].takes is RolloutBatch:
            raise ConfigError(f"{self.settings.path}: ingest takes a batch, and none is given")
        made: Value = self._run(None, 0, self._end(until))
        return made

    def resume(self, value: Value, until: str | None = None) -> Value:
        """Run the stages after the edge that this value belongs to.

        A single microbatch's value runs by itself.

        Args:
            value: of any edge.
            until: kind of the last stage to run; None is the file's last.

        Raises:
            InputError: no edge of this pipeline holds such a value.
            VerifyError: the value breaks an invariant, and `observe.verify` is not off.
            ConfigError: it was planned for another chunk size or convolution than this file's.
        """
        for observer in self.observers:
            observer.given(value)
        self._check_plan(value)
        start, single = self._place(value)
        made: Value = self._run(value, start, self._end(until), single)
        return made

    def _check_plan(self, value: Value) -> None:
        """Compare what a value was planned for with what this file's backends will be asked for."""
        parts = list(everything(value))
        planned = {
            "call_plan.chunk_size": {part.chunk_size for part in parts if isinstance(part, RoundPlan)},
            "layout.conv_width": {part.context_row.shape[1] + 1 for part in parts if isinstance(part, CompactLayout)},
        }
        for key, found in planned.items():
            section, _, field = key.partition(".")
            wanted = getattr(getattr(self.settings.components.get(section), "config", None), field, None)
            if wanted is not None and found - {wanted}:
                got = sorted(found)[0]
                raise ConfigError(f"{self.settings.path}: {key}: is {wanted}, but the value was planned with {got}")

    def _end(self, until: str | None) -> int:
        order = self.settings.order
        return order.index(until) + 1 if until in order else len(order)

    def _place(self, value: Value) -> tuple[int, bool]:
        """(index of the stage to run next, whether the value is one microbatch's)."""
        given = type_of(value)
        for i, lift in enumerate(self.lifts):
            if lift.takes == given:
                return i, False
        for i, lift in enumerate(self.lifts):
            if lift.mapped and lift.takes == PerMicrobatch[given]:  # type: ignore[valid-type]
                return i, True
        last = self.lifts[-1].gives
        if given == last or PerMicrobatch[given] == last:  # type: ignore[valid-type]
            return len(self.lifts), False
        edges = ", ".join(dict.fromkeys(type_name(lift.takes) for lift in self.lifts))
        raise InputError(f"{type_name(given)}: no stage of {self.settings.path} takes it; they take {edges}")

    def _run(self, value: Value | None, start: int, stop: int, single: bool = False) -> Any:
        for kind, lift in list(zip(self.settings.order, self.lifts, strict=True))[start:stop]:
            value = self._observed(kind, value, lift.mapped and not single)
        return value

    def _observed(self, kind: str, value: Any, mapped: bool) -> Value:
        stage = self.stage(kind)
        with self.watched(kind, value, len(value.items) if mapped else 1):
            begin = time.perf_counter()
            if mapped:
                made: Value = PerMicrobatch(value.step, tuple(self._item(stage, item) for item in value.items))
            else:
                made = self._item(stage, value)
            seconds = time.perf_counter() - begin
            for observer in self.observers:
                observer(kind, made, seconds)
        return made

    def _item(self, stage: Any, value: Any) -> Any:
        made = stage.run(value)
        self.advance()
        return made

    def advance(self) -> None:
        """Tell the observers that one microbatch of the work they watch is done."""
        for observer in self.observers:
            observer.advance()

    @contextmanager
    def watched(self, kind: str, value: Value | None, items: int) -> Iterator[None]:
        """Tell the observers of work on a value, and save the value if the work fails."""
        with SavedOnFailure(kind, value, self.settings.observe.dump, self.command()), self.shown(kind, items):
            yield

    @contextmanager
    def shown(self, kind: str, items: int) -> Iterator[None]:
        """Tell the observers of work that no command resumes."""
        try:
            for observer in self.observers:
                observer.begin(kind, items)
            yield
        finally:
            for observer in self.observers:
                observer.finish()

    def command(self) -> str:
        """The command line that runs this pipeline."""
        words = ["harts", "plan" if self.settings.scope == "plan" else "run", str(self.settings.path)]
        for override in self.settings.overrides:
            words += ["--set", override]
        for option in ("verify", "dump"):
            value = getattr(self.settings.observe, option)
            told = any(override.startswith(f"observe.{option}=") for override in self.settings.overrides)
            if not told and value != ObserveConfig.model_fields[option].default:
                words += [f"--{option}", str(value)]
        return shlex.join(words)

    def logprobs(self, layout: CompactLayout) -> SemanticOutputs:
        """Execute and restore one microbatch, autograd attached. Not observed: it runs inside a training loop."""
        outputs: SemanticOutputs = self.stage("restore").run(self.stage("execute").run(layout))
        return outputs

    def replan(self, layouts: PerMicrobatch[CompactLayout], call_plan: str) -> PerMicrobatch[CompactLayout]:
        """Plan the same segment trees by another call-plan stage, laid out by this pipeline's layout stage.

        Raises:
            ConfigError: the name is not registered.
        """
        cls = resolve("call_plan", call_plan)
        stage = cls(cls.Config(chunk_size=self._number("call_plan", "chunk_size")))
        trees: list[SegmentTree] = [layout.plan.tree for layout in layouts.items]
        return PerMicrobatch(layouts.step, tuple(self.stage("layout").run(stage.run(tree)) for tree in trees))


def everything(value: Value) -> Iterator[Value]:
    """A value and all that it holds."""
    yield value
    for held in value.parents():
        yield from everything(held)


def type_of(value: Value) -> Any:
    """The edge type of a value: its class, or `PerMicrobatch` of its items' class."""
    return PerMicrobatch[type(value.items[0])] if isinstance(value, PerMicrobatch) else type(value)  # type: ignore[misc]
