"""Rehearsal: runs the code between layers of each stage on the sample, before the first step.

Free calls run. All other calls return their recorded results if the stage runs the call or receives the result; else
they return stand-ins, as in a step. So code that cannot run on stand-ins is found while the pipeline is being made.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipesched.capture import replay_errors
from pipesched.capture.replay import Replay, ReplayRun
from pipesched.errors import GraphError
from pipesched.tensors.keyed_random import KeyedRandom
from pipesched.tensors.meta_tensors import look_of

__all__ = ["rehearse"]


def rehearse(replay: Replay, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Run the code of one stage on the sample. Raises GraphError if the code fails because of stand-ins."""
    replay.refresh()
    run = _Rehearsal(replay)
    try:
        run.ended(replay.run_code(run, args, kwargs))
    except GraphError:
        raise
    except Exception as error:
        raise replay_errors.fails_on_stand_ins(replay, run.stand_ins, error) from error


class _Rehearsal(ReplayRun):
    """A run in which all calls except free calls return their recorded results."""

    def __init__(self, replay: Replay) -> None:
        capture = replay.capture
        known = {value for values in replay.part.receives.values() for value in values}
        known.update(value for value in capture.values if value[0] in replay.part.own)
        super().__init__(
            replay,
            {value: capture.values[value] for value in known & capture.values.keys()},
            {value: look_of(capture.values[value]) for value in capture.looked_at & capture.values.keys()},
            {},
            _no_layer,
            KeyedRandom(replay.device),
        )
        self._runs = replay.part.runs & capture.free

    def device_of(self, stand_in: Tensor) -> torch.device:
        _, value = self.stand_ins.get(id(stand_in), (None, None))
        known = self._replay.capture.values.get(value, stand_in) if value is not None else stand_in
        return torch.device("cpu") if known.is_meta else known.device

    def lost(self, now: str) -> GraphError:
        self._error = replay_errors.other_calls_again(self._replay, self._position, now)
        return self._error


def _no_layer(*_: Any) -> Any:
    raise AssertionError("a rehearsal calls no layer")
