"""Round trips: every kind, sharing, frames, tensors, files."""

from __future__ import annotations

import io
import tracemalloc
from dataclasses import fields, replace
from pathlib import Path

import msgpack
import numpy as np
import pytest

from harts.errors import CodecError
from harts.ir import Columns, PerMicrobatch, RolloutBatch, RoundPlan, Value, wire
from harts.ir.codec import decode, encode, load, save
from harts.ir.diff import diff
from tests.forests import batch_of
from tests.ir import cases

KINDS = cases.every_kind()


def test_there_is_a_case_of_every_kind() -> None:
    assert set(KINDS) == {kind for kind, cls in Value.kinds.items() if cls.__module__.startswith("harts.")}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_survives(kind: str) -> None:
    value = KINDS[kind]
    back = decode(encode(value))
    assert type(back) is type(value)
    assert diff(value, back) == []
    assert back.digest() == value.digest()
    back.verify()


@pytest.mark.parametrize("kind", KINDS)
def test_equal_values_have_equal_bytes(kind: str) -> None:
    assert encode(KINDS[kind]) == encode(cases.every_kind()[kind])
    assert encode(decode(encode(KINDS[kind]))) == encode(KINDS[kind])


def test_all_optional_columns_survive_and_absent_ones_stay_absent() -> None:
    bare = decode(encode(batch_of([[1, 2], [3]])))
    assert isinstance(bare, RolloutBatch)
    assert bare.columns.reward is None
    token, trajectory = np.array([0.0, np.nan, -np.inf]), np.array([-0.0, 1e-300])
    full = {field.name: None for field in fields(Columns) if field.default is None}
    full |= dict.fromkeys(("reward", "advantage", "weight", "temperature"), trajectory)
    full |= dict.fromkeys(("advantages", "old_logprobs", "ref_logprobs", "weights", "temperatures"), token)
    batch = batch_of([[1, 2], [3]], **full)
    back = decode(encode(batch))
    assert diff(batch, back) == []
    assert np.signbit(back.columns.reward[0])  # type: ignore[attr-defined]


def test_empty_arrays_and_tuples_survive() -> None:
    empty = Columns((), (), cases.ints(0), cases.small(), np.zeros(0, dtype=np.bool_))
    batch = RolloutBatch("", cases.small(), empty)
    back = decode(encode(batch))
    assert back.digest() == batch.digest()


def test_strided_arrays_are_written_in_c_order() -> None:
    plan = cases.partitions()
    strided = replace(plan, microbatch=np.asfortranarray(plan.microbatch))
    assert encode(strided) == encode(plan)


def test_arrays_that_were_read_are_read_only_and_aligned() -> None:
    tokens = decode(encode(cases.tree())).tokens  # type: ignore[attr-defined]
    assert tokens.flags.aligned
    assert not tokens.flags.writeable


def test_torch_tensors_come_back_as_arrays_of_the_same_bits() -> None:
    torch = pytest.importorskip("torch")
    hidden = torch.randn(96, 4, requires_grad=True)
    value = replace(cases.outputs(), hidden=hidden, router_z=hidden.sum(), expert_load=hidden.bfloat16())
    back = decode(encode(value))
    assert back.digest() == value.digest()
    assert np.array_equal(back.hidden, hidden.detach().numpy())  # type: ignore[attr-defined]
    assert back.router_z.shape == ()  # type: ignore[attr-defined]
    assert diff(value, back) == []


def many(count: int) -> PerMicrobatch[RoundPlan]:
    """Plans that share one tree, under one step."""
    plan = cases.plan()
    return PerMicrobatch(cases.step(), tuple(replace(plan, chunk_size=64) for _ in range(count)))


def test_shared_values_are_written_once_and_shared_again() -> None:
    one, hundred = len(encode(many(1))), len(encode(many(100)))
    tree = len(encode(cases.tree()))
    plan_alone = len(encode(cases.plan())) - tree
    assert (hundred - one) / 99 < plan_alone + 20 < tree
    back = decode(encode(many(100)))
    assert isinstance(back, PerMicrobatch)
    assert len({id(item) for item in back.items}) == 100
    assert len({id(item.tree) for item in back.items}) == 1


def test_an_object_held_twice_is_one_object_when_read() -> None:
    plan = cases.plan()
    back = decode(encode(PerMicrobatch(cases.step(), (plan, plan))))
    assert isinstance(back, PerMicrobatch)
    assert back.items[0] is back.items[1]


@pytest.mark.parametrize("frame", [1, 7, 8, 380, 381])
def test_large_arrays_are_framed(monkeypatch: pytest.MonkeyPatch, frame: int) -> None:
    tree = cases.tree()
    whole = encode(tree)
    monkeypatch.setattr(wire, "FRAME_BYTES", frame)
    framed = encode(tree)
    assert tree.tokens.nbytes == 380
    assert len(framed) - len(whole) >= 5 * (-(-tree.tokens.nbytes // frame) - 1)
    monkeypatch.undo()
    assert diff(decode(framed), tree) == []


def test_frames_stay_below_the_limit_of_msgpack() -> None:
    assert wire.FRAME_BYTES < wire.BIN_LIMIT == 2**32


def test_the_size_of_what_cannot_be_framed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "BIN_LIMIT", 300)
    batch = replace(cases.trie().batch, source="x" * 300)
    with pytest.raises(CodecError, match=r"rollout_batch: 3\d\d bytes without its arrays; fewer than 300"):
        encode(batch)


def test_a_file_is_a_stream_that_any_msgpack_reader_can_walk() -> None:
    objects = list(msgpack.Unpacker(io.BytesIO(encode(cases.semantic_map()))))
    assert objects[0] == "HARTS"
    head = msgpack.unpackb(objects[1])
    assert head["kind"] == "semantic_map"
    assert head["producer"].startswith("harts ")
    assert msgpack.unpackb(objects[2])["version"] == 1
    assert np.array_equal(np.frombuffer(objects[3], dtype="<i8"), [0, 2, 3, 5])


def test_files_hold_the_same_bytes_and_replace_older_ones(tmp_path: Path) -> None:
    path = tmp_path / "plan.harts"
    save(cases.tree(), path)
    save(cases.plan(), str(path))
    assert path.read_bytes() == encode(cases.plan())
    assert diff(load(path), cases.plan()) == []
    assert list(tmp_path.iterdir()) == [path]


def test_a_value_that_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.harts"
    save(cases.plan(), path)
    with pytest.raises(CodecError, match=r"semantic_outputs\.logprobs: is Listed, declared is TensorLike"):
        save(replace(cases.semantic_outputs(), logprobs=Listed([0.0] * 220)), path)
    assert diff(load(path), cases.plan()) == []
    assert list(tmp_path.iterdir()) == [path]


class Listed(list):  # type: ignore[type-arg]
    shape = (220,)


def test_memory_is_the_arrays_once_when_writing_and_reading(tmp_path: Path) -> None:
    count = 1 << 20
    batch = batch_of([[1]])
    columns = replace(batch.columns, offset=cases.ints(0, count), loss_mask=np.ones(count, dtype=np.bool_))
    columns = replace(columns, advantages=np.zeros(count), weights=np.zeros(count))
    value = RolloutBatch("big", np.zeros(count, dtype=np.int32), columns)
    size = len(encode(value))
    assert size > 20 * count
    tracemalloc.start()
    save(value, tmp_path / "big")
    assert tracemalloc.get_traced_memory()[1] < size / 20
    tracemalloc.reset_peak()
    back = load(tmp_path / "big")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.1 * size
    assert back.digest() == value.digest()
