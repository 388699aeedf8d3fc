"""pipesched: a pipeline-parallel scheduling runtime for PyTorch.

::

    import pipesched

    pipe = pipesched.Pipeline(model, sample, loss_fn=loss_fn, devices=["cuda:0", "cuda:1"])
    loss = pipe.step(x, target=y)  # runs every forward and backward; the gradients are in .grad

To train a model: `Pipeline`, with the options `Search`, `Numerics` and `Distributed`. To log steps: `StepLog`.
To add a loss inside a layer: `add_loss`. To pass micro-batches that you have cut yourself: `Microbatch`.
To plan: `profile`, `tune`, `tune_profile`, `partition`. To study schedules: `schedules`, `simulate`, `validate`,
`lower_bound`, `viz`.
To simulate losses of ranks: `fleet`.
To write a schedule: `schedule`, `Order`, `Shape`.

Each of these packages imports only from the packages above it:

    errors, units, checks       errors, text for numbers with units, argument checks
    program, order, schedules   schedules as lists of actions; one file per schedule
    simulation, viz             predicted time and memory; pictures
    partitioning, planning      division of layers into stages; search for a plan
    fleet                       what losses and returns of ranks cost, simulated
    ---- the packages below import torch ----
    tensors, model, capture     turn an nn.Module into layers and stages
    parallel                    layers that several ranks divide among themselves
    runtime                     stages, executors, transport
    profiling, saving           measured costs; checkpoints
    pipeline                    Pipeline and tune
    testing, launcher, cli      helpers for tests; the processes of `pipesched run`; the command line

pipesched imports each name on first use, so you can study schedules without torch.
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipesched import errors as errors
    from pipesched import fleet as fleet
    from pipesched import schedules as schedules
    from pipesched import testing as testing
    from pipesched import viz as viz
    from pipesched.partitioning.partition import Partition as Partition
    from pipesched.partitioning.partition import partition as partition
    from pipesched.pipeline.options import Distributed as Distributed
    from pipesched.pipeline.options import Numerics as Numerics
    from pipesched.pipeline.options import Search as Search
    from pipesched.pipeline.pipeline import Pipeline as Pipeline
    from pipesched.pipeline.step_log import StepLog as StepLog
    from pipesched.pipeline.tune import tune as tune
    from pipesched.planning.plan import Plan as Plan
    from pipesched.planning.report.report import Report as Report
    from pipesched.planning.tune_profile import tune_profile as tune_profile
    from pipesched.profiling.layered_costs import graph_of as graph_of
    from pipesched.profiling.link_probe import probe_links as probe_links
    from pipesched.profiling.overhead_probe import probe_overheads as probe_overheads
    from pipesched.profiling.profile_model import profile as profile
    from pipesched.program.actions import Action as Action
    from pipesched.program.actions import Kind as Kind
    from pipesched.program.loading import load_program as load_program
    from pipesched.program.lowering import lower as lower
    from pipesched.program.order import Order as Order
    from pipesched.program.order import Schedule as Schedule
    from pipesched.program.order import Shape as Shape
    from pipesched.program.order import schedule as schedule
    from pipesched.program.program import Program as Program
    from pipesched.program.validation import validate as validate
    from pipesched.runtime.microbatches import Microbatch as Microbatch
    from pipesched.runtime.stage.master_weights import with_master_weights as with_master_weights
    from pipesched.simulation.bounds import lower_bound as lower_bound
    from pipesched.simulation.costs import Costs as Costs
    from pipesched.simulation.links import Link as Link
    from pipesched.simulation.links import Links as Links
    from pipesched.simulation.profile import Profile as Profile
    from pipesched.simulation.simulator import simulate as simulate
    from pipesched.simulation.trace import Span as Span
    from pipesched.simulation.trace import Trace as Trace
    from pipesched.tensors.added_losses import add_loss as add_loss
    from pipesched.tensors.added_losses import collect_losses as collect_losses

_HOME = {
    "Action": "program.actions",
    "Costs": "simulation.costs",
    "Distributed": "pipeline.options",
    "Kind": "program.actions",
    "Link": "simulation.links",
    "Links": "simulation.links",
    "Microbatch": "runtime.microbatches",
    "Numerics": "pipeline.options",
    "Order": "program.order",
    "Partition": "partitioning.partition",
    "Pipeline": "pipeline.pipeline",
    "Plan": "planning.plan",
    "Profile": "simulation.profile",
    "Program": "program.program",
    "Report": "planning.report.report",
    "Schedule": "program.order",
    "Search": "pipeline.options",
    "Shape": "program.order",
    "Span": "simulation.trace",
    "StepLog": "pipeline.step_log",
    "Trace": "simulation.trace",
    "add_loss": "tensors.added_losses",
    "collect_losses": "tensors.added_losses",
    "graph_of": "profiling.layered_costs",
    "load_program": "program.loading",
    "lower": "program.lowering",
    "lower_bound": "simulation.bounds",
    "partition": "partitioning.partition",
    "probe_links": "profiling.link_probe",
    "probe_overheads": "profiling.overhead_probe",
    "profile": "profiling.profile_model",
    "schedule": "program.order",
    "simulate": "simulation.simulator",
    "tune": "pipeline.tune",
    "tune_profile": "planning.tune_profile",
    "validate": "program.validation",
    "with_master_weights": "runtime.stage.master_weights",
}
_PACKAGES = ("errors", "fleet", "schedules", "testing", "viz")

__all__ = [*_HOME, *_PACKAGES]  # noqa: PLE0604
__version__ = "0.1.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())  # no output unless the user configures logging


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
