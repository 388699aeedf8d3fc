"""Faults: makes one rank fail, and checks that the other ranks end in time, with errors that name this rank.

    python benchmarks/faults.py [--quick] [--timeout 5] [--side-by-side 1] [--only EXPRESSION] [--every N]

Every fault is injected in every part of a script. One setup has a pipeline of 3 ranks, and every fault hits every rank.
The other setups have 2 replicas of 2 ranks, and each fault hits only one rank, a different one in turn. Either FSDP2's
``fully_shard`` divides the weights of each stage over the replicas, or pipesched itself runs the replicas, with
undivided states ("replicate") or divided ones (zero=2, zero=3). Two more setups keep copies of the ranks' states
("redundancy"), in 3 ranks or in 2 replicas of 2 ranks. The store of the process group is in a separate process
or in rank 0.

A survivor is late if it has neither raised an error nor ended within the timeout plus 5 s. A survivor's error is right
if it names only the failing rank. --quick runs a few cases of each setup; --side-by-side sets the number of cases that
run at the same time; --only runs the cases whose description matches a regular expression; --every runs only every
Nth of them.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from measure import machine

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.jobs.faults import FAULTS, PHASES, SAVING, STORES, Case, can_happen
from tests.support.run_faults import Outcome, outcomes


def _ranks(num_ranks: int, replicas: int, by: str) -> str:
    if replicas > 1:
        return f"{replicas}x{num_ranks // replicas}, {by}"
    return f"{num_ranks} ranks, {by}" if by == "redundancy" else f"{num_ranks} ranks"


WHOLE = ("replicate", "redundancy")  # all replicas have the same states, which replica 0 writes

LAYOUTS = {
    (store, num_ranks, replicas, by): f"{_ranks(num_ranks, replicas, by)}; store {place}"
    for num_ranks, replicas, by in (
        (3, 1, "fully_shard"),
        *((4, 2, by) for by in ("fully_shard", "replicate", "zero=2", "zero=3", "redundancy")),
        (3, 1, "redundancy"),
    )
    for store, place in zip(STORES, ("in a separate process", "in rank 0"), strict=True)
    if by in ("fully_shard", "zero=3") or store == STORES[0]
}


def cases(quick: bool) -> Iterator[Case]:
    """Yield the cases.

    With 3 ranks, every fault hits every rank in every part of the script. With 2 replicas of 2 ranks, a fault hits one
    rank in each part, and the ranks take turns. ``quick``: yield only a few of these cases.
    """
    for store, num_ranks, replicas, by in LAYOUTS:
        for turn, (fault, phase) in enumerate((fault, phase) for phase in PHASES for fault in FAULTS):
            writing = num_ranks // replicas if phase in SAVING and by in WHOLE else num_ranks  # replica 0 writes
            ranks = [(turn + turn // len(FAULTS)) % writing] if replicas > 1 or quick else range(num_ranks)
            made = [Case(fault, phase, rank, store, num_ranks, replicas, by) for rank in ranks]
            if not quick or turn % 13 == 0:
                yield from filter(can_happen, made)


def main() -> None:
    """Run all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--timeout", type=float, default=5.0)
    parser.add_argument("--side-by-side", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--every", type=int, default=1)
    args = parser.parse_args()
    chosen = [case for case in cases(args.quick) if re.search(args.only, str(case))][:: args.every]
    results = outcomes(chosen, args.timeout, args.side_by_side, patience_s=120.0 * (1 + len(chosen)))
    print(f"{machine()}; timeout {args.timeout:g} s\n")
    print(
        "| where | faults | errors of survivors | late survivors | slowest, s | errors that name the failed rank |\n"
        "|---|---|---|---|---|---|"
    )
    for layout, text in LAYOUTS.items():
        own = [one for one in results if one.case[3:] == layout]
        if own:
            print(row(text, own))
    print(row("all", results))
    for one in results:
        if not one.happened or one.late or one.wrong:
            print(f"\n{one.case}: happened: {one.happened}; {one.seconds} s; late: {one.late}; wrong: {one.wrong}")


def row(text: str, own: list[Outcome]) -> str:
    """Return a row of the table for some of the cases."""
    failed = sum(one.survivors for one in own)
    late, wrong = sum(len(one.late) for one in own), sum(len(one.wrong) for one in own)
    named = f"{failed - wrong} of {failed}, {(failed - wrong) / max(1, failed):.1%}"
    return f"| {text} | {len(own)} | {failed} | {late} | {max(one.seconds for one in own):.1f} | {named} |"


if __name__ == "__main__":
    main()
