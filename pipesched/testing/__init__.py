"""Tools for tests of schedules and pipelines. ``reference_step`` computes the results that every pipeline must give."""

from pipesched.reference.reference_step import reference_step
from pipesched.testing.fake_executor import FakeStage
from pipesched.testing.gradient_clipping import clip_grad_norm_
from pipesched.testing.memory_meter import MemoryMeter
from pipesched.testing.schedule_checks import check_schedule, run_fake

__all__ = ["FakeStage", "MemoryMeter", "check_schedule", "clip_grad_norm_", "reference_step", "run_fake"]
