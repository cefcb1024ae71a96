"""Results as text for a reader."""

from __future__ import annotations

from collections.abc import Sequence

from planner_bench.published import TABLE2, TABLE3, Balance
from planner_bench.summary import Group, Result, balance, grouped, summed

Row = Sequence[str]


def report(results: list[Result]) -> str:
    """Every table, and what could not be measured."""
    parts: list[str] = []
    for group in grouped(results):
        head = f"{group.data}, D = {group.replicas}"
        if group.data == "table2":
            parts.append(f"Table 2, published beside ours: compact tokens after the split; {head}")
            parts.append(aligned(_table2(group)))
        parts.append(f"Each plan; {head}")
        parts.append(aligned(_plans(group)))
        parts.append(f"Balance over all steps, as Table 3; {head}")
        parts.append(aligned(_table3(group)))
    parts += [line(result) for result in results if "error" in result]
    return "\n\n".join(parts)


def line(result: Result) -> str:
    """One result while the others are still to come."""
    name = f"{result['step']}, {result['setting']}, D = {result['replicas']}"
    if "error" in result:
        return f"{name}: not measured: {result['error']}"
    gaps = f"{_percent(result['total_gap'])} % / {_percent(result['slot_critical_gap'])} % over the bounds"
    return f"{name}: {result['total']:,} compact tokens, {gaps}, {result['seconds']['plan']:.3f} s"


def aligned(rows: list[Row]) -> str:
    """Columns, the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    )


def _table2(group: Group) -> list[Row]:
    settings = group.settings()
    rows: list[Row] = [
        [
            "step",
            "paths",
            "raw tokens",
            "HARTS, published",
            "OR-Tools",
            "OR/HARTS",
            "time OR/HARTS",
            "ours: bound",
            *settings,
        ]
    ]
    sums = [0, 0]
    for name in group.steps():
        ours = [group.at(name, setting) for setting in settings]
        known = next((result for result in ours if "error" not in result), None)
        if known is None:
            continue
        theirs = TABLE2[known["row"] - 1]
        sums[0] += theirs.harts
        sums[1] += theirs.or_tools
        published = [f"{theirs.harts:,}", f"{theirs.or_tools:,}", f"{theirs.or_tools / theirs.harts:.4f}"]
        size = [f"{known['trajectories']:,}", f"{known['semantic_tokens']:,}"]
        totals = [_tokens(result, "total") for result in ours]
        rows.append([name, *size, *published, f"{theirs.time_ratio:.2f}", _tokens(known, "bound"), *totals])
    held = [group.of(setting) for setting in settings]
    bound = next((f"{summed(results)['bound']:,}" for results in held if results), "-")
    totals = [f"{summed(results)['total']:,}" if results else "-" for results in held]
    ratio = f"{sums[1] / sums[0]:.4f}" if sums[0] else "-"
    return [*rows, ["sum", "", "", f"{sums[0]:,}", f"{sums[1]:,}", ratio, "", bound, *totals]]


def _plans(group: Group) -> list[Row]:
    rows: list[Row] = [
        [
            *("step", "setting", "C", "bound", "total", "over, %", "critical, %"),
            *(
                "slots",
                "P50, %",
                "P95, %",
                "step, %",
                "trie, s",
                "partition, s",
                "slots, s",
                "plan, s",
                "peak, MB",
                "with trees, s",
            ),
        ]
    ]
    for name in group.steps():
        rows += [_plan(group.at(name, setting)) for setting in group.settings()]
    return rows + [_sum(setting, results) for setting in group.settings() if (results := group.of(setting))]


def _plan(result: Result) -> Row:
    if "error" in result:
        return [result["step"], result["setting"], *["-"] * 15]
    shown = balance([result])
    seconds = result["seconds"]
    return [
        *(result["step"], result["setting"], _tokens(result, "compact_tokens"), _tokens(result, "bound")),
        *(_tokens(result, "total"), _percent(result["total_gap"]), _percent(result["slot_critical_gap"])),
        *(str(shown.slots), f"{shown.slot_p50:.4f}", f"{shown.slot_p95:.4f}", f"{shown.step_max:.4f}"),
        *(f"{seconds[part]:.3f}" for part in ("trie", "partition", "slots", "plan")),
        str(result["peak_mb"]),
        f"{seconds['trie'] + seconds['partition'] + seconds['schedule_stage']:.3f}"
        if seconds["schedule_stage"]
        else "-",
    ]


def _sum(setting: str, results: list[Result]) -> Row:
    held = summed(results)
    return [
        *(f"sum of {held['steps']}", setting, "", f"{held['bound']:,}", f"{held['total']:,}"),
        *(_percent(held["total_gap"]), _percent(held["slot_critical_gap"]), str(held["slots"])),
        *("", "", "", "", "", "median, max:", f"{held['seconds_median']:.3f}, {held['seconds_max']:.3f}"),
        str(held["peak_mb"]),
        "",
    ]


def _table3(group: Group) -> list[Row]:
    rows: list[Row] = [["planner", "slots", "in slots P50, %", "P95, %", "step totals P50, %", "max, %"]]
    published = TABLE3.get(group.replicas, {}) if group.data == "table2" else {}
    rows += [_balance(f"{name}, published", held) for name, held in published.items()]
    return rows + [_balance(name, balance(results)) for name in group.settings() if (results := group.of(name))]


def _balance(name: str, held: Balance) -> Row:
    return [name, str(held.slots), *(f"{value:.4f}" for value in held[1:])]


def _tokens(result: Result, field: str) -> str:
    return f"{result[field]:,}" if field in result else "-"


def _percent(value: float) -> str:
    return f"{100 * value:.3f}"
