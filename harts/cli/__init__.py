"""The command line: `harts check | explain | plan | run | calibrate | doctor | tune | inspect | diff | backends`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from harts.cli.output import failure
from harts.cli.parser import build_parser
from harts.errors import HartsError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: without the program's name; None is the process's own.

    Returns:
        The exit code: 0 ok, 1 the run or comparison failed, 2 bad config or usage.
    """
    # read when torch is first imported: threads that spin while they wait make a busy machine many times slower
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    as_json = "--json" in (sys.argv[1:] if arguments is None else arguments)
    try:
        given = build_parser().parse_args(arguments)
        code: int = given.command(given)
        sys.stdout.flush()
    except HartsError as error:
        failure(error, as_json)
        return error.exit_code
    except BrokenPipeError:  # the reader went away, as `| head` does; Python would complain once more on exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return code
