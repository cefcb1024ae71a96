"""`harts doctor` and `harts tune`: is this machine right for the pipeline, and how are its kernels best launched."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

from harts.cli.output import printed, result
from harts.config import Settings, load_settings
from harts.errors import ConfigError
from harts.pipeline import Pipeline
from harts.report.doctor import render_doctor, render_tuned
from harts.train.versions import gpu, import_if_there, versions


def doctor(given: Namespace) -> int:
    """`harts doctor`: 1 if a backend cannot serve or a check fails."""
    torch = import_if_there("torch") is not None
    if given.gpu and not torch:
        raise ConfigError("--gpu: torch cannot be imported")
    settings = _settings(given, torch)
    if printed(settings, given):
        return 0
    _check_name_of_device(settings)
    report: dict[str, Any] = {"file": str(given.file), **_machine(settings), **_examined(given, settings)}
    serves = all(not each["why_not"] for each in report.get("serving", {}).values())
    report["ok"] = serves and all(each["ok"] for each in report.get("checks", []))
    result(report, render_doctor(report), given.json)
    return 0 if report["ok"] else 1


def _settings(given: Namespace, torch: bool) -> Settings:
    """The file; if it cannot be loaded, the versions may be the reason."""
    try:
        return load_settings(given.file, given.overrides, "all" if torch else "plan")
    except ConfigError as error:
        error.add_note(", ".join(f"{name} {version or 'not installed'}" for name, version in versions().items()))
        raise


def _check_name_of_device(settings: Settings) -> None:
    """That torch knows it by name; whether it is here is for the report to say."""
    torch = import_if_there("torch")
    try:
        if torch is not None:
            torch.device(settings.device)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{settings.path}: device: {settings.device!r} cannot be used: {reason}") from error


def _machine(settings: Settings) -> dict[str, Any]:
    return {"gpu": gpu(settings.device), "versions": versions()}


def _examined(given: Namespace, settings: Settings) -> dict[str, Any]:
    if settings.scope == "plan":
        return {"not_asked": "torch cannot be imported, so that only planning runs here"}
    if "model" not in settings.components and not given.gpu:
        return {"not_asked": "the file has no model"}
    from harts.train.doctor import examine  # noqa: PLC0415  (imports torch)

    return examine(Pipeline(settings), given.gpu)


def tune(given: Namespace) -> int:
    """`harts tune`: measure, print, and write the table."""
    settings = load_settings(given.file, given.overrides, "all")
    if printed(settings, given):
        return 0
    if not given.out.parent.is_dir():  # said before minutes are spent
        raise ConfigError(f"{given.out}: cannot be written: {given.out.parent} is no folder")
    if import_if_there("triton") is None:
        raise ConfigError("triton cannot be imported: install the extra `fla`")
    from harts.train import tune as tuning  # noqa: PLC0415  (imports torch and triton)
    from harts.train.precompile import default_jobs  # noqa: PLC0415

    _check_name_of_device(settings)
    timer = tuning.CudaTimer(settings.device)
    say = (lambda line: None) if given.quiet else (lambda line: print(line, file=sys.stderr))
    effort = tuning.Effort(given.rows, given.repeats)
    table = tuning.tune(Pipeline(settings), effort, timer, say, jobs=given.jobs or default_jobs())
    tuning.write_tuned(table, given.out)
    result(table, render_tuned(table), given.json)
    return 0
