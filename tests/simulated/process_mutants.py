"""Deletes one wait, event or mark of memory at a time from the code that connects processes (see `mutants.py`).

python -m tests.simulated.process_mutants [NUMBER ...]
"""

import sys
from functools import partial

from tests.simulated.mutants import Mutant, show

__all__ = ["MUTANTS"]

_mutant = partial(Mutant, module="compare_processes")
_CHANNELS = "pipesched/runtime/transport/device_channels.py"
_HOST = "pipesched/runtime/transport/host_copies.py"
_PROCESSES = "pipesched/runtime/executors/processes.py"
_LANE = "pipesched/runtime/reductions/collective_lane.py"
_SUMS = "pipesched/runtime/reductions/replica_sum.py"
_WEIGHTS = "pipesched/runtime/stage/divided_weights.py"
_UPDATE = "pipesched/runtime/stage/sharded_update.py"
_TRANSFER = "pipesched/elastic/state_transfer.py"
_BUCKETS = "pipesched/runtime/gradients/buckets.py"

MUTANTS = [
    _mutant(
        _CHANNELS,
        "        work.wait()  # makes the current stream wait, not the host\n",
        "",
        ("one f one b",),
    ),
    _mutant(_CHANNELS, "        memory.record_stream(user)\n", "", ("one f one b", "interleaved")),
    _mutant(
        _CHANNELS,
        "        memory.record_stream(self._arrivals.caller)\n",
        "",
        ("outputs that were received",),
    ),
    _mutant(
        _CHANNELS,
        "        self._arrivals.caller = current_stream(self.device)\n",
        "        return\n",
        ("outputs that were received",),
    ),
    _mutant(
        _CHANNELS,
        "        while self._sent and self._sent[0].sending.is_completed():\n",
        "        while self._sent:\n",
        ("one f one b", "layers offloaded"),
    ),
    _mutant(_CHANNELS, "            self._last.wait()\n", "", ("one f one b",)),
    _mutant(
        _CHANNELS, "            current_stream(self._device).synchronize()\n", "", ("one f one b", "a failed step")
    ),
    _mutant(_PROCESSES, "        self._streams.follow()\n", "", ("optimizer and clipping of the caller",)),
    _mutant(_PROCESSES, "            self._streams.end()\n", "            pass\n", ("pipedream", "one f one b")),
    _mutant(_LANE, "        stream.wait_event(begun)\n", "", ("replicas with zero 0",)),
    _mutant(
        _LANE,
        "            current_stream(self._device).wait_event(self.span[1])\n",
        "            pass\n",
        ("replicas with zero 0",),
    ),
    _mutant(
        _SUMS,
        "        used_here(buffer)  # may be freed here, on another stream than its own\n",
        "",
        ("replicas with zero 2", "scatter_is_dropped"),
    ),
    _mutant(
        _SUMS,
        "        used_here(buffer)  # a failed step frees it without waiting\n",
        "",
        ("sum_is_dropped",),
    ),
    _mutant(
        _SUMS,
        "            used_here(tensor)  # a failed step frees it without waiting\n",
        "            pass\n",
        ("rows_are_dropped",),
    ),
    _mutant(
        _WEIGHTS,
        "            ticket.wait(self._spread.check)\n",
        "            pass\n",
        ("replicas with zero 3",),
    ),
    _mutant(
        "pipesched/runtime/gradients/divided_copies.py",
        "            used_here(buffer)  # another stream may have allocated it\n",
        "",
        ("delivered_sum_is_dropped",),
    ),
    _mutant(
        _UPDATE,
        "            ticket.wait(self._spread.check)\n",
        "            pass\n",
        ("weights of replicas read after a step",),
    ),
    _mutant(_BUCKETS, "            ticket.wait(self._sums.check)\n", "            pass\n", ("replicas with zero 0",)),
    _mutant(
        _TRANSFER,
        "                given.setdefault(message.target, []).append(self._own(message.key, message.rows))\n",
        "                sent = self._own(message.key, message.rows).to('cpu', non_blocking=True)\n"
        "                given.setdefault(message.target, []).append(sent)\n",
        ("replanned with the optimizer of the caller",),
    ),
    _mutant(
        "pipesched/tensors/meta_tensors.py",
        "                used_here(tensor.detach())  # another stream may have allocated it\n",
        "",
        ("weights_are_put_away",),
    ),
    _mutant(_HOST, "            parcel.ready.synchronize()\n", "", ("one f one b",)),
    _mutant(
        "pipesched/runtime/step_call.py",
        "                used_here(loss)  # a rank's stream has allocated it\n",
        "                pass\n",
        ("steps on streams of their own",),
    ),
    _mutant(
        "pipesched/parallel/tensor_group.py",
        "                work.wait()\n                return\n",
        "                return\n",
        ("layers split",),
    ),
]

if __name__ == "__main__":
    show(MUTANTS, [int(number) for number in sys.argv[1:]])
