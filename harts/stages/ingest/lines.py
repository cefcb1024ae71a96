"""JSON lines, plain, gzip or xz, one at a time.

Lines end at the byte "\\n" only: text may hold U+2028 and whatever else Python takes for the end of a line.
"""

from __future__ import annotations

import codecs
import gzip
import json
import lzma
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from harts.errors import InputError
from harts.stages.ingest.values import shown

_OPENERS = {".gz": gzip.open, ".xz": lzma.open}


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise InputError(f"holds the key {shown(key)} more than once in one object, so which value counts is unknown")
    return found


# raw control characters inside text are no reason to lose a record
_DECODER = json.JSONDecoder(strict=False, object_pairs_hook=_object)


def read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (line number from 1, JSON value) of each line that is not blank. A byte order mark and CRLF are accepted.

    Raises:
        InputError: the file cannot be read, or a line is not UTF-8, not JSON, or repeats a key within an object.
    """
    try:
        with _open(path) as stream:
            for number, line in enumerate(stream, 1):
                text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if text and not text.isspace():
                    yield number, _parse(text, f"{path}:{number}")
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error


def _open(path: Path) -> IO[bytes]:
    opener: Any = _OPENERS.get(path.suffix)
    stream: IO[bytes] = opener(path, "rb") if opener else path.open("rb")
    return stream


def _parse(line: bytes, where: str) -> Any:
    try:
        return _DECODER.decode(line.decode("utf-8"))
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: is not UTF-8: {error.reason} at byte {error.start} of the line") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: is not JSON: {error}") from error
