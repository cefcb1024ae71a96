from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harts import registry
from harts.backends.base import Need
from harts.backends.build import Prepared, able, build_env, refusals
from harts.backends.full.sdpa import Sdpa
from harts.backends.linear.naive import Naive
from harts.backends.model.reference import Reference
from harts.backends.plan_tensors import AttentionViews
from harts.backends.split import Split
from harts.errors import BackendError
from harts.registry import register
from harts.schema import StageConfig
from tests.backends.model.cases import CHUNK, CONV_WIDTH, config


class Lazy(Sdpa):
    def why_not(self, need: Need) -> list[str]:
        return ["it is too hot", f"chunks of {need.chunk_size} are too long"]


class OwnRowsAlone(Sdpa):
    """Loses all ancestors."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, views: AttentionViews, scale: float) -> Tensor:
        branches = len(views.cu_q)
        own = replace(views, run_offset=np.arange(branches), run_row=views.cu_q[:-1], run_length=np.diff(views.cu_q))
        return super().attend(q, k, v, own, scale)


def build(full: type[Any] = Sdpa, conv_width: int = CONV_WIDTH, device: str = "cpu") -> Any:
    model = (Reference, config())
    return build_env(model, (Naive, Naive.Config()), (full, full.Config()), Prepared(CHUNK, conv_width), device)


def test_env_holds_the_model_with_its_backends() -> None:
    env = build()
    assert (type(env.model), env.device, env.dtype) == (Reference, "cpu", torch.float64)
    mixers = [block.mixer for block in env.model.module.blocks]
    assert [type(mixer.backend) for mixer in mixers] == [Naive, Sdpa, Naive]


def test_all_reasons_of_all_parts_come_at_once_with_who_could_serve() -> None:
    with pytest.raises(BackendError) as caught:
        build(full=Lazy, conv_width=9)
    lines = str(caught.value).splitlines()
    assert lines[0] == "models: Reference: its conv_width is 3, but the layout prepares windows of 9"
    assert lines[1:3] == [
        "full_attention: Lazy: it is too hot",
        f"full_attention: Lazy: chunks of {CHUNK} are too long",
    ]
    assert lines[3].startswith("full_attention: could serve: ")
    assert "sdpa" in lines[3]


def test_a_backend_from_outside_that_sees_other_rows_is_refused_and_not_offered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_added", {})
    register("full_attention", "own_rows_alone", f"{__name__}:OwnRowsAlone", "third")
    need = build().model.need(CHUNK)
    assert OwnRowsAlone(StageConfig()).why_not(need) == []
    wrong = "the start-up probe found "
    with pytest.raises(BackendError, match=f"full_attention: OwnRowsAlone: {wrong}.* row 9 does not see row 0"):
        build(full=OwnRowsAlone)
    assert able("full_attention", need) == ["sdpa"]
    (reason,) = refusals(OwnRowsAlone(StageConfig()), need)
    assert reason.startswith(wrong)


def test_backends_that_cannot_be_imported_or_configured_are_not_offered() -> None:
    register("full_attention", "test_absent", "no_such_package:Class", "tests")
    register("full_attention", "test_lazy", f"{__name__}:Lazy", "tests")
    names = able("full_attention", build().model.need(CHUNK))
    assert "sdpa" in names
    assert not {"test_absent", "test_lazy"} & set(names)


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_unusable_device_is_refused_by_name(device: str) -> None:
    with pytest.raises(BackendError, match=f"device: '{device}' cannot be used"):
        build(device=device)


class Divided(Reference):
    """As if three replicas of two processes each shared it."""

    split = Split(replicas=3, row_multiple=2)


@pytest.mark.parametrize(
    ("prepared", "faults"),
    [
        (Prepared(CHUNK, CONV_WIDTH, row_multiple=4, replicas=3), []),
        (Prepared(CHUNK, CONV_WIDTH, row_multiple=4), []),
        (Prepared(CHUNK, CONV_WIDTH, replicas=3), ["split over processes in 2 parts, but layout.row_multiple is 1"]),
        (
            Prepared(CHUNK, CONV_WIDTH, 3, 2),
            ["layout.row_multiple is 3", "has 3 data-parallel replicas, but partition"],
        ),
    ],
)
def test_what_is_planned_has_to_fit_the_processes(prepared: Prepared, faults: list[str]) -> None:
    parts = (Divided, config()), (Naive, Naive.Config()), (Sdpa, Sdpa.Config())
    if not faults:
        assert build_env(*parts, prepared, "cpu").model.split.replicas == 3
        return
    with pytest.raises(BackendError) as caught:
        build_env(*parts, prepared, "cpu")
    lines = str(caught.value).splitlines()
    assert len(lines) == len(faults)
    assert all(fault in line for fault, line in zip(faults, lines, strict=True))
