"""Every error that HARTS raises on purpose. Their text is for a person; anything else that escapes is a bug."""

from __future__ import annotations


class HartsError(Exception):
    """Base of all expected errors. The command line prints the text without a trace and exits with `exit_code`."""

    exit_code = 1


class ConfigError(HartsError):
    """The pipeline file or the command line is wrong; the text lists every fault found."""

    exit_code = 2


class InputError(HartsError):
    """Rollout data is wrong; the text names file, line or trajectory, field and numbers."""


class PlanError(HartsError):
    """No plan exists for this input, for instance a trajectory longer than the capacity."""


class VerifyError(HartsError):
    """An IR value breaks one of its invariants; the text names kind, field and first bad index."""


class CodecError(HartsError):
    """Bytes are not a HARTS value, or of a version that this release cannot read."""


class BackendError(HartsError):
    """A named backend cannot serve; the text lists every reason and who could."""
