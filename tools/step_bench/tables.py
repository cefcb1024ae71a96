"""The same figures for a person."""

from __future__ import annotations

from typing import Any

from step_bench.passes import TIMES
from step_bench.trace import PHASES

SIDES = ("HARTS", "flat")
PARITY_SIDES = ("HARTS", "repacked", "rerun", "rounded")
DIFFERENCES = {
    "loss": "loss",
    "router_z": "statistic z of routers",
    "moved": "assignments of experts",
    "gradient": "gradient",
    "worst_gradient": "gradient of the worst parameter",
}


def text(told: dict[str, Any]) -> str:
    """One workload."""
    lines = [_title(told), "", *_plan(told), "", *_parity(told["parity"])]
    if "seconds" in told:
        lines += ["", *_seconds(told), "", *_ratios(told), *_memory(told), *_processes(told)]
    if "breakdown" in told:
        lines += ["", *_breakdown(told["breakdown"])]
    return "\n".join(lines)


def _title(told: dict[str, Any]) -> str:
    step, sides = told["step"], told["sides"]
    count = sides["HARTS"]["microbatches"]
    part = "all" if count == step["microbatches"] else f"cut to {count} of"
    on = "" if told["processes"] == 1 else f", {told['processes']} processes ({told['topology']})"
    return (
        f"{told['workload']}, model {told['model']}, {told['layers']} layers, {told['dtype']}{on}: {part} "
        f"{step['microbatches']} microbatches of {step['capacity']:,} rows; whole step S / C {step['compression']:.2f}"
    )


def _plan(told: dict[str, Any]) -> list[str]:
    cut = told["cut"]
    lines = [
        f"  trajectories {cut['trajectories']:,}, trained tokens {cut['trained_tokens']:,}",
        f"  S {cut['semantic_tokens']:,}, C {cut['compact_tokens']:,}, S / C {cut['compression']:.3f}",
        _line("", *SIDES),
    ]
    for name in ("microbatches", "rows", "padded_rows", "logit_rows", "pairs", "replay_rows", "rounds", "fullest"):
        lines.append(_line(name.replace("_", " "), *(f"{told['sides'][side][name]:,}" for side in SIDES)))
    seconds = told["planning_seconds"]
    each = ", ".join(f"{name} {1e3 * value:.1f}" for name, value in seconds.items())
    return [*lines, f"  planning of these trajectories {1e3 * sum(seconds.values()):.1f} ms: {each}"]


def _parity(parity: dict[str, Any]) -> list[str]:
    told = "holds" if not parity["faults"] else "does not hold: nothing is timed"
    count = f"microbatches: {parity['microbatches']} of HARTS, {parity['flat_microbatches']} of flat"
    lines = [f"  parity {told} ({count})", *(f"    {fault}" for fault in parity["faults"])]
    lines.append(_line("relative difference from flat", *PARITY_SIDES))
    for name, shown in DIFFERENCES.items():
        values = [f"{parity['differences'][side][name]:.2e}" for side in PARITY_SIDES]
        lines.append(_line(shown, *values))
    worst = parity["differences"]["HARTS"]
    lines.append(f"      {worst['worst']}, {worst['worst_share']:.1e} of the whole gradient's norm")
    for name, shown in (("mean", f"1 - cosine of logits, {parity['samples']} positions"), ("most", "largest of them")):
        lines.append(_line(shown, *(f"{parity['off_cosine'][side][name]:.2e}" for side in PARITY_SIDES)))
    return lines


def _seconds(told: dict[str, Any]) -> list[str]:
    lines = [_line("seconds, median (least to most)", *SIDES, "flat / HARTS", width=26)]
    for name in TIMES:
        values = [told["seconds"][side][name] for side in SIDES]
        shown = [f"{each['median']:.3f} ({each['least']:.3f} to {each['most']:.3f})" for each in values]
        lines.append(_line(name, *shown, f"{values[1]['median'] / values[0]['median']:.3f}", width=26))
    return lines


def _ratios(told: dict[str, Any]) -> list[str]:
    required = {each["ratio"]: each for each in told["requirements"]}
    return [
        _line(name, _number(value)) + (_verdict(required[name]) if name in required else "")
        for name, value in told["ratios"].items()
    ]


def _number(value: float) -> str:
    return f"{value:.3f}" if value >= 0.01 else f"{value:.1e}"


def _verdict(required: dict[str, Any]) -> str:
    side = "most" if "most" in required else "least"
    return f"  at {side} {required[side]:.3g}: {'met' if required['met'] else 'NOT met'}"


def _memory(told: dict[str, Any]) -> list[str]:
    memory = told["memory_bytes"]
    return [
        _line(f"{name} memory of {side}, GiB", f"{memory[side][name] / 2**30:.2f}")
        for name in ("peak", "held")
        for side in SIDES
        if side in memory
    ]


def _processes(told: dict[str, Any]) -> list[str]:
    """What only several processes have."""
    lines = [_line(f"slot imbalance of {side}", f"{value:.2%}") for side, value in told["slot_imbalance"].items()]
    for side, kinds in told.get("communication", {}).items():
        each = ", ".join(f"{kind} {1e3 * value:.1f}" for kind, value in kinds.items())
        lines += [_line(f"ms of NCCL, {side}, same trajectories", f"{1e3 * sum(kinds.values()):,.1f}") + f"  {each}"]
    return lines


def _breakdown(told: dict[str, Any]) -> list[str]:
    """Each side by phase, then both beside each other."""
    lines: list[str] = []
    for side in SIDES:
        lines.append(_line(f"ms of {side}, same trajectories", *PHASES, "all"))
        for part, each in _with_sum(told["seconds"][side]).items():
            shown = [1e3 * each[phase] for phase in PHASES]
            lines.append(_line(part, *(f"{ms:,.2f}" for ms in (*shown, sum(shown)))))
        lines.append("")
    compression = told["sides"]["flat"]["rows"] / told["sides"]["HARTS"]["rows"]
    lines.append(_line(f"ms, S / C {compression:.3f}", *SIDES, "flat / HARTS", "over S / C", "lost"))
    both = [_with_sum(told["seconds"][side]) for side in SIDES]
    for part in dict.fromkeys([*both[1], *both[0]]):
        ours, flat = (1e3 * sum(each.get(part, {}).values()) for each in both)
        ratio = [f"{flat / ours:.2f}", f"{flat / ours / compression:.3f}"] if ours else ["-", "-"]
        lines.append(_line(part, f"{ours:,.2f}", f"{flat:,.2f}", *ratio, f"{ours - flat / compression:,.2f}"))
    return lines


def _with_sum(parts: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return parts | {"all": {phase: sum(each[phase] for each in parts.values()) for phase in PHASES}}


def _line(first: str, *others: str, width: int = 14) -> str:
    return f"    {first:<42}" + "".join(f"{each:>{width}}" for each in others)
