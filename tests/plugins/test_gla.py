"""A third party's backend is found by its entry point, passes the conformance suite, and fails it when it is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.plugins.installed import GLA, ROOT, install, run_python

SUITE = ("-m", "pytest", "tests/parity", "-p", "no:cacheprovider", "-p", "no:xdist")

WRONG = {
    "leaks": """
    def call(self, rows, packed, initial_state, /):
        # the state of a sequence's end runs on into the next sequence
        lengths = packed.cu_seqlens.diff().tolist()
        ends = torch.arange(len(lengths))
        whole = replace(packed, state_sequence=ends, state_offset=packed.cu_seqlens.diff())
        after = super().call(rows, whole, initial_state).states
        return super().call(rows, packed, initial_state + torch.cat([torch.zeros_like(after[:1]), after[:-1]]))
""",
    "no_state_gradient": """
    def call(self, rows, packed, initial_state, /):
        output, states = super().call(rows, packed, initial_state)
        return RoundOutput(output, states.detach())
""",
    "no_initial_gradient": """
    def call(self, rows, packed, initial_state, /):
        return super().call(rows, packed, initial_state.detach())
""",
    "one_token_late": """
    def call(self, rows, packed, initial_state, /):
        # states are taken one token after what was asked for, where there is one
        check_call(rows, packed, initial_state)
        length = packed.cu_seqlens.diff()[packed.state_sequence]
        late = replace(packed, chunk_size=1, state_offset=(packed.state_offset + 1).minimum(length))
        return super().call(rows, late, initial_state)
""",
    "sees_the_future": """
    def call(self, rows, packed, initial_state, /):
        return super().call({**rows, "g": rows["g"] + rows["g"].mean() * 1e-6}, packed, initial_state)
""",
    "serves_all": """
    def why_not(self, need):
        return []
""",
    "serves_nothing": """
    def why_not(self, need):
        return ["a reason"]
""",
    "refuses_nothing": """
    def call(self, rows, packed, initial_state, /):
        return super().call(rows, replace(packed, chunk_size=1), initial_state)
""",
    "reads_padding": """
    def mix(self, inputs, plan):
        return super().mix(inputs, plan) + 0 * inputs["v"].sum()
""",
    "shares_data": """
    def mix(self, inputs, plan):
        # what was made once for all layers is a layer's own
        return super().mix({**inputs, "g": plan.once("g", lambda: inputs["g"])}, plan)
""",
    "ignores_strides": """
    def mix(self, inputs, plan):
        dense = {name: torch.empty(x.shape, device="meta").stride() for name, x in inputs.items()}
        return super().mix({name: x.as_strided(x.shape, dense[name]) for name, x in inputs.items()}, plan)
""",
    "nothing_without_gradients": """
    def mix(self, inputs, plan):
        output = super().mix(inputs, plan)
        return output if torch.is_grad_enabled() else torch.zeros_like(output)
""",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, and another one with the wrong variants."""
    folder = tmp_path_factory.mktemp("site")
    install(GLA, folder)
    wrong = tmp_path_factory.mktemp("wrong")
    code = ["from dataclasses import replace\n\nimport torch\nfrom harts_gla import *\n\n"]
    code += [f"class {name}(GatedLinearAttention):{body}\n\n" for name, body in WRONG.items()]
    (wrong / "wrong_gla.py").write_text("".join(code))
    points = "".join(f'{name} = "wrong_gla:{name}"\n' for name in WRONG)
    (wrong / "pyproject.toml").write_text(
        '[project]\nname = "wrong-gla"\nversion = "1"\n[tool.setuptools]\npy-modules = ["wrong_gla"]\n'
        f'[project.entry-points."harts.linear_attention"]\n{points}'
    )
    install(wrong, folder)
    return folder


def test_the_command_lists_it(site: Path) -> None:
    done = run_python(site, "-c", "from harts.cli import main; main()", "backends")
    assert re.search(r"gla\b.*harts-gla", done.stdout), done.stdout + done.stderr


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_it_passes_the_suite(site: Path, dtype: str) -> None:
    done = run_python(site, *SUITE, "--backend", "gla", "--dtype", dtype)
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"[4-9]\d passed", done.stdout), done.stdout[-400:]


def test_every_wrong_variant_fails_the_suite(site: Path) -> None:
    chosen = [argument for name in WRONG for argument in ("--backend", name)]
    quick = "not forests and not published and not is_served"
    done = run_python(site, *SUITE, *chosen, "--tb", "no", "-k", quick)
    failed = set(re.findall(r"^(?:FAILED|ERROR) .*\[(\w+)-gla", done.stdout, flags=re.MULTILINE))
    assert failed == set(WRONG), done.stdout[-4000:]


def test_an_unknown_backend_is_told_with_those_known(site: Path) -> None:
    done = run_python(site, *SUITE, "--backend", "gla_")
    assert done.returncode != 0
    assert "did you mean gla?" in done.stdout + done.stderr


def test_a_backend_that_serves_none_of_the_needs_fails_with_its_reasons(site: Path) -> None:
    done = run_python(site, *SUITE, "--backend", "serves_nothing", "-k", "twice")
    assert done.returncode == 1
    assert "serves_nothing serves none of the suite's needs; of the last: a reason" in done.stdout


def test_the_template_is_this_package() -> None:
    text = (ROOT / "docs/linear_backend.md").read_text()
    for language, name in (("python", "harts_gla.py"), ("toml", "pyproject.toml")):
        (shown,) = re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)
        assert shown == (GLA / name).read_text()
