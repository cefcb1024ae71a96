"""Names to classes. The built-in table holds strings, so that naming a backend is what imports it.

Third parties add names through entry-point groups (`harts.stages.<kind>`, `harts.linear_attention`,
`harts.full_attention`, `harts.models`, `harts.objectives`, `harts.work_models`) or `register`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from harts.errors import ConfigError

STAGE_KINDS = ("ingest", "partition", "schedule", "call_plan", "layout", "execute", "restore")

BUILT_IN: dict[str, dict[str, str]] = {
    "ingest": {
        "jsonl": "harts.stages.ingest.jsonl:Jsonl",
        "arrays": "harts.stages.ingest.arrays:Arrays",
        "batch": "harts.stages.ingest.handed_over:HandedOver",
    },
    "partition": {
        "paper": "harts.stages.partition.paper:Paper",
        "contiguous": "harts.stages.partition.contiguous:Contiguous",
        "peeling": "harts.stages.partition.peeling:Peeling",
        "lns": "harts.stages.partition.lns:Lns",
    },
    "schedule": {"slots": "harts.stages.schedule.slots:Slots"},
    "call_plan": {
        "min_call": "harts.stages.call_plan.min_call:MinCall",
        "per_segment": "harts.stages.call_plan.per_segment:PerSegment",
        "no_replay": "harts.stages.call_plan.no_replay:NoReplay",
        "flat": "harts.stages.call_plan.flat:Flat",
    },
    "layout": {"round_major": "harts.stages.layout.round_major:RoundMajor"},
    "execute": {"compact": "harts.stages.execute.compact:Compact"},
    "restore": {"mapped": "harts.stages.restore.mapped:Mapped"},
    "work_models": {
        "compact": "harts.work_models.compact:Compact",
        "calibrated": "harts.work_models.calibrated:Calibrated",
    },
    "linear_attention": {
        "naive": "harts.backends.linear.naive:Naive",
        "recurrent": "harts.backends.linear.recurrent:Recurrent",
        "kda": "harts.backends.linear.kda:Kda",
        "gdn": "harts.backends.linear.gdn:Gdn",
    },
    "full_attention": {
        "sdpa": "harts.backends.full.sdpa:Sdpa",
        "varlen": "harts.backends.full.varlen:Varlen",
        "flash_attention_4": "harts.backends.full.flash_attention_4:FlashAttention4",
        "transformer_engine": "harts.backends.full.transformer_engine:TransformerEngine",
        "tree": "harts.backends.full.tree.backend:Tree",
    },
    "models": {
        "reference": "harts.backends.model.reference:Reference",
        "huggingface": "harts.backends.model.huggingface.backend:HuggingFace",
        "megatron": "harts.backends.model.megatron.backend:MegatronModel",
    },
    "huggingface_families": {
        name: f"harts.backends.model.huggingface.families.{name}:FAMILY"
        for name in ("bailing_hybrid", "kimi_linear", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next")
    },
    "objectives": {
        "grpo": "harts.train.objectives:Grpo",
        "ppo": "harts.train.objectives:Ppo",
        "sft": "harts.train.objectives:Sft",
    },
}

_added: dict[str, dict[str, tuple[str, str]]] = {}


def group(kind: str) -> str:
    """The entry-point group of a kind."""
    return f"harts.stages.{kind}" if kind in STAGE_KINDS else f"harts.{kind}"


def names(kind: str) -> dict[str, tuple[str, str]]:
    """All registered names of a kind: name -> (target, package that registered it).

    Raises:
        ConfigError: two packages claim one name.
    """
    found = {name: (target, "harts") for name, target in BUILT_IN[kind].items()}
    for name, target, package in _offers(kind):
        if name in found:
            raise ConfigError(f"{kind}: the name {name!r} is registered by both {found[name][1]} and {package}")
        found[name] = (target, package)
    return found


def _offers(kind: str) -> Iterator[tuple[str, str, str]]:
    for point in entry_points(group=group(kind)):
        yield point.name, f"{point.module}:{point.attr}", point.dist.name if point.dist else "an unnamed package"
    for name, (target, package) in _added.get(kind, {}).items():
        yield name, target, package


def register(kind: str, name: str, target: str, package: str) -> None:
    """Register `module:Class` under a name for this process.

    Raises:
        ConfigError: the name is taken; both packages are named.
    """
    taken = names(kind)
    if name in taken:
        raise ConfigError(f"{kind}: the name {name!r} is registered by both {taken[name][1]} and {package}")
    _added.setdefault(kind, {})[name] = (target, package)


def resolve(kind: str, name: str) -> type[Any]:
    """Import the class that a name stands for.

    Raises:
        ConfigError: the name is unknown, or its package or one of its dependencies is missing.
    """
    known = names(kind)
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{kind}: {name!r} is not registered{hint} known: {', '.join(sorted(known))}")
    target, package = known[name]
    module, _, attribute = target.partition(":")
    try:
        found: type[Any] = getattr(import_module(module), attribute)
    except Exception as error:  # a plug-in's own import can raise anything, and must not take the rest down
        if package == "harts" and not isinstance(error, ImportError | AttributeError):
            raise
        why = str(error) if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{kind}: {name!r} of {package} cannot be imported: {why}") from error
    return found
