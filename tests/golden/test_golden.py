"""The plans and layouts of hand-drawn cases, as text. Rewritten by `pytest --update-golden` alone."""

from pathlib import Path

import pytest

from harts.ir.text import format_value
from harts.stages.call_plan.min_call import plan_rounds
from harts.stages.layout.round_major import RoundMajor
from tests.golden.cases import B, trees

TREES = trees()


@pytest.mark.parametrize("name", TREES)
def test_plan_and_layout_are_as_drawn(name: str, request: pytest.FixtureRequest):
    tree = TREES[name]
    plan = plan_rounds(tree, B)
    layout = RoundMajor(RoundMajor.Config(conv_width=4)).run(plan)
    for value in (tree, plan, layout, layout.semantic_map):
        value.verify()
    text = "\n".join(format_value(value).rstrip("\n") for value in (tree, plan, layout)) + "\n"
    path = Path(__file__).with_name(f"{name}.txt")
    if request.config.getoption("--update-golden"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
