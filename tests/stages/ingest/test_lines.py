"""Bytes to records: lines end at the byte \\n only, text is strict UTF-8, and errors count lines as editors do."""

import gzip
import json
import lzma

import pytest

from harts.errors import InputError
from harts.stages.ingest.jsonl import read_jsonl
from harts.stages.ingest.lines import read_lines
from tests.stages.ingest.files import record, write

ODD = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\U0001f600"


def raw(each) -> bytes:
    """JSON with raw characters where json.dumps would escape them."""
    text = json.dumps(each, ensure_ascii=False)
    for letter in "\x0b\x0c\x1c":
        text = text.replace(json.dumps(letter)[1:-1], letter)
    return text.encode()


@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"], ids=["plain", "BOM"])
@pytest.mark.parametrize("close", [True, False], ids=["closed", "open end"])
def test_unicode_line_separators_do_not_end_a_record(tmp_path, start, end, close):
    path = tmp_path / "odd.jsonl"
    body = end.join([raw(record("a", text=ODD)), raw(record("b", text=ODD))])
    assert b"\x0b" in body and "\u2028".encode() in body
    path.write_bytes(start + body + (end if close else b""))
    found = list(read_lines(path))
    assert [number for number, _ in found] == [1, 2]
    assert [each["text"] for _, each in found] == [ODD, ODD]
    assert read_jsonl(path).columns.names == ("a", "b")


def test_key_may_stand_once_in_each_object(tmp_path):
    path = tmp_path / "nested.jsonl"
    path.write_bytes(b'{"id": "a", "text": {"id": "b", "inner": [{"id": 1}, {"id": 2}]}}\n{"id": "a"}\n')
    assert [each["id"] for _, each in read_lines(path)] == ["a", "a"]


def test_lone_surrogate_in_metadata_is_harmless(tmp_path):
    path = tmp_path / "lone.jsonl"
    path.write_bytes(json.dumps(record("a", text="\ud800")).encode() + b"\n")
    assert b"\\ud800" in path.read_bytes()
    assert read_jsonl(path).columns.names == ("a",)


def test_line_numbers_count_newline_bytes(tmp_path):
    path = tmp_path / "late.jsonl"
    good, bad = raw(record("a", text=ODD)), raw(record("b", loss_mask=[1]))
    path.write_bytes(good + b"\n\r\n\n" + bad + b"\n")
    with pytest.raises(InputError, match=r"late\.jsonl:4: trajectory 'b': field loss_mask: has 1 entries, expected 3"):
        read_jsonl(path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"id": "\xff"}', r"bad\.jsonl:2: is not UTF-8: invalid start byte at byte 8 of the line"),
        (b'{"id": "\xed\xa0\x80"}', r"bad\.jsonl:2: is not UTF-8"),
        (b'{"id": "b", ', r"bad\.jsonl:2: is not JSON"),
        (b'{"id": "b"} {}', r"bad\.jsonl:2: is not JSON: Extra data"),
        (b"\xef\xbb\xbf{}", r"bad\.jsonl:2: is not JSON"),
        (
            b'{"id": "b", "reward": 1, "reward": 2}',
            r"bad\.jsonl:2: holds the key 'reward' more than once in one object",
        ),
        (b'{"id": "b", "reward": 1, "reward": 1}', r"bad\.jsonl:2: holds the key 'reward'"),
        (b'{"id": "b", "text": {"\\u00e9": 1, "\xc3\xa9": 2}}', r"bad\.jsonl:2: holds the key '\\xe9'"),
        (b"[" * 100_000, r"bad\.jsonl:2: is not JSON"),
        (b'{"reward": ' + b"9" * 5000 + b"}", r"bad\.jsonl:2: is not JSON"),
    ],
    ids=[
        "byte",
        "raw surrogate",
        "cut",
        "two values",
        "late BOM",
        "twice",
        "twice the same",
        "twice inside",
        "deep",
        "huge",
    ],
)
def test_line_that_cannot_be_read_is_named(tmp_path, line, words):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(raw(record("a")) + b"\n" + line + b"\n")
    with pytest.raises(InputError, match=words):
        read_jsonl(path)


@pytest.mark.parametrize("token", ["NaN", "Infinity", "-Infinity"])
def test_json_nan_and_infinity_follow_the_finite_rule(tmp_path, token):
    path = tmp_path / "nan.jsonl"
    line = '{"id":"a","group":"g","tokens":[1,2,3],"loss_mask":[0,%d,1],"old_logprobs":[NaN,%s,-1]}\n'
    path.write_text(line % (0, token))
    assert read_jsonl(path).columns.old_logprobs[2] == -1.0
    path.write_text(line % (1, token))
    with pytest.raises(InputError, match=r"field old_logprobs: entry 1 is (nan|inf|-inf)"):
        read_jsonl(path)


def test_compressed_files_give_the_same_batch(tmp_path):
    plain = write(tmp_path / "a.jsonl", [record("a"), record("b", [1, 2, 9])])
    packed = {".gz": gzip.compress, ".xz": lzma.compress}
    for suffix, pack in packed.items():
        path = tmp_path / f"a.jsonl{suffix}"
        path.write_bytes(pack(plain.read_bytes()))
        assert read_jsonl(path).columns.digest() == read_jsonl(plain).columns.digest()


@pytest.mark.parametrize("suffix", ["gz", "xz"])
@pytest.mark.parametrize("damage", ["cut", "not packed", "flipped"])
def test_damaged_archive_is_named(tmp_path, suffix, damage):
    pack = gzip.compress if suffix == "gz" else lzma.compress
    data = pack(raw(record("a", range(500))) + b"\n")
    path = tmp_path / f"bad.jsonl.{suffix}"
    flipped = data[:30] + bytes([data[30] ^ 255]) + data[31:]
    path.write_bytes({"cut": data[:-12], "not packed": raw(record("a")), "flipped": flipped}[damage])
    with pytest.raises(InputError, match=rf"bad\.jsonl\.{suffix}(:1)?: (cannot be read|is not)"):
        read_jsonl(path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"none\.jsonl: cannot be read"):
        read_jsonl(tmp_path / "none.jsonl")


def test_folder_is_named(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_jsonl(tmp_path)
