"""What is not read or written, and what the error says."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from harts.errors import CodecError
from harts.ir import PerMicrobatch, Value
from harts.ir.codec import decode, encode, load
from tests.ir import cases


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.marker),))


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_pickle_is_refused_and_never_runs(tmp_path: Path, protocol: int) -> None:
    marker, path = tmp_path / "ran", tmp_path / "plan.pkl"
    path.write_bytes(pickle.dumps(Payload(marker), protocol=protocol))
    with pytest.raises(CodecError, match=r"plan\.pkl: is not a HARTS value.*accepted are only files that HARTS wrote"):
        load(path)
    assert not marker.exists()
    pickle.loads(path.read_bytes())
    assert marker.exists(), "the payload of this test must be a real one"


def test_a_torch_file_is_refused_and_never_runs(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    marker, path = tmp_path / "ran", tmp_path / "plan.pt"
    torch.save(Payload(marker), path)
    with pytest.raises(
        CodecError, match=r"zip archive, such as a \.pt or \.npz.*pickle, \.pt, \.npy and \.npz are never"
    ):
        load(path)
    assert not marker.exists()


def test_numpy_files_with_objects_are_refused_and_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    objects = np.array([Payload(marker)], dtype=object)
    np.savez(tmp_path / "plan.npz", objects)
    np.save(tmp_path / "plan.npy", objects)
    assert zipfile.is_zipfile(tmp_path / "plan.npz")
    for name, guess in (("plan.npz", r"\.npz file"), ("plan.npy", r"a \.npy file")):
        with pytest.raises(CodecError, match=guess):
            load(tmp_path / name)
    assert not marker.exists()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CodecError, match=r"none\.harts: cannot be read: No such file"):
        load(tmp_path / "none.harts")


def test_an_empty_file_is_refused() -> None:
    with pytest.raises(CodecError, match=r"is not a HARTS value \(it is empty"):
        decode(b"")


def test_every_truncation_is_refused() -> None:
    data = encode(cases.plan())
    for size in range(len(data)):
        with pytest.raises(CodecError, match=r"truncated|is not a HARTS value"):
            decode(data[:size])


def test_a_truncated_array_is_named_with_numbers(tmp_path: Path) -> None:
    path = tmp_path / "short.harts"
    path.write_bytes(encode(cases.semantic_map())[:-45])
    with pytest.raises(CodecError, match=r"short\.harts: semantic_map\.run_length: .*40 bytes.* 0 are left"):
        load(path)


def test_trailing_bytes_are_counted() -> None:
    with pytest.raises(CodecError, match="3 bytes follow after the last value"):
        decode(encode(cases.plan()) + b"abc")


def rewritten(value: Value, change: Callable[[list[Any]], None]) -> bytes:
    """The bytes of a value after a change of its objects: head, record of the first value, its arrays, ..."""
    magic, *objects = msgpack.Unpacker(io.BytesIO(encode(value)))
    parsed = [msgpack.unpackb(objects[0]), msgpack.unpackb(objects[1]), *objects[2:]]
    change(parsed)
    plain = [each if isinstance(each, bytes) else msgpack.packb(each) for each in parsed]
    return msgpack.packb(magic) + b"".join(b"\xc6" + len(each).to_bytes(4, "big") + each for each in plain)


def refused(change: Callable[[list[Any]], None], value: Value | None = None) -> str:
    with pytest.raises(CodecError) as caught:
        decode(rewritten(value or cases.semantic_map(), change))
    return str(caught.value)


def test_rewriting_nothing_changes_nothing() -> None:
    assert rewritten(cases.semantic_map(), lambda objects: None) == encode(cases.semantic_map())


def test_unknown_kind() -> None:
    assert "unknown kind 'plan_of_war'; known: columns, " in refused(lambda o: o[1].update(kind="plan_of_war"))
    assert "unknown kind ['a']" in refused(lambda o: o[1].update(kind=["a"]))


def test_newer_version_names_the_one_that_is_read_and_the_writer() -> None:
    def change(objects: list[Any]) -> None:
        objects[0]["producer"] = "harts 9.9"
        objects[1]["version"] = 3

    text = refused(change)
    assert "semantic_map v3 is newer than what this release reads (v1) (written by harts 9.9)" in text


def test_older_version_without_an_upgrade() -> None:
    assert "semantic_map v0 is older than what this release reads (v1 and later)" in refused(
        lambda o: o[1].update(version=0)
    )


def test_newer_file_format() -> None:
    assert "file format 2 by harts" in refused(lambda o: o[0].update(format=2))


def test_missing_and_unknown_fields_are_all_named() -> None:
    def change(objects: list[Any]) -> None:
        objects[1]["fields"]["colour"] = 1
        objects[1]["fields"]["run_rows"] = objects[1]["fields"].pop("run_row")

    assert "semantic_map v1: has no run_row, has an unknown field colour, has an unknown field run_rows" in refused(
        change
    )


def field(name: str, item: Any) -> Callable[[list[Any]], None]:
    return lambda objects: objects[1]["fields"].update({name: item})


@pytest.mark.parametrize(
    ("item", "says"),
    [
        (None, "semantic_map.run_row: is NoneType, declared is"),
        ("text", "semantic_map.run_row: is str, declared is"),
        ({"array": ["<f8", [5]]}, "semantic_map.run_row: is float64, declared is int64"),
        ({"array": ["|O", [5]]}, "semantic_map.run_row: '|O' is not a dtype that an array may have"),
        ({"array": [">i8", [5]]}, "'>i8' is not a dtype"),
        ({"array": ["<i8", [4]]}, "semantic_map.run_row: a frame has 40 bytes where 32 of 32 are missing"),
        ({"array": ["<i8", [5, 1]]}, "semantic_map.run_row: has 2 dimensions, declared are 1"),
        ({"array": ["<i8", [-5]]}, "semantic_map.run_row: [-5] is not a shape"),
        ({"array": ["<i8", [1 << 40]]}, "is truncated: int64[1099511627776] has 8796093022208 bytes"),
        ({"array": ["<i8", [0, 1 << 62]]}, "is not a shape"),
        ({"array": ["<i8", [True]]}, "is not a shape"),
        ({"array": ["<i8"]}, "is not a scalar, an array, a tuple or an earlier value"),
        ({"value": 0}, "is not a scalar, an array, a tuple or an earlier value"),
        ([[1]], "is not a scalar, an array, a tuple or an earlier value"),
        (b"raw", "is not a scalar, an array, a tuple or an earlier value"),
        (msgpack.ExtType(5, b"x"), "is not a scalar, an array, a tuple or an earlier value"),
    ],
)
def test_fields_of_the_wrong_form(item: Any, says: str) -> None:
    assert says in refused(field("run_row", item))


@pytest.mark.parametrize(
    ("name", "item", "says"),
    [
        ("replicas", "1", "step_plan.replicas: is str, declared is int"),
        ("replicas", True, "step_plan.replicas: is bool, declared is int"),
        ("chosen", None, "step_plan.chosen: is NoneType, declared is int"),
        ("capacity", 1.0, "step_plan.capacity: is float, declared is int | None"),
        ("candidates", ["a", 2], "step_plan.candidates: is a tuple of int, str, declared is tuple[str, ...]"),
    ],
)
def test_scalars_of_the_wrong_type(name: str, item: Any, says: str) -> None:
    assert says in refused(field(name, item), cases.step())


def test_sizes_that_disagree() -> None:
    def change(objects: list[Any]) -> None:
        objects[1]["fields"]["run_row"]["array"][1] = [4]
        objects[3] = objects[3][:32]

    assert "semantic_map.run_length: has size 5 where M is 4" in refused(change)


def test_head_that_disagrees() -> None:
    assert "holds semantic_map where the head says 'round_plan'" in refused(lambda o: o[0].update(kind="round_plan"))
    assert "head: has ['format'" in refused(lambda o: o[0].update(extra=1))
    assert "value 1: is truncated" in refused(lambda o: o[0].update(values=2))
    assert "value 1: is truncated" in refused(lambda o: o[0].update(values=0))


def test_garbage_after_the_magic() -> None:
    start = encode(cases.plan())[:6]
    with pytest.raises(CodecError, match="head: byte 0x80 where a binary object"):
        decode(start + b"\x80" * 50)
    with pytest.raises(CodecError, match="head: is not msgpack"):
        decode(start + b"\xc6\0\0\0\2\xc1\xc1")
    with pytest.raises(CodecError, match="head: is not msgpack"):
        decode(start + b"\xc6\0\0\x10\0" + b"\x91" * 4096)


def test_any_changed_byte_gives_a_value_or_a_codec_error() -> None:
    data = encode(cases.semantic_map())
    for i in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            changed = bytearray(data)
            changed[i] ^= flip
            try:
                assert isinstance(decode(bytes(changed)), Value)
            except CodecError as error:
                assert str(error).startswith("bytes: ")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (lambda: replace(cases.plan(), chunk_size=np.int64(64)), "round_plan.chunk_size: is int64, declared is int"),
        (lambda: replace(cases.step(), candidates=["a", "b"]), "step_plan.candidates: is list, declared is tuple"),
        (lambda: replace(cases.plan(), tree=cases.step()), "round_plan.tree: is StepPlan, declared is SegmentTree"),
        (lambda: replace(cases.step(), chosen=1 << 70), "step_plan: cannot be written"),
        (lambda: PerMicrobatch(cases.step(), (1,)), "per_microbatch.items: is a tuple of int"),
        (lambda: replace(cases.outputs(), hidden=np.zeros((96, 1), complex)), "hidden: complex128 cannot be written"),
    ],
)
def test_what_cannot_be_read_back_is_not_written(value: Callable[[], Value], says: str) -> None:
    with pytest.raises(CodecError) as caught:
        encode(value())
    assert says in str(caught.value)
