"""Reports as text of at most 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

LABEL = 26


def render(report: dict[str, Any]) -> str:
    """The text of a plan's or a run's report."""
    parts = [part for name, show in _PARTS.items() if report.get(name) for part in ("", *show(report[name]))]
    return "\n".join([report["source"], *parts] if "source" in report else parts[1:])


def _row(label: str, value: object, note: str = "") -> str:
    return f"  {label:<{LABEL}} {value!s:>14}" + (f"  {note}" if note else "")


def _count(value: int | None) -> str:
    return "unlimited" if value is None else f"{value:,}"


def _sharing(part: dict[str, Any]) -> Iterator[str]:
    yield "Sharing"
    trained = f"{part['trained_trajectories']:,} trained"
    yield _row("trajectories", _count(part["trajectories"]), trained)
    yield _row("semantic tokens, S", _count(part["semantic_tokens"]), f"{part['trained_tokens']:,} trained")
    yield _row("compact tokens, C", _count(part["compact_tokens"]))
    yield _row("sharing ratio, S / C", f"{part['ratio']:.2f}")


def _microbatches(part: dict[str, Any]) -> Iterator[str]:
    yield "Microbatches"
    shape = f"{part['slots']} slots x {part['replicas']} replicas"
    yield _row("microbatches", _count(part["count"]), shape)
    yield _row("capacity", _count(part["capacity"]), "compact tokens")
    over = f"{part['work_over_compact'] - 1:.1%} over C; S / work = {part['ratio']:.2f}"
    yield _row("work after the split", _count(part["work"]), over)
    yield _row("heaviest, lightest", _count(part["heaviest"]), _count(part["lightest"]))
    uneven = part["slot_imbalance"]
    yield _row("imbalance within slots", f"{uneven['mean']:.2%}", f"mean; P95 {uneven['p95']:.2%}")
    yield _row("imbalance over the step", f"{part['step_imbalance']:.2%}")
    bound, objective = part["bound"], part["objective"]
    proven = "optimal" if bound["optimal"] else f"the plan is {bound['total_gap']:.2%} above"
    yield _row("least work possible", _count(bound["total"]), proven)
    above = f"the plan's {part['slot_critical_work']:,} are {bound['slot_critical_gap']:.2%} above"
    yield _row("least for slots' heaviest", _count(bound["slot_critical"]), above)
    yield _row(f"objective, {objective['ranked_by']}", _count(objective["total"]), f"total, in {objective['unit']}")
    yield _row("", _count(objective["slot_critical"]), "heaviest of each slot, summed")
    yield _row("", _count(objective["heaviest_replica"]), "heaviest replica")
    yield f"  {'candidate':<{LABEL}} {part['candidate']}, best of {part['candidates']}"


def _rounds(part: dict[str, Any]) -> Iterator[str]:
    yield "Call plan"
    yield _row("rounds, most", _count(part["max"]), f"{part['total']:,} in all; chunk size {part['chunk_size']}")
    spread = ", ".join(f"{rounds}: {count}" for rounds, count in part["histogram"].items())
    yield from _wrapped("microbatches by rounds", spread)
    yield _row("segments", _count(part["segments"]))
    yield _row("input sequences", _count(part["input_sequences"]))
    yield _row("replay rows", _count(part["replay_rows"]), f"{part['replay_over_work']:.1%} of the work")
    yield _row("boundary states", _count(part["requested_states"]))
    times = f"{part['key_value_rows'] / part['rows']:.2f} a compact row, if expanded"
    yield _row("key/value rows of branches", _count(part["key_value_rows"]), times)
    if part["padding_rows"]:
        yield _row("padding rows", _count(part["padding_rows"]))


def _wrapped(label: str, text: str) -> Iterator[str]:
    room = 78 - LABEL - 3
    line = ""
    for word in text.split(", "):
        grown = f"{line}, {word}" if line else word
        if len(grown) > room:
            yield f"  {label:<{LABEL}} {line},"
            label, grown = "", word
        line = grown
    yield f"  {label:<{LABEL}} {line}"


def _seconds(part: dict[str, float]) -> Iterator[str]:
    yield "Seconds"
    for stage, value in part.items():
        yield _row(stage, f"{value:.3f}")
    yield _row("total", f"{sum(part.values()):.3f}")


def _train(part: list[dict[str, Any]]) -> Iterator[str]:
    yield "Training"
    yield f"  {'step':>4} {'loss':>14} {'gradient norm':>14} {'trained tokens':>15} {'seconds':>9}"
    for step in part:
        numbers = f"{step['loss']:>14.6g} {step['gradient_norm']:>14.6g} {step['trained_tokens']:>15,}"
        yield f"  {step['step']:>4} {numbers} {step['seconds']:>9.2f}"
        if step["router_z"] is not None:
            yield f"       router z {step['router_z']:.6g}, balance {step['router_balance']:.6g}"
        if step["trained_tokens"] == 0:
            yield "       nothing to train: no optimizer step"


def _comparison(part: dict[str, Any]) -> Iterator[str]:
    yield f"Compact against {part['with']}"
    for step in part["steps"]:
        yield f"  step {step['step']}, largest differences"
        yield _row("log-probs", f"{step['logprobs']:.1e}", "nats")
        if step["entropy"] is not None:
            yield _row("entropies", f"{step['entropy']:.1e}", "nats")
        yield _row("loss", f"{step['loss']:.1e}")
        if step["router"] is not None:
            yield _row("router losses", f"{step['router']:.1e}", "relative")
            yield _row("expert loads", "equal" if step["equal_load"] else "DIFFER")
        yield _row("gradients", f"{step['gradient']:.1e}", f"relative, {step['gradient_parameter']}")
    yield _row("parity", "holds" if part["passed"] else "FAILS", f"allowed is {part['tolerance']:.0e}")
    yield from (f"    {fault}" for fault in part["faults"])
    seconds = part["seconds"]
    if part["time_ratio"] is not None:
        yield _row(
            "time, flat / compact", f"{part['time_ratio']:.2f}", f"{seconds['flat']:.1f} s / {seconds['compact']:.1f} s"
        )
        yield _row("rows, flat / compact", f"{part['row_ratio']:.2f}", f"S / C = {part['sharing_ratio']:.2f}")


def _logprobs(part: dict[str, Any]) -> Iterator[str]:
    yield "Log-probs"
    for name, each in part.items():
        yield _row(name, _count(each["count"]), "next tokens")
        if each["count"]:
            numbers = f"min {each['min']:.4f}, max {each['max']:.4f}, nats"
            yield _row("  mean", f"{each['mean']:.4f}", numbers)


_PARTS: dict[str, Callable[[Any], Iterator[str]]] = {
    "sharing": _sharing,
    "microbatches": _microbatches,
    "rounds": _rounds,
    "train": _train,
    "restored": _logprobs,
    "comparison": _comparison,
    "seconds": _seconds,
}
