"""The same figures for a person."""

from __future__ import annotations

from typing import Any

from linear_bench.parity import NAMES


def text(told: dict[str, Any]) -> str:
    """One workload."""
    lines = [told["workload"], _plan(told["plan"]), *_parity(told["parity"])]
    if "times_ms" in told:
        lines += ["", *_times(told), "", *_ratios(told), *_memory(told["memory_bytes"])]
    return "\n".join(lines)


def _plan(plan: dict[str, Any]) -> str:
    words = [f"{name.replace('_', ' ')} {value:,}" for name, value in plan.items() if name != "compression"]
    return f"  {', '.join(words)}; S / C {plan['compression']:.2f}"


def _parity(parity: dict[str, Any]) -> list[str]:
    told = "holds" if not parity["faults"] else "does not hold: nothing is timed"
    lines = [f"  parity {told}", *(f"    {fault}" for fault in parity["faults"])]
    lines.append(
        "    relative error to float64" + "".join(f"{name:>10}" for name in ("o", *(f"d{n}" for n in NAMES[1:])))
    )
    for which, errors in parity["errors"].items():
        lines.append(f"    {which:<25}" + "".join(f"{errors[name]:>10.2e}" for name in NAMES))
    return lines


def _times(told: dict[str, Any]) -> list[str]:
    lines = ["  milliseconds            forward  fwd + bwd   least    most"]
    for name, each in told["times_ms"].items():
        both, calls = each["both"], told["calls"][name]
        more = f"  sum of {calls} calls" if calls > 1 else ""
        lines.append(
            f"    {name:<19}{each['forward']['median']:>10.3f} {both['median']:>10.3f} "
            f"{both['least']:>7.2f} {both['most']:>7.2f}{more}"
        )
    return lines


def _ratios(told: dict[str, Any]) -> list[str]:
    required = {each["ratio"]: each for each in told["requirements"]}
    return [
        f"    {name:<36}{value:>8.3f}{_verdict(required[name]) if name in required else ''}"
        for name, value in told["ratios"].items()
    ]


def _verdict(required: dict[str, Any]) -> str:
    side = "most" if "most" in required else "least"
    return f"  at {side} {required[side]:g}: {'met' if required['met'] else 'NOT met'}"


def _memory(memory: dict[str, int]) -> list[str]:
    return [f"    peak memory, {name:<23}{size / 2**20:>8.1f} MiB" for name, size in memory.items()]
