"""What `harts explain` says of full attention: who serves, who is deterministic, and what a dumped plan costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import PositiveInt

from harts import registry
from harts.backends.base import AttentionCost, Need
from harts.backends.full.sdpa import Sdpa
from harts.backends.model.reference import Reference
from harts.backends.plan_tensors import AttentionViews
from harts.cli import main
from harts.explain_attention import _scaled
from harts.schema import StageConfig
from tests.forests import paths_of

QUICKSTART = str(Path(__file__).resolve().parents[1] / "pipelines" / "quickstart.yaml")
FIGURE_2_AND_A_CHAIN = [(-1, 63), (0, 2), (0, 10), (1, 10), (1, 10), (-1, 5)]
"""Two microbatches. Branches of the first: 75 rows; 10 after 63; 10 after 65. Of the second: 5 rows."""
FLOPS_OF_A_PAIR = 2 * 2 * (24 + 16 + 3 * 24 + 2 * 16)
"""Two heads of dims (24, 16), five products, a multiplication and an addition."""
BYTES_OF_A_KEY = 2 * (24 + 16) * 8
USEFUL = 75 * 76 // 2 + (10 * 63 + 55) + (10 * 65 + 55) + 15
FLAT = 73 * 74 // 2 + 2 * (75 * 76 // 2) + 15
KEYS = 75 + 73 + 75
TILE = 128 * 128
TEXT = """\
full attention of this plan: one layer, forward and backward, in the heads of one process
  heads 2, of keys and values 2; microbatches of all replicas: 2
  useful products          2.45 MFLOP  of what rows see
  flat                     4.85 MFLOP  1.98 of useful; every trajectory by itself
                                                 expanded keys and values
  backend               serves  deterministic       largest           sum      computed / useful
  flash_attention_4         no             no        143 kB        143 kB    37.7 MFLOP    15.40
  sdpa                     yes            yes        171 kB        175 kB    2.92 MFLOP     1.19
  transformer_engine        no             no        143 kB        143 kB    37.7 MFLOP    15.40
  tree                      no             no           0 B           0 B    18.9 MFLOP     7.70
  varlen                    no             no        171 kB        173 kB    44.0 MFLOP    17.97
