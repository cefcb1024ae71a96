"""The parts of a model, and how they are watched: by hooks of its modules, and its own backends."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from harts.backends.plan_tensors import build_plan_tensors
from harts.config import Settings
from harts.ir import CompactOutputs
from harts.pipeline import Pipeline
from step_bench.passes import Clock, Listener, accumulate
from step_bench.processes import gathered
from step_bench.steps import Microbatch, Side
from step_bench.trace import OTHER, PHASES, Trace

RULE, ATTEND = "delta rule", "attention"
LINEAR, FULL, EXPERTS, NORMS = "linear layers, rest", "attention layers, rest", "MoE and MLP", "norms"
HEAD, LAYOUT = "LM head, log-probs", "layout tensors"
PARTS = (RULE, LINEAR, ATTEND, FULL, EXPERTS, NORMS, HEAD, LAYOUT, OTHER)

MODULES = (
    (LINEAR, re.compile(r"(DeltaNet|DeltaAttention|(?<!Kimi)LinearAttention|^LinearLayer)$")),
    (FULL, re.compile(r"(Attention|Mla|^GqaLayer|^MlaLayer)$")),
    (EXPERTS, re.compile(r"(MLP|^Mlp|MoE|^MoeLayer|^MoELayer|MoeBlock)$")),
)
"""Classes of modules by part, the first that matches; modules inside one that matched count with it."""
LAYER = re.compile(r"(DecoderLayer|^Block|^TreeLayer)$")
"""Classes of whole layers: norms beside its parts are the layer's own."""
NORM = re.compile(r"Norm$")


class Watch:
    """What every watched part asks whether it is being measured."""

    trace: Trace | None = None


def watched(settings: Settings, watch: Watch) -> Settings:
    """Settings whose attention backends can be measured; they compute and refuse what the original ones do."""
    components = dict(settings.components)
    for section, make in (("linear_attention", _linear), ("full_attention", _full)):
        component = components[section]
        components[section] = replace(component, cls=make(component.cls, watch))
    return replace(settings, components=components)


def _linear(cls: Any, watch: Watch) -> Any:
    def mix(self: Any, inputs: Any, plan: Any) -> Any:
        if watch.trace is None:
            return cls.mix(self, inputs, plan)
        named = list(inputs)
        return watch.trace.call(
            RULE, lambda *each: cls.mix(self, dict(zip(named, each, strict=True)), plan), *inputs.values()
        )

    return _derived(cls, "mix", mix)


def _full(cls: Any, watch: Watch) -> Any:
    def attend(self: Any, q: Any, k: Any, v: Any, *others: Any) -> Any:
        if watch.trace is None:
            return cls.attend(self, q, k, v, *others)
        return watch.trace.call(ATTEND, lambda *each: cls.attend(self, *each, *others), q, k, v)

    return _derived(cls, "attend", attend)


def _derived(cls: Any, name: str, method: Any) -> Any:
    return type(cls)(cls.__name__, (cls,), {name: method, "__module__": cls.__module__, "__doc__": cls.__doc__})


def breakdown(pipeline: Pipeline, side: Side, watch: Watch, clock: Clock) -> dict[str, dict[str, float]]:
    """Seconds of each part in forward, recomputation and backward of some microbatches, a mean over processes.

    Args:
        pipeline: made from `watched` settings; it has run these microbatches before.
        side: what to run.
        watch: of the settings.
        clock: of the model's device.
    """
    each = gathered(_traced(pipeline, side, watch, clock).seconds())
    nothing = dict.fromkeys(PHASES, 0.0)
    return {
        part: {phase: sum(found.get(part, nothing)[phase] for found in each) / len(each) for phase in PHASES}
        for part in PARTS
        if any(part in found for found in each)
    }


class _Traced(Listener):
    def __init__(self, pipeline: Pipeline, trace: Trace) -> None:
        super().__init__(pipeline)
        self.trace = trace

    def hidden(self, microbatch: Microbatch) -> Tensor:
        env = self.pipeline.env
        with self.trace.span(LAYOUT):
            wide = torch.promote_types(env.dtype, torch.float32)
            plan = build_plan_tensors(microbatch.layout, env.device, wide)
        return env.model.forward(plan).hidden

    def logprobs(self, outputs: CompactOutputs) -> Tensor:
        def restored(hidden: Tensor) -> Any:
            return self.pipeline.stage("restore").run(CompactOutputs(outputs.layout, hidden)).logprobs

        made: Tensor = self.trace.call(HEAD, restored, outputs.hidden)
        return made

    def began(self) -> None:
        self.trace.begin(OTHER)

    def ended(self) -> None:
        self.trace.end(OTHER)

    def turned(self) -> None:
        self.trace.backward = True
        self.trace.begin(OTHER, "backward")

    def done(self) -> None:
        self.trace.end(OTHER, "backward")
        self.trace.backward = False


def _traced(pipeline: Pipeline, side: Side, watch: Watch, clock: Clock) -> Trace:
    """Forward and backward of some microbatches; the marks have passed."""
    module = pipeline.env.model.module
    module.zero_grad(set_to_none=True)
    clock.wait()
    trace = watch.trace = Trace(clock)
    try:
        with _hooked(module, trace):
            accumulate(side, _Traced(pipeline, trace))
    finally:
        watch.trace = None
    clock.wait()
    module.zero_grad(set_to_none=True)
    return trace


def parts_of(module: nn.Module) -> dict[nn.Module, str]:
    """Modules that are watched, and their parts."""
    found: dict[nn.Module, str] = {}

    def visit(each: nn.Module, inside: bool) -> None:
        name = type(each).__name__
        part = next((part for part, names in MODULES if names.search(name)), None)
        if part is not None and not inside:
            found[each] = part
        if LAYER.search(name):
            found.update({child: NORMS for child in each.children() if NORM.search(type(child).__name__)})
        for child in each.children():
            visit(child, inside or part is not None)

    visit(module, False)
    return found


@contextmanager
def _hooked(module: nn.Module, trace: Trace) -> Iterator[None]:
    handles = []
    try:
        for each, part in parts_of(module).items():
            before, after = _hooks(trace, part)
            handles.append(each.register_forward_pre_hook(before, with_kwargs=True))
            # recomputation ends by an exception as soon as it has made all that it must
            handles.append(each.register_forward_hook(after, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hooks(trace: Trace, part: str) -> tuple[Any, Any]:
    entered: list[bool] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        trace.begin(part)
        given, told = trace.enter(part, (*args, *kwargs.values()))
        entered.append(told)
        return given[: len(args)], dict(zip(kwargs, given[len(args) :], strict=True))

    def after(_: nn.Module, __: Any, made: Any) -> Any:
        told = entered.pop()
        left = trace.leave(part, made) if told else made
        trace.end(part)
        return left

    return before, after
