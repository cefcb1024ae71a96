"""What the doctor found, as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def render_doctor(report: dict[str, Any]) -> str:
    """The text of `harts doctor`."""
    return "\n".join(_lines(report))


def _lines(report: dict[str, Any]) -> Iterator[str]:
    yield str(report["file"])
    yield ""
    yield "Machine"
    gpu = report["gpu"]
    capability = f", compute capability {gpu['capability']}" if gpu["capability"] else ""
    yield f"  {'device':<18} {gpu['device']}: {gpu['name'] or 'no GPU'}{capability}"
    yield f"  {'CUDA of torch':<18} {gpu['cuda'] or 'none'}"
    for name, version in report["versions"].items():
        yield f"  {name:<18} {version or 'not installed'}"
    yield ""
    yield "Backends"
    if "serving" not in report:
        yield f"  not asked: {report['not_asked']}"
        return
    for section, each in report["serving"].items():
        yield f"  {section:<18} {each['type']}: {'serves' if not each['why_not'] else 'CANNOT SERVE'}"
        yield from (f"    {reason}" for reason in each["why_not"])
    configs = report["configs"]
    if configs is not None:
        yield f"  {'kernel configs':<18} {configs['file']}, sha256 {configs['sha256'][:16]}"
    if "checks" in report:
        yield ""
        yield from _checks(report)


def _checks(report: dict[str, Any]) -> Iterator[str]:
    need = report["need"]
    heads, dims = need["linear_heads"], need["linear_head_dims"]
    yield f"Checks: {need['rule']}, {need['dtype']}, heads {heads[0]} and {heads[1]}, head dims {dims[0]} and {dims[1]}"
    for each in report["checks"]:
        bound = f"; allowed is {each['bound']:.0e}" if each["bound"] else ""
        yield f"  {'ok   ' if each['ok'] else 'FAILS'} {each['name']}"
        yield f"        {each['about']}{bound}"
        if each["config"]:
            yield "        " + ", ".join(f"{name} {value}" for name, value in each["config"].items())
        if not each["ok"]:
            yield f"        fix: {each['fix']}"
    failed = sum(not each["ok"] for each in report["checks"])
    if not report["checks"]:
        yield "  none: the backend cannot serve"
    else:
        yield f"  {len(report['checks'])} checks, {failed or 'none'} failed"


def render_tuned(table: dict[str, Any]) -> str:
    """The text of `harts tune`: what was measured last."""
    name, about = list(table["measured"].items())[-1]
    lines = [f"{table['device']}: {name}, {about['rows']:,} rows, best of {about['repeats']}"]
    lines.append(f"  {'kernel':<44} {'pinned':>9} {'chosen':>9}  ms a forward and backward")
    for kernel, each in about["kernels"].items():
        lines.append(f"  {kernel:<44} {each['pinned_ms']:>9.3f} {each['chosen_ms']:>9.3f}")
        counts = f"{each['candidates']} tried, {each['skipped']} do not compile, {each['refused']} wrong"
        chosen = ", ".join(f"{key} {value}" for key, value in each["config"].items())
        lines.append(f"    {chosen}; {counts}")
    return "\n".join(lines)
