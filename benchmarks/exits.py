"""Exits: checks the exit code and the stderr output of processes that end while their pipelines are open.

    python benchmarks/exits.py [--quick] [--runs 2]

Each case is a script that trains, leaves its pipelines open, and ends: after its last line, with or without
``destroy_process_group()``, with an exception, with ``sys.exit(3)``, after a single step whose loss nobody reads,
while a daemon thread makes steps, after joining such a thread, or with a ``__del__`` that closes the pipelines. It
runs in one process, in processes with torchrun's environment (the store is in rank 0), and under torchrun. With an
asynchronous schedule, steps are still running at the end. A case is correct if the process has the script's own exit
code and prints nothing on stderr except the script's own traceback. --quick runs fewer cases, once each.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from measure import machine

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.jobs.exits import ENDS, OF_THREADS
from tests.support.run_exits import Exit, exits

PLACES = {"threads": "one process", "mesh": "2 processes", "torchrun": "torchrun, 2 ranks"}
SCHEDULES = ("1f1b", "pipedream")


def cases(quick: bool) -> Iterator[tuple[str, str, str]]:
    """Yield (place, schedule, way to end) for each case."""
    for place in PLACES:
        for schedule in SCHEDULES:
            for end in ENDS:
                if place == "threads" and end == "destroy_process_group":
                    continue
                if not quick or (schedule == "pipedream" and end in ("end of the script", "sys.exit(3)")):
                    yield place, schedule, end


def is_right(place: str, end: str, one: Exit) -> bool:
    """Return whether a case ended correctly. torchrun exits with 1 if a rank fails, and may stop the other ranks."""
    if end in OF_THREADS and place != "threads":
        return one.code == 0 and one.ran  # the thread of one rank may print that the other rank has left
    if place == "torchrun":
        stopped = set(one.said.split()) <= {"-15"} if ENDS[end] else not one.said
        return one.code == int(ENDS[end] != 0) and stopped
    return one == Exit(ENDS[end], True, "")


def main() -> None:
    """Run all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs", type=int, default=2)
    args = parser.parse_args()
    rows: dict[tuple[str, str], list[int]] = {}
    wrong = []
    for place, schedule, end in cases(args.quick):
        row = rows.setdefault((place, schedule), [0, 0, 0])
        for _ in range(1 if args.quick else args.runs):
            for one in exits(place, schedule, end):
                row[0] += 2 if place == "torchrun" else 1
                row[1] += one.code == -6 or "-6" in one.said.split()
                if not is_right(place, end, one):
                    row[2] += 1
                    wrong.append(f"{place}, {schedule}, {end}: {one}")
    print(
        f"{machine()}\n\n| where | schedule | processes | aborted | wrong exit code or output |\n|---|---|---|---|---|"
    )
    for (place, schedule), numbers in rows.items():
        print(f"| {PLACES[place]} | {schedule} |", " | ".join(map(str, numbers)), "|")
    total = [sum(numbers) for numbers in zip(*rows.values(), strict=True)]
    print("| all | |", " | ".join(map(str, total)), "|")
    print("\n".join(wrong))


if __name__ == "__main__":
    main()
