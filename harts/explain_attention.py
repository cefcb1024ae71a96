"""What full attention takes for a dumped plan, by every registered backend, and what it would take without sharing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from harts.backends.base import AttentionCost, Need
from harts.backends.full.costs import pass_flops
from harts.backends.plan_tensors import attention_views
from harts.explain import backend_of
from harts.ir import CompactLayout, Value
from harts.pipeline import Pipeline
from harts.registry import names

KIND = "full_attention"


def layouts_of(value: Value) -> list[CompactLayout]:
    """The layouts that a value is, or was made from, in the order of the microbatches; none if it is an earlier one."""
    if isinstance(value, CompactLayout):
        return [value]
    return [layout for held in value.parents() for layout in layouts_of(held)]


def explain_attention(pipeline: Pipeline, need: Need, dumped: Value, serving: dict[str, list[str]]) -> dict[str, Any]:
    """Costs of one layer for the microbatches of all replicas, forward and backward, in the heads of one process.

    Heads are divided over processes by tensor and context parallelism, microbatches over replicas: costs are what the
    processes would take that have the same heads. No cost needs the device: they are told of backends that would not
    serve, too.

    Args:
        pipeline: whose choice of a backend has the file's config; the others have their default config.
        need: what its model asks for.
        dumped: an edge of the pipeline.
        serving: by name of backend, why it would not serve.

    Returns:
        `heads` {`query`, `key_value`} of one process; `microbatches` of all replicas; `useful` and `flat`, each
        {`pairs` of a query and a key, of one head; `flops`} of what rows see and of trajectory-wise training; and
        `backends`, by name: `why_not`, `deterministic`, `expanded_bytes` {`largest` microbatch, `sum`} and `flops`. The
        last three are None of a backend that cannot be built. Only `not_told`, the reason, if the value holds no
        layouts.
    """
    layouts = layouts_of(dumped)
    if not layouts:
        return {"not_told": "the dump holds no layouts; dump the edge of the layout stage or a later one"}
    chosen = pipeline.settings.components[KIND]
    backends = {name: backend_of(KIND, name, chosen)[0] for name in sorted(names(KIND))}
    costs: dict[str, list[AttentionCost]] = {name: [] for name in backends}
    useful = 0
    for layout in layouts:
        views = attention_views(layout, need.device)  # and what costs derive from them, of one microbatch at a time
        useful += views.pairs
        for name, backend in backends.items():
            if backend is not None:
                costs[name].append(backend.cost(views, need))
    flat = sum(flat_pairs(layout) for layout in layouts)
    return {
        "heads": dict(zip(("query", "key_value"), need.full_heads, strict=True)),
        "microbatches": len(layouts),
        "useful": {"pairs": useful, "flops": pass_flops(useful, need)},
        "flat": {"pairs": flat, "flops": pass_flops(flat, need)},
        "backends": {
            name: {
                "why_not": serving[name],
                "deterministic": None if backend is None else backend.deterministic(need),
                **_summed(costs[name]),
            }
            for name, backend in backends.items()
        },
    }


def flat_pairs(layout: CompactLayout) -> int:
    """Pairs of a query and a key that it sees, of one head, if every trajectory is computed by itself."""
    length = layout.plan.tree.columns.length.astype(np.int64)
    return int((length * (length + 1) // 2).sum())


def _summed(costs: list[AttentionCost]) -> dict[str, Any]:
    if not costs:
        return {"expanded_bytes": None, "flops": None}
    held = [cost.expanded_bytes for cost in costs]
    return {"expanded_bytes": {"largest": max(held), "sum": sum(held)}, "flops": sum(cost.flops for cost in costs)}


def render_attention(report: dict[str, Any]) -> str:
    """The text of it."""
    if "not_told" in report:
        return f"full attention of this plan: costs are not told: {report['not_told']}"
    return "\n".join(_lines(report))


def _lines(report: dict[str, Any]) -> Iterator[str]:
    useful, flat = report["useful"]["flops"], report["flat"]["flops"]
    heads, count = report["heads"], report["microbatches"]
    yield "full attention of this plan: one layer, forward and backward, in the heads of one process"
    yield f"  heads {heads['query']}, of keys and values {heads['key_value']}; microbatches of all replicas: {count}"
    yield f"  useful products     {_scaled(useful, 'FLOP'):>15}  of what rows see"
    times = _ratio(flat, useful)
    yield f"  flat                {_scaled(flat, 'FLOP'):>15}  {times} of useful; every trajectory by itself"
    yield f"  {'':<43}{'expanded keys and values':>28}"
    columns = f"{'serves':>8}{'deterministic':>15}{'largest':>14}{'sum':>14}{'computed':>14}{'/ useful':>9}"
    yield f"  {'backend':<20}{columns}"
    for name, each in report["backends"].items():
        if each["flops"] is None:
            yield f"  {name:<20}{'no':>8}  {'; '.join(each['why_not'])}"
            continue
        held = each["expanded_bytes"]
        yield (
            f"  {name:<20}{_word(not each['why_not']):>8}{_word(each['deterministic']):>15}"
            f"{_scaled(held['largest'], 'B'):>14}{_scaled(held['sum'], 'B'):>14}"
            f"{_scaled(each['flops'], 'FLOP'):>14}{_ratio(each['flops'], useful):>9}"
        )


def _ratio(value: int, useful: int) -> str:
    return f"{value / useful:.2f}" if useful else "-"  # a model may have no full attention


def _word(yes: bool) -> str:
    return "yes" if yes else "no"


def _scaled(value: int, unit: str) -> str:
    """With three digits and the decimal prefix that fits."""
    if value < 1000:
        return f"{value} {unit}"
    scaled, prefixes = float(value), iter(" kMGTPEZ")
    prefix = next(prefixes)
    while scaled >= 999.5 and prefix != "Z":
        scaled, prefix = scaled / 1000, next(prefixes)
    return f"{scaled:#.3g}".rstrip(".") + f" {prefix}{unit}"
