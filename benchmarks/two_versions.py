"""Two versions: compares the step times of this version of pipesched and of another one, for its overhead.

    git worktree add ../before COMMIT
    python benchmarks/two_versions.py ../before [--pairs 25] [--cases empty one-rank mesh tiny] [--schedules 1f1b ...]

Each version runs in its own process, and the two run in turn (A B A B ...). A version runs five steps in a turn, and
their median counts. New processes start after every fifth pair, because a step of one process can take 2 % longer than
that of another one. The script prints the median of the paired ratios this / other with a 95 % bootstrap interval.

Cases: "empty" is the step of overhead.py with one rank, "empty-2" with two: stages that compute nothing. "one-rank" and
"mesh" are the steps of versus_torch.py --one-rank, with devices= and with mesh=. "tiny" is that of versus_torch.py
--tiny: two gloo ranks and layers of width 8. For one process, processor time counts; for two, the time of the slower.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import torch
from measure import Ratio, Served, machine, ratio, serve_turns, slowest_s
from overhead import Case
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from versus_torch import NAMES, blocks, processor_seconds

from pipesched import Pipeline

CASES = ("empty", "empty-2", "one-rank", "mesh", "tiny")
STEPS = 5  #: steps in a turn
TURNS = 5  #: turns of a process


def empty(schedule: str, num_ranks: int) -> Callable[[], float]:
    """Return a function that runs a step with empty stages, and returns its seconds."""
    case = Case(schedule, num_ranks, 64)
    return (lambda: processor_seconds(case.whole_step)) if num_ranks == 1 else case.whole_step


def trained(case: str, schedule: str, open_pipes: ExitStack) -> Callable[[], float]:
    """Return a function that trains layers of width 8 for a step, and returns its seconds."""
    chunks, num_ranks = NAMES[schedule][1], distributed.get_world_size()
    model = blocks(tiny=True) if case == "tiny" else nn.Sequential(*(nn.Linear(8, 8) for _ in range(chunks)))
    x, y = torch.randn(64, 8), torch.randn(64, 8)
    num_stages = num_ranks * chunks
    pipe = open_pipes.enter_context(
        Pipeline(
            model,
            x[:1],
            loss_fn=functional.mse_loss,
            schedule=schedule,
            num_microbatches=64,
            boundaries=[len(model) * stage // num_stages for stage in range(1, num_stages)],
            **({"devices": ["cpu"]} if case == "one-rank" else {"mesh": init_device_mesh("cpu", (num_ranks,))}),
        )
    )

    def step() -> None:
        pipe.step(x, target=y)

    return (lambda: slowest_s(step)) if case == "tiny" else (lambda: processor_seconds(step))


@contextmanager
def turns(rank: int, case: str, schedule: str) -> Iterator[Callable[[], float]]:
    """Yield a function that runs STEPS steps of a case, and returns the median of their seconds."""
    with ExitStack() as open_pipes:
        ranks_of_empty = {"empty": 1, "empty-2": 2}.get(case)
        step = empty(schedule, ranks_of_empty) if ranks_of_empty else trained(case, schedule, open_pipes)
        yield lambda: median(step() for _ in range(STEPS))


def compared(other: Path, case: str, schedule: str, pairs: int) -> Ratio:
    """Return the ratios of the step times of this checkout to those of another one."""
    runs: list[tuple[float, float]] = []
    while len(runs) < pairs:
        checkouts = Path(__file__).parent.parent, other
        this, that = (Served(checkout, __file__, "--serve", case, schedule) for checkout in checkouts)
        this.turn(), that.turn()  # a warm-up
        runs += [(this.turn()[0], that.turn()[0]) for _ in range(min(TURNS, pairs - len(runs)))]
        this.close(), that.close()
    return ratio(*zip(*runs, strict=True))


def main() -> None:
    """Print one line for each case and schedule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, nargs="?", help="a checkout of the other version")
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--schedules", nargs="+", default=list(NAMES), choices=list(NAMES))
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        case, schedule = arguments.serve
        serve_turns(2 if case == "tiny" else 1, turns, case, schedule)
        return
    if arguments.other is None:
        parser.error("give the folder of a checkout of the other version")
    print(machine())
    print(f"{'case':<10}{'schedule':<18}{'this / other':>22}{'this ms':>10}{'other ms':>10}")
    for case in arguments.cases:
        for schedule in arguments.schedules:
            found = compared(arguments.other, case, schedule, arguments.pairs)
            times = f"{found.first * 1e3:>10.2f}{found.second * 1e3:>10.2f}"
            print(f"{case:<10}{schedule:<18}{found!s:>22}{times}", flush=True)


if __name__ == "__main__":
    main()
