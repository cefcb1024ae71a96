"""A model that is split over processes trains as one process does that runs trajectory by trajectory."""

from __future__ import annotations

import json
from typing import Any

import parity_matrix
import pytest
from parity_bench.topology import ALL, topology
from parity_bench.verdict import holds

CASES = {
    "kda-mla-full": ["tp2+sp", "pp2", "ep2", "dp2+do", "cp2", "tp2+sp+pp2+ep2", "cp2+tp2+sp+ep2"],
    "gdn-gqa-none": ["dp2", "tp2+sp+ep2", "pp2+ep2", "cp2+tp2+sp+ep2"],
}
"""`tools/parity_matrix.py` runs all of them."""


@pytest.mark.parametrize("case", CASES)
def test_topologies_train_as_one_process_does(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    rule, attention, recompute = case.split("-")
    given = ["--rules", rule, "--attentions", attention, "--recompute", recompute, "--device", "cpu", "--json"]
    given += ["--timeout", "300"]
    code = parity_matrix.main(["--topologies", *CASES[case], *given])
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    rows = {row["topology"]: row for row in found["rows"]}
    assert list(rows) == ["one", "q=1", *CASES[case]]
    assert code == 0, printed.err
    assert rows["q=1"]["gradient"] > 0.1
    assert not rows["q=1"]["equal_load"]


def test_tensor_parallelism_without_sequence_parallelism(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--topologies", "tp2", "--rules", "kda", "--attentions", "gqa", "--recompute", "none", "--device", "cpu"]
    code = parity_matrix.main([*given, "--set", "model.moe=null", "--json"])
    printed = capsys.readouterr()
    rows = {row["topology"]: row for row in json.loads(printed.out)["rows"]}
    assert rows["tp2"]["ok"], printed.err
    assert code == 1  # a dense model has no routers, so that q = 1 is not noticed


@pytest.mark.parametrize("name", ALL)
def test_names_of_topologies(name: str) -> None:
    made = topology(name)
    assert made.processes in (2, 4)
    assert made.name == name


@pytest.mark.parametrize("name", ["tp", "tp2+xx3", "2tp", "tp2++sp"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ValueError, match="in topology"):
        topology(name)


@pytest.mark.parametrize(
    ("field", "value"),
    [("gradient", 1.1e-5), ("weight", 1e-3), ("loss", float("nan")), ("equal_bias", False), ("equal_ranks", False)],
)
def test_a_row_does_not_hold_if_one_thing_is_off(field: str, value: Any) -> None:
    numbers = ("gradient", "weight", "loss", "logprob", "entropy", "gradient_norm", "router")
    row = dict.fromkeys(numbers, 1e-7) | dict.fromkeys(("equal_load", "equal_bias", "equal_ranks"), True)
    assert holds(row, 1e-5)
    assert not holds(row | {field: value}, 1e-5)
