"""Losses: a rank is lost in every way and at every moment, and the other ranks go on with the same results.

    python benchmarks/losses.py [--only EXPRESSION] [--timeout 5] [--side-by-side 1] [--cables] [--several]

A pipeline of 4 ranks trains with ``redundancy="neighbour"`` and ``on_failure="recover"``. The rank that is lost is
killed, frozen, ends, raises an error, or loses its link to the next rank; in a forward, a backward, a weight gradient
or an update, while a copy is sent, between two steps, or during a replan or a save. Every rank is lost in turn. Rank 0
hosts the store of torch's default group.

A case is right if all survivors have run all steps, with losses bit-identical to those of a run that lost nobody; if
they noticed a rank that ended within 0.5 s, and a rank that is frozen or cut off within the timeout and 3 s; and if the
lost call has run again within the time of a step and 1 s. A frozen rank wakes once the others have gone on. It must end
with an error that says so, and must have written nothing.

Prints each case as a line of JSON, and then a table. --only runs the cases whose description matches a regular
expression; --side-by-side sets the number of cases that run at the same time. --cables puts each rank on a host of its
own (network namespaces, which need root), and cuts cables instead. --several loses two ranks of a run, or one of few.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from measure import machine

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.jobs.losses import IN_RECOVERY, MOMENTS, LossCase
from tests.support.run_losses import LossOutcome, outcomes

FAULTS = ("SIGKILL", "SIGSTOP", "sys.exit(3)", "os._exit(0)", "raise", "link", "link, alarms too")
CABLES = ("cable", "all cables")


def cases(faults: Sequence[str]) -> Iterator[LossCase]:
    """Yield each fault at each moment on each rank. Rank 0 hosts the store; for some cases as ``env://`` starts it."""
    for fault in faults:
        for turn, moment in enumerate(MOMENTS):
            for rank in range(4):
                store = "env://" if (turn + rank) % 4 == 0 and fault not in CABLES else "rank 0"
                yield LossCase(fault, moment, rank, store)


def several() -> Iterator[LossCase]:
    """Yield cases in which two ranks are lost, or one of two, or one of several replicas."""
    for fault in ("SIGKILL", "SIGSTOP"):
        at_once = "between steps"
        pairs = ((1, 3), (1, 2)) if fault == "SIGSTOP" else ((0, 2), (1, 3), (1, 2), (3, 0))  # 0 and 2 go on once awake
        yield from (LossCase(fault, at_once, a, "rank 0", b, at_once) for a, b in pairs)
        for moment in ("F", "update", "between steps"):
            yield from (LossCase(fault, moment, rank, num_ranks=2) for rank in range(2))
        for moment in IN_RECOVERY:
            yield from (LossCase(fault, "B", a, "rank 0", b, moment) for a, b in ((1, 3), (2, 0), (0, 2)))
        for moment in ("F", "update", "copy", "between steps", "save"):
            writing = range(2) if moment == "save" else range(4)  # replica 0 writes
            yield from (LossCase(fault, moment, rank, replicas=2) for rank in writing)


def main() -> None:
    """Run all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--timeout", type=float, default=5.0)
    parser.add_argument("--side-by-side", type=int, default=1)
    parser.add_argument("--cables", action="store_true")
    parser.add_argument("--several", action="store_true")
    args = parser.parse_args()
    every = several() if args.several else cases(CABLES if args.cables else FAULTS)
    chosen = [case for case in every if re.search(args.only, str(case))]
    results = []
    for one in outcomes(chosen, args.timeout, args.side_by_side):
        print(json.dumps({**one._asdict(), "case": one.case._asdict()}), flush=True)
        results.append(one)
    print(f"\n{machine()}; timeout {args.timeout:g} s; a step takes {max(one.step_s for one in results):.2f} s\n")
    print(
        "| fault | moment | cases | right | ranks that went on | noticed after, s | repeated after, s |\n"
        "|---|---|---|---|---|---|---|"
    )
    groups: dict[tuple[str, str], list[LossOutcome]] = {}
    for one in results:
        groups.setdefault((one.case.fault, _moment(one.case)), []).append(one)
    for (fault, moment), own in groups.items():
        print(row(fault, moment, own))
    print(row("all", "", results))
    for one in results:
        if one.wrong or one.late:
            print(f"\n{one.case}: {'; '.join(one.wrong + one.late)}")


def _moment(case: LossCase) -> str:
    if case.second is not None:
        near = "its neighbour" if case.is_refused else "another rank"
        return f"{case.moment}; {near} in {case.second_moment}"
    shape = "" if case.replicas == 1 else f"{case.replicas} x {case.num_ranks // case.replicas}, "
    return f"{shape or ('' if case.num_ranks == 4 else f'{case.num_ranks} ranks, ')}{case.moment}"


def row(fault: str, moment: str, own: Sequence[LossOutcome]) -> str:
    """Return a row of the table for some of the cases."""
    right = sum(not one.wrong and not one.late for one in own)
    recovered, expected = sum(one.recovered for one in own), sum(one.expected for one in own)
    noticed, repeated = max(one.noticed_s for one in own), max(one.repeated_s for one in own)
    return f"| {fault} | {moment} | {len(own)} | {right} | {recovered} of {expected} | {noticed:.2f} | {repeated:.2f} |"


if __name__ == "__main__":
    main()
