"""Observers: verification, printing, dumping, progress."""

import io
import time
from dataclasses import replace

import numpy as np
import pytest

import harts
from harts.errors import VerifyError
from harts.ir import codec
from harts.observe import News, Observer, Print, Progress, Verify
from harts.pipeline import Pipeline
from tests.toy_stages import FILE, Numbers, Part, register_toys


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    register_toys(monkeypatch)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "toy.yaml"
    path.write_text(FILE)
    return path


def test_invalid_value_is_caught_right_after_its_stage(path):
    with pytest.raises(VerifyError, match=r"toy_numbers\.values\[0\]: must not be negative"):
        harts.load(path, ["ingest.first=-3"]).run()


def test_verification_can_be_turned_off(path):
    harts.load(path, ["ingest.first=-3", "observe.verify=off"]).run()


def test_what_a_value_newly_holds_is_verified_too():
    bad = Numbers(np.array([1, -2]))
    with pytest.raises(VerifyError, match=r"toy_numbers\.values\[1\]"):
        Verify(roundtrip=False)("partition", Part(bad, np.array([1])), 0.0)


def test_what_was_verified_is_not_verified_again(monkeypatch):
    counted = []
    monkeypatch.setattr(Numbers, "verify", lambda self: counted.append(self.values[0]))
    numbers, verify = Numbers(np.array([1])), Verify(roundtrip=False)
    verify("ingest", numbers, 0.0)
    verify("partition", Part(numbers, np.array([1])), 0.0)
    assert counted == [1]


def test_news_of_an_equal_but_other_value_is_news():
    news, first = News(), Numbers(np.array([1]))
    assert news.of(first) == [first]
    second = replace(first)
    assert news.of(second) == [second]
    assert news.of(second) == []


def test_roundtrip_passes_what_survives_and_fails_what_does_not(path, monkeypatch):
    harts.load(path, ["observe.verify=roundtrip"]).run()
    other = codec.encode(Numbers(np.array([7])))
    monkeypatch.setattr("harts.observe.encode", lambda value: other)
    with pytest.raises(VerifyError, match="toy_numbers: after ingest, encoding and decoding it gives another digest"):
        harts.load(path, ["observe.verify=roundtrip"]).run()


def test_printed_kinds_appear_once_and_cut_at_the_limit(path):
    stream = io.StringIO()
    pipeline = Pipeline.load(path)
    pipeline.observers = [Print(("step_plan", "toy_part"), 3, stream)]
    pipeline.run()
    heads = [line for line in stream.getvalue().splitlines() if not line.startswith((" ", "..."))]
    assert [head.split()[0] for head in heads] == ["step_plan", "toy_part", "toy_part", "toy_part"]
    assert "more lines" in stream.getvalue()


def test_printing_goes_to_stderr(path, capsys):
    harts.load(path, ["observe.print=[toy_numbers]"]).run()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "toy_numbers" in captured.err


def test_observers_are_told_of_begin_advance_end_and_finish(path):
    told = []

    class Spy(Observer):
        def begin(self, stage, items):
            told.append(("begin", stage, items))

        def advance(self):
            told.append(("advance",))

        def __call__(self, stage, value, seconds):
            told.append(("value", stage, value.kind))

        def finish(self):
            told.append(("finish",))

    pipeline = Pipeline.load(path)
    pipeline.observers = [Spy()]
    pipeline.run(until="call_plan")
    assert told[-6:] == [
        ("begin", "call_plan", 3),
        ("advance",),
        ("advance",),
        ("advance",),
        ("value", "call_plan", "per_microbatch"),
        ("finish",),
    ]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_no_progress_without_a_terminal(path, capsys):
    harts.load(path, ["observe.progress=true"]).run()
    assert capsys.readouterr().err == ""


def test_bar_appears_once_work_takes_longer_than_the_delay_and_goes_when_it_ends():
    stream = Terminal()
    progress = Progress(stream, delay=0.05)
    progress.begin("short", 1)
    progress.finish()
    assert stream.getvalue() == ""
    progress.begin("long", 4)
    deadline = time.monotonic() + 10
    while "long" not in stream.getvalue() and time.monotonic() < deadline:
        progress.advance()
        time.sleep(0.01)
    progress.finish()
    assert "long" in stream.getvalue()
    shown = stream.getvalue()
    progress.finish()
    progress.advance()
    assert stream.getvalue() == shown


def test_bar_is_gone_before_values_are_printed(path, monkeypatch):
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    pipeline = harts.load(path, ["observe.progress=true", "observe.print=[toy_numbers]"])
    kinds = [type(each) for each in pipeline.observers]
    assert kinds.index(Progress) < kinds.index(Print)
