"""Capturing: collects the part of a run that this process saves."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pipesched.checks import shown
from pipesched.errors import CheckpointError
from pipesched.progress import advance
from pipesched.saving.collective_work import agreed, in_all
from pipesched.saving.common_values import encode
from pipesched.saving.extra_states import as_extra, capture_extra, encoded_extra
from pipesched.saving.live_run import LiveRun
from pipesched.saving.optimizer_states import GivenOptimizers, as_optimizers, capture_optimizers
from pipesched.saving.replica_states import check_equal_planes, check_equal_states
from pipesched.saving.saved_run import CheckpointPart
from pipesched.saving.scheduler_states import as_schedulers, capture_schedulers, encoded_schedulers
from pipesched.saving.split_states import whole_part
from pipesched.saving.tensor_files import plain

__all__ = ["capture", "captured", "captured_here"]


def capture(
    run: LiveRun, optimizer: GivenOptimizers | None, scheduler: Any, extra: Mapping[str, Any] | None
) -> CheckpointPart:
    """Return the part of a run that this process saves. Collective.

    Replica 0 saves the state that all replicas hold; each replica saves the state that only it holds. The processes of
    the first plane write whole tensors, which they make together with those of the other planes.

    The tensors in the part share memory with the run's tensors.

    Raises:
        CheckpointError: a value cannot be saved, or differs between replicas or planes; the error names the value.
        InputError: an argument is invalid.

    """
    part, divided = captured(run, optimizer, scheduler, extra)
    own = divided if run.replica else part.joined(divided)
    if run.split is None:
        return own
    whole = agreed(run.host, lambda: whole_part(own, run))
    check_equal_planes(whole, run.host)
    return whole


def captured(
    run: LiveRun, optimizer: GivenOptimizers | None, scheduler: Any, extra: Mapping[str, Any] | None
) -> tuple[CheckpointPart, CheckpointPart]:
    """Return this process's part of the state that all replicas hold, and the state that only its replica holds.

    Collective. Raises the same errors as ``capture``.
    """

    def own() -> Any:
        parts = captured_here(run, optimizer)
        return *parts, encoded_schedulers(as_schedulers(scheduler, run)), encoded_extra(as_extra(extra), run)

    part, divided, schedulers, extras = in_all(run.host, own)
    capture_schedulers(part, schedulers, run)
    capture_extra(part, extras, run)
    check_equal_states(part, run.host)
    return part, divided


def captured_here(run: LiveRun, optimizer: GivenOptimizers | None = None) -> tuple[CheckpointPart, CheckpointPart]:
    """Return the parts of ``captured`` without schedulers and extra values. Not collective."""
    part, divided = CheckpointPart(), CheckpointPart()
    for name, parameter in run.parameters.items():
        _capture_parameter(part, divided, name, parameter, run)
    for name, tensor in run.buffers.items():
        part.add("buffer", name, {f"buffer/{name}": plain(tensor, f"buffer {name!r}")})
    for name, module in run.modules.items():
        encoded = encode(module.get_extra_state(), f"module/{name}")
        part.add("module state", name, encoded.tensors)
        part.values.setdefault("modules", {})[name] = encoded.value
        advance()
    if run.scaler is not None and run.rank == 0:
        part.values["scaler"] = _plain_state(run.scaler.state_dict())
    capture_optimizers(part, divided, as_optimizers(optimizer, run), run)
    return part, divided


def _capture_parameter(
    part: CheckpointPart, divided: CheckpointPart, name: str, parameter: Tensor, run: LiveRun
) -> None:
    """Add a parameter to ``part`` or, if the replicas divide it, add the rows of this process to ``divided``."""
    tensors = {f"parameter/{name}": plain(parameter, f"parameter {name!r}")}
    held = run.divided_weights.get(name)
    if held is None:
        part.add("parameter", name, tensors)
    elif held.rows is not None:
        divided.add_rows("parameter", name, tensors, held.rows, run.shapes[name][0])
    elif held.is_here:
        divided.add("parameter", name, tensors)


def _plain_state(state: Mapping[str, Any]) -> Any:
    """Return the state of a scaler. Raises CheckpointError if it holds more than plain values."""
    encoded = encode(dict(state), "scaler").value
    if encoded != {"dict": state}:
        raise CheckpointError(
            f"the state of a scaler must hold only plain values, with strings as keys; got {shown(dict(state))}; pass "
            f"the scaler in extra= instead"
        )
    return encoded["dict"]
