"""pipesched: a pipeline-parallel scheduling runtime for PyTorch.

General layout, each file importing only what stands above it:

    errors, actions, placement, dependencies    the words and the rule of what comes before what
    program, files, order, validation, lowering a schedule as data
    costs, bounds, trace, simulator             time and memory of it, predicted, and the least there can be
    partitioner, plan                           layers -> stages; all decisions in one value
    comparison, reports                         predicted beside measured; all of a plan for people to read
    ---- below this line torch is imported ----
    graph, profiler, randomness                 the model as layers, what they cost, keyed random numbers
    backward, stage, executors                  running a program
    pipeline, testing                           the front door
    cli                                         the command

``pipesched.schedules`` holds one file a schedule, ``pipesched.viz`` draws. Names are loaded when first used, so that
schedules can be studied without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipesched import schedules as schedules
    from pipesched import viz as viz
    from pipesched.actions import Action as Action
    from pipesched.actions import Kind as Kind
    from pipesched.bounds import lower_bound as lower_bound
    from pipesched.costs import Costs as Costs
    from pipesched.files import load_program as load_program
    from pipesched.layered_costs import graph_of as graph_of
    from pipesched.link_probe import probe_links as probe_links
    from pipesched.links import Link as Link
    from pipesched.links import Links as Links
    from pipesched.lowering import lower as lower
    from pipesched.order import Order as Order
    from pipesched.order import Schedule as Schedule
    from pipesched.order import Shape as Shape
    from pipesched.order import schedule as schedule
    from pipesched.overhead_probe import probe_overheads as probe_overheads
    from pipesched.partitioner import Partition as Partition
    from pipesched.partitioner import partition as partition
    from pipesched.pipeline import Pipeline as Pipeline
    from pipesched.plan import Plan as Plan
    from pipesched.profiles import Profile as Profile
    from pipesched.profiling import profile as profile
    from pipesched.program import Program as Program
    from pipesched.reports import Report as Report
    from pipesched.simulator import simulate as simulate
    from pipesched.step_log import StepLog as StepLog
    from pipesched.trace import Span as Span
    from pipesched.trace import Trace as Trace
    from pipesched.tuning import tune as tune
    from pipesched.validation import validate as validate

_HOME = {
    "Action": "actions",
    "Costs": "costs",
    "Kind": "actions",
    "Link": "links",
    "Links": "links",
    "Order": "order",
    "Partition": "partitioner",
    "Pipeline": "pipeline",
    "Plan": "plan",
    "Profile": "profiles",
    "Program": "program",
    "Report": "reports",
    "Schedule": "order",
    "Shape": "order",
    "Span": "trace",
    "StepLog": "step_log",
    "Trace": "trace",
    "graph_of": "layered_costs",
    "load_program": "files",
    "lower": "lowering",
    "lower_bound": "bounds",
    "partition": "partitioner",
    "probe_links": "link_probe",
    "probe_overheads": "overhead_probe",
    "profile": "profiling",
    "schedule": "order",
    "simulate": "simulator",
    "tune": "tuning",
    "validate": "validation",
}
_PACKAGES = ("errors", "schedules", "testing", "viz")

__all__ = [*_HOME, *_PACKAGES]  # noqa: PLE0604
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