"""

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    file = tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl"
    rows = [
        {
            "id": f"t{i}",
            "group": "g",
            "reward": float(i % 2),
            "tokens": tokens,
            "loss_mask": [0] + [1] * len(tokens[1:]),
        }
        for i, tokens in enumerate(paths_of(FIGURE_2_AND_A_CHAIN))
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--set", f"ingest.path={file}", "--set", "partition.capacity=96"]


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory, options: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("dumps")
    assert main(["run", QUICKSTART, *options, "--set", "train=null", "--dump", str(folder), "--quiet"]) == 0
    return folder


@pytest.fixture
def told(call: Call, dumps: Path) -> Callable[..., dict[str, Any]]:
    """The JSON report on a dumped edge."""

    def report(*words: str, edge: str = "05_layout") -> dict[str, Any]:
        code, out, err = call("explain", QUICKSTART, "--from", dumps / f"{edge}.harts", "--json", *words)
        assert code == 0, err
        found: dict[str, Any] = json.loads(out)
        return found

    return report


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_added", {})
    registry.register("full_attention", "absent", "no_such_package:Class", "third")
    registry.register("full_attention", "choosy", f"{__name__}:Choosy", "third")
    registry.register("full_attention", "costly", f"{__name__}:Costly", "third")


class Costly(Sdpa):
    def why_not(self, need: Need) -> list[str]:
        return ["never"]

    def deterministic(self, need: Need) -> bool:
        return True

    def cost(self, views: AttentionViews, need: Need) -> AttentionCost:
        return AttentionCost(5, 6)


class ChoosyConfig(StageConfig):
    size: PositiveInt


class Choosy(Costly):
    Config = ChoosyConfig

    def cost(self, views: AttentionViews, need: Need) -> AttentionCost:
        return AttentionCost(self.config.size, 1)


def test_costs_are_those_counted_by_hand(told: Callable[..., dict[str, Any]]) -> None:
    report = told()["attention"]
    assert set(report) == {"heads", "microbatches", "useful", "flat", "backends"}
    assert report["heads"] == {"query": 2, "key_value": 2}
    assert report["microbatches"] == 2
    assert report["useful"] == {"pairs": USEFUL, "flops": USEFUL * FLOPS_OF_A_PAIR}
    assert report["flat"] == {"pairs": FLAT, "flops": FLAT * FLOPS_OF_A_PAIR}
    whole = {"largest": KEYS * BYTES_OF_A_KEY, "sum": (KEYS + 5) * BYTES_OF_A_KEY}
    shared = dict.fromkeys(whole, KEYS * BYTES_OF_A_KEY)  # the other microbatch is one trajectory: as it lies
    branches = 75 * 76 // 2 + 10 * 73 + 10 * 75 + 15  # what has ancestors is computed in full
    one_dim = {name: size * 48 // 40 for name, size in whole.items()}  # 24
    padded = one_dim | {"sum": KEYS * 2 * 48 * 8 + 5 * 2 * 24 * 8}  # keys of the other microbatch are as they lie
    wanted = {
        "sdpa": (one_dim, branches * 2 * 2 * 7 * 24),
        "flash_attention_4": (shared, 4 * TILE * FLOPS_OF_A_PAIR),
        "transformer_engine": (shared, 4 * TILE * FLOPS_OF_A_PAIR),
        "varlen": (padded, 4 * TILE * 2 * 2 * 7 * 24),
        "tree": ({"largest": 0, "sum": 0}, 2 * TILE * FLOPS_OF_A_PAIR),
    }
    for name, (held, flops) in wanted.items():
        found = report["backends"][name]
        assert (found["expanded_bytes"], found["flops"]) == (held, flops), name
        assert set(found) == {"why_not", "deterministic", "expanded_bytes", "flops"}


def test_costs_of_divided_heads_are_those_of_one_process(told: Callable[..., dict[str, Any]]) -> None:
    changed = ("model.type=megatron", "model.dtype=float32", "layout.row_multiple=2")
    words = [word for change in changed for word in ("--set", change)]
    whole, half = (told(*words, "--set", f"model.parallel={{tensor: {size}}}")["attention"] for size in (1, 2))
    assert (whole["heads"], half["heads"]) == ({"query": 2, "key_value": 2}, {"query": 1, "key_value": 1})
    assert whole["useful"]["flops"] == 2 * half["useful"]["flops"] > 0
    for name in ("sdpa", "varlen", "tree"):
        one, two = half["backends"][name], whole["backends"][name]
        assert two["flops"] == 2 * one["flops"]
        assert two["expanded_bytes"] == {key: 2 * size for key, size in one["expanded_bytes"].items()}


def test_every_backend_says_whether_it_serves_and_is_deterministic(told: Callable[..., dict[str, Any]]) -> None:
    report = told()
    backends = report["attention"]["backends"]
    assert list(backends) == sorted(registry.names("full_attention"))
    assert {name: each["why_not"] for name, each in backends.items()} == report["serving"]["full_attention"]
    assert {name: each["deterministic"] for name, each in backends.items()} == report["deterministic"]
    assert (backends["sdpa"]["why_not"], backends["sdpa"]["deterministic"]) == ([], True)
    assert "it needs a CUDA device, the device is cpu" in backends["tree"]["why_not"]
    assert backends["tree"]["deterministic"] is False


def test_the_named_backend_has_the_config_of_the_file(told: Callable[..., dict[str, Any]], others: None) -> None:
    named = told("--set", "full_attention={type: choosy, size: 7}")["attention"]["backends"]
    assert named["choosy"] == {
        "why_not": ["never"],
        "deterministic": True,
        "expanded_bytes": {"largest": 7, "sum": 14},
        "flops": 2,
    }
    assert named["flash_attention_4"]["deterministic"] is False
    named = told("--set", "full_attention={type: flash_attention_4, deterministic: true}")["attention"]["backends"]
    assert named["flash_attention_4"]["deterministic"] is True


def test_flat_is_what_a_flat_plan_takes(call: Call, tmp_path: Path, options: list[str]) -> None:
    flat = [*options, "--set", "call_plan.type=flat"]
    assert call("plan", QUICKSTART, *flat, "--dump", tmp_path, "--quiet")[0] == 0
    report = json.loads(call("explain", QUICKSTART, "--from", tmp_path / "05_layout.harts", "--json")[1])["attention"]
    assert report["useful"] == report["flat"] == {"pairs": FLAT, "flops": FLAT * FLOPS_OF_A_PAIR}


def test_later_edges_hold_the_layouts_too(told: Callable[..., dict[str, Any]]) -> None:
    wanted = told()["attention"]
    for edge in ("06_execute", "07_restore"):
        assert told(edge=edge)["attention"] == wanted


def test_an_edge_without_layouts_says_so_in_one_line(
    call: Call, dumps: Path, told: Callable[..., dict[str, Any]]
) -> None:
    why = "the dump holds no layouts; dump the edge of the layout stage or a later one"
    for edge in ("03_schedule", "04_call_plan"):
        assert told(edge=edge)["attention"] == {"not_told": why}
        out = call("explain", QUICKSTART, "--from", dumps / f"{edge}.harts")[1]
        assert out.splitlines()[-1] == f"full attention of this plan: costs are not told: {why}"


def test_the_text_is_a_table(call: Call, dumps: Path) -> None:
    code, out, _ = call("explain", QUICKSTART, "--from", dumps / "05_layout.harts")
    assert code == 0
    assert out.endswith(TEXT)


def test_what_cannot_be_built_says_why_in_its_place(call: Call, dumps: Path, others: None) -> None:
    words = ("explain", QUICKSTART, "--from", dumps / "05_layout.harts")
    backends = json.loads(call(*words, "--json")[1])["attention"]["backends"]
    nothing = {"deterministic": None, "expanded_bytes": None, "flops": None}
    (why,) = backends["absent"]["why_not"]
    assert why.startswith("full_attention: 'absent' of third cannot be imported: No module named")
    assert backends["absent"] == {"why_not": [why], **nothing}
    assert backends["choosy"] == {"why_not": ["it has no default for size"], **nothing}
    assert backends["costly"] == {
        "why_not": ["never"],
        "deterministic": True,
        "expanded_bytes": {"largest": 5, "sum": 10},
        "flops": 12,
    }
    out = call(*words)[1]
    assert f"\n  absent                    no  {why}\n" in out
    assert "\n  choosy                    no  it has no default for size\n" in out


def test_a_bug_of_costs_is_no_part_of_the_report(dumps: Path, others: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(self: Costly, views: AttentionViews, need: Need) -> AttentionCost:
        raise ZeroDivisionError("a bug of costs")

    monkeypatch.setattr(Costly, "cost", bug)
    with pytest.raises(ZeroDivisionError, match="a bug of costs"):
        main(["explain", QUICKSTART, "--from", str(dumps / "05_layout.harts")])


def test_costs_are_told_for_a_device_that_is_not_here(
    told: Callable[..., dict[str, Any]], call: Call, dumps: Path
) -> None:
    here, there = told()["attention"], told("--set", "device=cuda:99")["attention"]
    assert there["useful"] == here["useful"]
    for name, each in there["backends"].items():
        device, *reasons = each["why_not"]
        assert device.startswith("device: 'cuda:99' cannot be used: ")
        assert bool(reasons) is (name != "sdpa")
        told_of = "\n".join(reasons)
        assert name == "sdpa" or "the dtype torch.float64 is not one of" in told_of
        assert name == "sdpa" or "it needs a CUDA device, torch finds no cuda:99" in told_of
        assert each["flops"] == here["backends"][name]["flops"]
    assert there["backends"]["sdpa"]["deterministic"] is False
    code, out, err = call("explain", QUICKSTART, "--from", dumps / "05_layout.harts", "--set", "device=abacus")
    assert (code, out) == (2, "")
    assert err.startswith(f"{QUICKSTART}: device: 'abacus' cannot be used: ")


def test_without_a_dump_explain_says_who_serves_and_is_deterministic(call: Call) -> None:
    code, out, _ = call("explain", QUICKSTART)
    assert code == 0
    assert "\nfull_attention that could serve this model\n" in out
    assert "\n  sdpa: yes, deterministic\n" in out
    assert "\n  naive: yes\n" in out
    report = json.loads(call("explain", QUICKSTART, "--json")[1])
    assert report["deterministic"]["sdpa"] is True
    assert "attention" not in report


def test_what_serves_and_is_not_deterministic_says_so(
    call: Call, others: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Costly, "why_not", lambda self, need: [])
    monkeypatch.setattr(Costly, "deterministic", lambda self, need: False)
    assert "\n  costly: yes, not deterministic\n" in call("explain", QUICKSTART)[1]


class Doubled(Costly):
    def attend(self, q: Any, k: Any, v: Any, views: AttentionViews, scale: float) -> Any:
        return 2 * super().attend(q, k, v, views, scale)


def test_what_is_wrong_does_not_serve(call: Call, others: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Costly, "why_not", lambda self, need: [])
    registry.register("full_attention", "doubled", f"{__name__}:Doubled", "third")
    out = call("explain", QUICKSTART)[1]
    assert "\n  costly: yes, deterministic\n" in out
    assert "\n  doubled: the start-up probe found wrong weights of" in out


def test_only_planning_tells_no_costs(call: Call, dumps: Path) -> None:
    report = json.loads(call("explain", QUICKSTART, "--plan", "--from", dumps / "05_layout.harts", "--json")[1])
    assert "plan" in report
    assert "attention" not in report


def test_the_model_is_not_built(told: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Reference, *given: Any) -> None:
        raise AssertionError("the model is built")

    monkeypatch.setattr(Reference, "__init__", refuse)
    assert told()["attention"]["microbatches"] == 2


def test_a_model_without_full_attention_has_no_ratios(call: Call, dumps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need = Need("cpu", torch.float32, "kda", 64, 4, (1, 1), (8, 8), (0, 0), (8, 8))
    monkeypatch.setattr(Reference, "need_of", classmethod(lambda cls, *given: need))
    out = call("explain", QUICKSTART, "--from", dumps / "05_layout.harts")[1]
    line = next(line for line in out.splitlines() if line.startswith("  sdpa  "))
    assert line.split() == ["sdpa", "no", "yes", "0", "B", "0", "B", "0", "FLOP", "-"]


def test_auto_is_no_backend(call: Call) -> None:
    code, out, err = call("explain", QUICKSTART, "--set", "full_attention=auto")
    assert (code, out) == (2, "")
    known = ", ".join(sorted(registry.names("full_attention")))
    assert err.endswith(f'full_attention.type: got the text "auto"; known: {known}\n')


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (99_960, "100 kB"),
        (30_040_000, "30.0 MB"),
        (999_600_000, "1.00 GB"),
        (7_516_192_768, "7.52 GB"),
        (1_234_567_890_123_456, "1.23 PB"),
    ],
)
def test_numbers_have_three_digits(value: int, text: str) -> None:
    assert _scaled(value, "B") == text
