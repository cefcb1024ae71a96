"""What a person is told of a plan and of a run: plain dicts for machines, text of at most 80 columns for people."""

from harts.report.plan import plan_report
from harts.report.text import render
from harts.report.train import comparison_report, logprob_report, steps_report

__all__ = ["comparison_report", "logprob_report", "plan_report", "render", "steps_report"]
