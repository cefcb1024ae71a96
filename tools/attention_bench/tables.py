"""The same figures for a person."""

from __future__ import annotations

from typing import Any

from attention_bench.parity import NAMES


def text(told: dict[str, Any]) -> str:
    """One workload in one shape."""
    shape = told["shape"]
    heads, dims = f"{shape['heads']}/{shape['kv_heads']}", f"({shape['key_dim']}, {shape['value_dim']})"
    lines = [f"{told['workload']}, heads {heads}, head dims {dims}"]
    for name, reasons in told["skipped"].items():
        lines.append(f"  {name} skipped: {'; '.join(reasons)}")
    if "parity" in told:
        lines += [_plan(told["plan"]), *_parity(told["parity"])]
    if "times_ms" in told:
        lines += ["", *_times(told), "", *_best(told["best"]), *_ratios(told["ratios"]), *_required(told)]
    return "\n".join(lines)


def _plan(plan: dict[str, Any]) -> str:
    words = [f"{name.replace('_', ' ')} {value:,}" for name, value in plan.items() if isinstance(value, int)]
    return f"  {', '.join(words)}; S / C {plan['compression']:.2f}, ratio of pairs {plan['pair_ratio']:.2f}"


def _parity(parity: dict[str, Any]) -> list[str]:
    lines = []
    for name, faults in parity["faults"].items():
        lines.append(f"  parity of {name} {'does not hold: it is not timed' if faults else 'holds'}")
        lines += [f"    {fault}" for fault in faults]
    header = "".join(f"{name:>10}" for name in NAMES)
    lines.append(f"    {'relative error to float64':<38}{header}")
    lines += [_errors(*each) for each in parity["errors"].items()]
    if parity["reference"] is None:
        lines.append("    results of all rows are not compared: no expanding backend is sound")
    if parity["differences"]:
        lines.append(f"    {'from ' + parity['reference'] + ', all rows':<38}{header}")
        lines += [_errors(*each) for each in parity["differences"].items()]
    for name, bits in parity["bits"].items():
        measured = "give equal bits" if bits["measured"] else "differ in bits"
        lines.append(f"    two runs of {name} {measured}; {'promised' if bits['promised'] else 'not promised'}")
    return lines


def _errors(name: str, errors: dict[str, float]) -> str:
    return f"    {name:<38}" + "".join(f"{errors[each]:>10.2e}" for each in NAMES)


def _times(told: dict[str, Any]) -> list[str]:
    lines = [
        f"  {'milliseconds':<26}{'forward':>8} {'fwd + bwd':>10} {'least':>8} {'most':>8} {'TFLOP/s':>8} {'both':>6} "
        f"{'peak MiB':>10} {'expanded MiB':>14}"
    ]
    for name, each in told["times_ms"].items():
        both, rate = each["both"], told["tflops"][name]
        peak = told["memory_bytes"].get(name)
        expanded = told["cost"][name]["expanded_bytes"] if name in told["cost"] else None
        lines.append(
            f"    {name:<24}{each['forward']['median']:>8.3f} {both['median']:>10.3f} {both['least']:>8.2f} "
            f"{both['most']:>8.2f} {rate['forward']:>8.1f} {rate['both']:>6.1f} {_mib(peak)} {_mib(expanded):>14}"
        )
    return lines


def _mib(size: int | None) -> str:
    return f"{size / 2**20:>10,.1f}" if size is not None else f"{'-':>10}"


def _best(best: dict[str, str]) -> list[str]:
    return [f"    best {which}: {name}" for which, name in best.items()]


def _ratios(ratios: dict[str, float]) -> list[str]:
    return [f"    {name:<64}{value:>8.3f}" for name, value in ratios.items()]


def _required(told: dict[str, Any]) -> list[str]:
    return [f"  {each['ratio']:<48}{_value(each['value'])}{_verdict(each)}" for each in told["requirements"]]


def _value(value: float | None) -> str:
    return f"{'-':>10}" if value is None else f"{value:>10.3f}"


def _verdict(required: dict[str, Any]) -> str:
    side = "most" if "most" in required else "least"
    aim = (
        f"; aim {required['aim']:g}: {'reached' if required['reached'] else 'not reached'}" if "aim" in required else ""
    )
    return f"  at {side} {required[side]:g}: {'met' if required['met'] else 'NOT met'}{aim}"
