"""`--backend NAME --device D --dtype T`: what the conformance suite runs on, and nothing else then.

Without `--backend` it runs on `naive` and `recurrent`, beside the other tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harts.errors import ConfigError
from harts.registry import resolve
from tests.parity.subject import Subject, make


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "subject" in metafunc.fixturenames:
        names = metafunc.config.getoption("--backend") or ["naive", "recurrent"]
        try:
            cases = [(name, rule) for name in names for rule in resolve("linear_attention", name).rules]
        except ConfigError as error:
            raise pytest.UsageError(str(error)) from error
        metafunc.parametrize("subject", cases, ids=["-".join(case) for case in cases], indirect=True)


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Subject:
    device, dtype = (request.config.getoption(name) for name in ("--device", "--dtype"))
    return make(*request.param, device, getattr(torch, dtype))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--backend"):
        here = Path(__file__).parent
        others = [
            each for each in items if here in each.path.parents and "subject" not in getattr(each, "fixturenames", ())
        ]
        config.hook.pytest_deselected(items=others)
        items[:] = [each for each in items if each not in others]
