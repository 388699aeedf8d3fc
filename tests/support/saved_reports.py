"""Saved reports: the report of a saved plan and a saved trace."""

from pathlib import Path
from tempfile import TemporaryDirectory

from pipesched import Plan, Report, Trace


def read_again(report: Report) -> Report:
    """Return the report that ``pipesched report plan.json trace.json`` makes of the files of a report's parts."""
    with TemporaryDirectory() as folder:
        plan, trace = Path(folder, "plan.json"), Path(folder, "trace.json")
        report.plan.save(plan)
        if report.measured is None:
            return Report(Plan.load(plan))
        report.measured.to_chrome(trace)
        return Report(Plan.load(plan), Trace.load(trace))
