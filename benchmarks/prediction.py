"""Prediction: compares step times predicted from a saved profile with measured step times.

    python benchmarks/prediction.py [--file FILE] [--steps 21] [--only profile threads processes sleeping]

"profile" measures, in a separate process, the layers of three models (a GPT, residual convolutions, a wide perceptron)
and of one model that sleeps, and the overheads of ranks as threads and as processes. Each model is measured three
times, in turn, and the measurement with the median layer time is used. All measurements are written to FILE as JSON.

The other parts read FILE in separate processes, predict, and run: 24 cases of 2 ranks that compute (3 models, 4
schedules with 2 or 4 stages, and 4 or 8 micro-batches), with ranks as threads and as processes; and 8 and 16 ranks
whose stages sleep. The prediction of a step never uses a measurement of this step.

Cases run in turn, a third of their steps at a time. A step is used if the ranks' threads spent at most 10 % of its time
waiting for cores that other work used, according to Linux's statistics. (Sleeping ranks are exempt, because there are
more of them than cores.) Other steps are repeated and counted as "again". The script prints the predicted makespan; the
median, fastest and slowest measured makespan on the common clock of the ranks; the error; and the error of a prediction
from layer times alone. The last lines show the median and the largest error.

All processes keep freed memory, unless --trim is given. Otherwise page faults, caused by returning memory to the system
and requesting it again, take 2 to 15 % of a step here, and vary from run to run of the same program.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from measure import elsewhere, in_ranks, keep_freed_memory, machine
from sleeping import ROWS as SLEEPING_ROWS
from sleeping import SECONDS, WIDTH, wake_in_time
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import pipesched
from pipesched import Costs, Pipeline, Program, partition, schedules, simulate
from pipesched.profiling.overhead_probe import waited_s
from pipesched.simulation.overheads import Machine, Overheads, RanksAre
from pipesched.simulation.profile import Profile

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.sleeping_layers import Waiting

ROWS, RANKS, DISTURBED = 32, 2, 0.1
PROFILES = 3
TURNS = 3


class Tokens(nn.Module):
    """Token embeddings plus position embeddings."""

    def __init__(self, vocabulary: int, width: int, length: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))


class Residual(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm = nn.GroupNorm(4, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(functional.relu(self.norm(self.first(x))))


def gpt() -> nn.Sequential:
    """Return a GPT of eight blocks and a head over a vocabulary."""
    options = {"dropout": 0.0, "batch_first": True, "norm_first": True, "activation": "gelu"}
    blocks = [nn.TransformerEncoderLayer(256, 4, 1024, **options) for _ in range(8)]
    return nn.Sequential(Tokens(2048, 256, 64), *blocks, nn.LayerNorm(256), nn.Linear(256, 2048))


def convolutions() -> nn.Sequential:
    """Return a chain of residual convolution blocks."""
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *(Residual(32) for _ in range(8)), nn.Conv2d(32, 8, 1))


def perceptron() -> nn.Sequential:
    """Return wide linear layers with activations between them."""
    return nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(768, 768), nn.GELU(), nn.LayerNorm(768))))


MODELS: dict[str, tuple[Callable[[], nn.Sequential], Callable[[int], Tensor]]] = {
    "gpt": (gpt, lambda rows: torch.randint(2048, (rows, 64))),
    "convolutions": (convolutions, lambda rows: torch.randn(rows, 3, 24, 24)),
    "perceptron": (perceptron, lambda rows: torch.randn(rows, 16, 768)),
}
CHUNKS = {"interleaved-1f1b": 2, "zb-v": 2}


class Case(NamedTuple):
    """A model, a schedule, and the sizes of a run. In the sleeping model each stage is one layer."""

    model: str
    schedule: str
    ranks: int
    microbatches: int
    rows: int

    @property
    def key(self) -> str:
        """The name of the profile that predicts this case."""
        return f"{self.model} on {self.ranks}"

    @property
    def program(self) -> Program:
        """The program of this case."""
        return schedules.get(self.schedule).program(self.ranks, self.microbatches)

    @property
    def parts(self) -> tuple[nn.Sequential, Tensor, Tensor]:
        """The model, its inputs and targets."""
        torch.manual_seed(0)
        if self.model == "sleeping":
            x, y = torch.randn(2, self.rows * self.microbatches, WIDTH)
            return nn.Sequential(*(Waiting(SECONDS, width=WIDTH) for _ in range(self.program.num_stages))), x, y
        make, sample = MODELS[self.model]
        model, x = make(), sample(self.rows * self.microbatches)
        with torch.no_grad():
            return model, x, torch.randn_like(model(x))

    def stages(self, profile: Profile) -> list[list[str]]:
        """Return the names of the layers of each stage, as `pipesched.partition` cuts them by the profile."""
        if self.model == "sleeping":
            return [[str(stage)] for stage in range(self.program.num_stages)]
        return [list(names) for names in partition(profile.graph(self.rows), self.program.num_stages).stages]


COMPUTING = [
    Case(model, schedule, RANKS, count, ROWS // count)
    for model in MODELS
    for schedule in ("gpipe", "1f1b", "interleaved-1f1b", "zb-v")
    for count in (4, 8)
]
SLEEPING = [
    Case("sleeping", schedule, ranks, 2 * ranks, SLEEPING_ROWS)
    for ranks in (8, 16)
    for schedule in ("1f1b", "interleaved-1f1b", "zb-v")
]


# ---- profiles ------------------------------------------------------------------------------------------------------


def probed(rank: int, ranks: int) -> Overheads:
    """Measure the overheads of ``ranks`` processes. Runs on each rank."""
    wake_in_time()
    return pipesched.probe_overheads(mesh=init_device_mesh("cpu", (ranks,)))


def write_profiles(path: Path, models: Sequence[str], processes: dict[int, Overheads]) -> None:
    """Measure these models, and the machine's overheads for these numbers of ranks; write both to ``path``."""
    torch.set_num_threads(1)
    wake_in_time()
    machines = {}
    for ranks, own in processes.items():
        both = machines[ranks] = Machine("cpu", None, pipesched.probe_overheads(devices=["cpu"] * ranks), own)
        for name in ("threads", "processes"):
            print(f"overheads of {ranks} {name}: {json.dumps(both.to_dict()[name])}", flush=True)
    found: dict[str, list[Profile]] = {}
    for _ in range(PROFILES):
        for name in models:
            cases = [case for case in COMPUTING + SLEEPING if case.model == name]
            model, x, y = cases[0].parts
            rows = sorted({case.rows for case in cases})
            one = pipesched.profile(model, x[: rows[-1]], loss_fn=functional.mse_loss, target=y[: rows[-1]], rows=rows)
            found.setdefault(name, []).append(one)
    saved = {}
    for case in (case for case in COMPUTING + SLEEPING if case.model in found):
        one = sorted(found[case.model], key=lambda own: layers_s(own, case.rows))[PROFILES // 2]
        saved[case.key] = replace(one, machine=machines.get(case.ranks, Machine())).to_dict()
    path.write_text(json.dumps(saved))


def layers_s(profile: Profile, rows: int) -> float:
    """Return the time of all layers together."""
    costs = profile.costs([list(profile.layers)], rows)
    return costs.forward_s[0] + costs.backward_s[0]


def costs_of(case: Case, profiles: dict[str, Profile], ranks_are: RanksAre) -> Costs:
    """Return the costs of the stages of a case, from the saved profiles."""
    profile = profiles[case.key]
    if case.model != "sleeping":
        return profile.costs(case.stages(profile), case.rows, ranks_are=ranks_are)
    costs = profile.costs([[name] for name in profile.layers], case.rows, ranks_are=ranks_are)
    alike = [0, *[1] * (case.program.num_stages - 2), -1]  # all inner layers are equal: use the costs of one
    names = ("forward_s", "backward_s", "input_grad_s", "weight_grad_s", "waiting_s", "output_bytes")
    return Costs(**{name: [getattr(costs, name)[at] for at in alike] for name in names}, overheads=costs.overheads)


# ---- measured steps ------------------------------------------------------------------------------------------------


class Running:
    """An open pipeline that runs the steps of one case."""

    def __init__(self, case: Case, profiles: dict[str, Profile], ranks_are: RanksAre) -> None:
        model, self.x, self.y = case.parts
        where: dict[str, Any] = {"devices": ["cpu"] * case.ranks}
        if ranks_are == "processes":
            where = {"mesh": init_device_mesh("cpu", (case.ranks,))}
        self.pipe = Pipeline(
            model,
            self.x[: case.rows],
            loss_fn=functional.mse_loss,
            schedule=case.schedule,
            num_microbatches=case.microbatches,
            boundaries=[names[0] for names in case.stages(profiles[case.key])][1:],
            **where,
        )
        self.ranks_are = ranks_are
        self.sleeps = case.model == "sleeping"

    def step(self) -> tuple[Any, float]:
        """Run a step; return its trace, and the share of the step in which threads waited for cores."""
        self.pipe.model.zero_grad()
        before_s = waited_s()
        self.pipe.step(self.x, target=self.y)
        lost_s = waited_s() - before_s
        trace = self.pipe.gather_trace()
        if self.ranks_are == "processes":
            lost_s = max(self.pipe._running.host.collectives.gathered(lost_s))
        return trace, lost_s / trace.makespan_s


class Measured(NamedTuple):
    """The makespans of the used steps, in seconds, and the number of steps that were repeated."""

    makespans_s: list[float]
    disturbed: int


def run_all(rank: int, cases: Sequence[Case], path: Path, ranks_are: RanksAre, steps: int) -> list[Measured]:
    """Run all cases on one rank, some steps of each in turn; return their measurements.

    Only one pipeline is open at a time, because the threads of a pipeline's process groups wake up all the time.
    """
    torch.set_num_threads(1)
    wake_in_time()
    profiles = read_profiles(path)
    found = [Measured([], 0) for _ in cases]
    for turn in range(TURNS):
        for at, case in enumerate(cases):
            one = Running(case, profiles, ranks_are)
            found[at] = taken(one, found[at], steps * (turn + 1) // TURNS)
            one.pipe.close()
    return found


def taken(one: Running, before: Measured, steps: int) -> Measured:
    """Run steps until ``steps`` undisturbed steps have been measured, including those in ``before``.

    A step is disturbed if its threads waited too long for cores that other work used. If n steps are missing, at most
    2n steps run. If fewer than n of these are undisturbed, disturbed steps are used as well.
    """
    for _ in range(2):
        one.step()
    makespans_s, disturbed = list(before.makespans_s), before.disturbed
    left = 2 * (steps - len(makespans_s))
    while len(makespans_s) < steps:
        trace, lost = one.step()
        left -= 1
        if lost < DISTURBED or one.sleeps or left < steps - len(makespans_s):
            makespans_s.append(trace.makespan_s)
        else:
            disturbed += 1
    return Measured(makespans_s, disturbed)


def read_profiles(path: Path) -> dict[str, Profile]:
    """Return the saved profiles, keyed by `Case.key`."""
    return {name: Profile.from_dict(values) for name, values in json.loads(path.read_text()).items()}


def show(cases: Sequence[Case], path: Path, ranks_are: RanksAre, steps: int) -> list[float]:
    """Run each case and print a row; return the absolute errors of the predictions."""
    runs: list[Measured] = []
    if ranks_are == "threads":
        runs = elsewhere(run_all, 0, cases, path, ranks_are, steps)
    else:
        for ranks in sorted({case.ranks for case in cases}):
            own = [case for case in cases if case.ranks == ranks]
            runs += in_ranks(ranks, run_all, own, path, ranks_are, steps)[0]
    profiles, errors = read_profiles(path), []
    for case, (makespans, disturbed) in zip(cases, runs, strict=True):
        costs = costs_of(case, profiles, ranks_are)
        bare_s = simulate(case.program, replace(costs, overheads=None)).makespan_s
        said_s, took_s = simulate(case.program, costs).makespan_s, median(makespans)
        found = [one_s / took_s - 1 for one_s in (said_s, bare_s)]
        errors.append(abs(found[0]))
        shape = f"{case.model:13}{case.schedule:17}{case.ranks:6}{case.program.num_stages:7}{case.microbatches:4}"
        times = "".join(f"{one_s * 1e3:10.1f}" for one_s in (said_s, took_s, min(makespans), max(makespans)))
        print(f"{ranks_are:10}{shape}{times}{''.join(f'{error:+10.1%}' for error in found)}{disturbed:6}", flush=True)
    return errors


def main() -> None:
    """Print one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=Path("profiles.json"))
    parser.add_argument("--steps", type=int, default=21)
    parser.add_argument("--models", nargs="*", default=list(MODELS), help="models for ranks that compute")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16], help="numbers of sleeping ranks")
    parts = ["profile", "threads", "processes", "sleeping"]
    parser.add_argument("--only", nargs="+", default=parts, choices=parts)
    parser.add_argument("--trim", action="store_true", help="let processes return freed memory to the system")
    args = parser.parse_args()
    if not args.trim:
        keep_freed_memory()  # applies to the processes that are started below, which measure
    print(machine())
    if "profile" in args.only:
        overheads = {ranks: in_ranks(ranks, probed, ranks)[0] for ranks in (RANKS, *args.ranks)}
        elsewhere(write_profiles, args.file, [*args.models, "sleeping"], overheads)
    names = "predicted", "measured", "fastest", "slowest", "error", "bare"
    print(f"{'':40}{'ranks':>6}{'stages':>7}{'m':>4}{''.join(f'{name:>10}' for name in names)}{'again':>6}")
    computing = [case for case in COMPUTING if case.model in args.models]
    asleep = [case for case in SLEEPING if case.ranks in args.ranks]
    run = partial(show, path=args.file, steps=args.steps)
    for name, cases, kinds in (
        ("threads", computing, ("threads",)),
        ("processes", computing, ("processes",)),
        ("sleeping", asleep, ("threads", "processes")),
    ):
        if name in args.only:
            errors = [error for ranks_are in kinds for error in run(cases, ranks_are=ranks_are)]
            print(f"{name}: {len(errors)} cases, median error {median(errors):.1%}, worst {max(errors):.1%}")


if __name__ == "__main__":
    main()
