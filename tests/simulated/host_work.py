"""What a step costs the host: launches, copies, events, waits, allocations and synchronisations, as counts.

    python -m tests.simulated.host_work

Counts the second step of a chain of linear layers over two simulated devices, with the batch on the devices, for some
schedules, and prints a row for each.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from tests.simulated.accelerator import Accelerator, start

__all__ = ["HostWork", "counted_step"]

WIDTH, ROWS, MICROBATCHES = 16, 4, 8
_COLUMNS = ("launches", "copies", "events", "waits", "allocations", "host synchronisations", "hidden synchronisations")


@dataclass(frozen=True)
class HostWork:
    """The work of a step."""

    counts: Counter[str]
    num_actions: int
    #: The number of messages between ranks.
    num_messages: int


def counted_step(accelerator: Accelerator, schedule: str, **options: Any) -> HostWork:
    """Run two steps of a schedule, and return the host's work in the second."""
    from pipesched import Pipeline, schedules

    torch.manual_seed(0)
    num_stages = schedules.get(schedule).program(2, MICROBATCHES).num_weights
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2 * num_stages)))
    x = torch.randn(MICROBATCHES * ROWS, WIDTH)
    y = torch.randint(0, WIDTH, (MICROBATCHES * ROWS,))
    given = {"num_microbatches": MICROBATCHES, "boundaries": [2 * stage for stage in range(1, num_stages)], **options}
    given.setdefault("loss_fn", torch.nn.CrossEntropyLoss())
    with Pipeline(model, x[:ROWS], schedule=schedule, devices=["sim:0", "sim:1"], **given) as pipe:
        x = x.to("sim:0")
        y = y.to(next(parameter.device for parameter in model[-1].parameters()))
        pipe.step(x, target=y)
        accelerator.judge.host_time_s(accelerator.backend.host_thread())  # reads the log
        accelerator.judge.counts.clear()
        pipe.step(x, target=y)
        accelerator.judge.host_time_s(accelerator.backend.host_thread())
        counts = Counter(accelerator.judge.counts)
        spans = [span.action.kind.value for span in pipe.trace.spans]
    return HostWork(counts, len(spans), sum(kind.startswith("SEND") for kind in spans))


def main() -> None:
    """Print a row for each schedule."""
    accelerator = start()
    torch.set_num_threads(1)
    print(
        f"{'schedule':18}{'actions':>8}{'messages':>9}{''.join(f'{column:>{len(column) + 2}}' for column in _COLUMNS)}"
    )
    for schedule in ("gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zb-v"):
        work = counted_step(accelerator, schedule)
        counts = "".join(f"{work.counts[column]:{len(column) + 2}}" for column in _COLUMNS)
        print(f"{schedule:18}{work.num_actions:8}{work.num_messages:9}{counts}")


if __name__ == "__main__":
    main()
