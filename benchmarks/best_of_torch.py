"""Best of torch: compares pipesched's plans with the best of five schedules of torch.distributed.pipelining.

    python benchmarks/best_of_torch.py [--pairs 15] [--only sleeping gpt vgg residual] [--exported]

Torch's schedules run with the same number of layers in each stage; the best schedule has the shortest median
step. All runs are in the same gloo processes, in turn, with the same weights; gradients are compared first.

sleeping       Eight ranks and 16 micro-batches. The 16 layers sleep for different times instead of computing, so the
               machine's cores do not matter. Both libraries cut the layers in the same way. Our order is made for
               these times (`searched`). Each rank holds at most as many micro-batches at once as under zb-v; torch's
               schedules that hold more are marked. The table shows measured steps beside two simulations: "nominal"
               uses the times for which layers sleep; "simulated" uses a profile of the layers and the overheads of
               eight ranks on this machine, both measured before the runs.
gpt            Two ranks that compute, 8 micro-batches: a GPT with a large vocabulary, whose head takes the time of
               several blocks. We run the plan of `tune` on these ranks; the script prints how long `tune` took.
vgg            Likewise, for VGG-16 (Simonyan and Zisserman 2014, arXiv:1409.1556) without dropout, on images of 32 x 32
               pixels. Its channels grow from 64 to 512, and its first eight layers have 1.7 times as many operations as
               its last eight.
residual       Likewise, for a residual convolution net. Its channels grow as well, but each strided convolution halves
               both sides of the images, so all residual blocks take about the same time. Stages with equal numbers of
               layers are the best stages for this net, so plans can only gain by a better order.

With --exported, ranks that compute also run the order and the cut of our plan in torch's own runtime, on torch's own
stages: the file of `Program.to_torch`, loaded by the private `_load_csv` of torch's runtime.

For ranks that compute, the script also prints the step of a perfect pipeline, without bubble and overheads: both ranks
run an unpipelined loop over all micro-batches at the same time, each on its own core, and the time is divided by two.
The range that contains half of its steps shows how much the machine's speed varied.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
from measure import in_ranks, keep_freed_memory, machine, ratio, slowest_s
from prediction import probed
from sleeping import ROWS, WIDTH, Sleeping, wake_in_time
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from versus_torch import NAMES, torch_step

import pipesched
from pipesched import Costs, Pipeline, Plan, Program, schedules, simulate
from pipesched.program.liveness import peak_in_flight
from pipesched.program.placement import linear, loop, v
from pipesched.simulation.overheads import Machine
from pipesched.simulation.profile import Profile

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.torch_runtime import step_in_torch

RANKS, MICROBATCHES = 8, 16  # that sleep
TIMES_MS = (10, 35, 20, 25, 30, 15, 40, 20, 25, 15, 30, 25, 20, 35, 15, 60)  # F, I and W of each layer
COMPUTING_RANKS, COMPUTING_MICROBATCHES = 2, 8


class Measured(NamedTuple):
    """The seconds that each step takes on the slowest rank, and whether gradients agree with the first runner's."""

    steps_s: list[float]
    agree: bool


def in_turn(steps: Sequence[Callable[[], Any]], pairs: int) -> list[list[float]]:
    """Run the steps in turn, after a warm-up round; return the seconds of each."""
    rounds = [[slowest_s(step) for step in steps] for _ in range(pairs + 1)]
    return [list(column) for column in zip(*rounds[1:], strict=True)]


# ---- ranks that sleep -----------------------------------------------------------------------------------------------


def costs(stages: int) -> Costs:
    """Return the costs of the stages if each stage has the same number of layers."""
    size = len(TIMES_MS) // stages
    sums = [sum(TIMES_MS[stage * size : (stage + 1) * size]) / 1e3 for stage in range(stages)]
    return Costs(forward_s=sums, input_grad_s=sums, weight_grad_s=sums)


def program(name: str) -> Program:
    """Return the program of a schedule, with two stages on each rank if the schedule uses several."""
    return schedules.get(name).program(RANKS, MICROBATCHES)


def held(program: Program) -> float:
    """Return the most micro-batches that a rank holds at once.

    With two stages on each rank, a micro-batch counts one half for each stage that holds it.
    """
    return max(peak_in_flight(order) for order in program.orders) * RANKS / program.num_stages


def nominal_s(program: Program) -> float:
    """Return the step time that is simulated from the times for which layers sleep."""
    return float(simulate(program, costs(program.num_stages)).makespan_s)


def profiled() -> Profile:
    """Measure the sleeping layers, and the overheads of eight ranks on this machine."""
    overheads = in_ranks(RANKS, probed, RANKS)[0]
    torch.set_num_threads(1)
    wake_in_time()
    layers, (x, y) = sleeping_layers(), torch.randn(2, ROWS, WIDTH)
    found = pipesched.profile(layers, x, loss_fn=functional.mse_loss, target=y, rows=[ROWS])
    return replace(found, machine=Machine("cpu", processes=overheads))


def simulated_s(program: Program, profile: Profile) -> float:
    """Return the step time that is simulated from a profile."""
    names, size = list(profile.layers), len(TIMES_MS) // program.num_stages
    stages = [names[at : at + size] for at in range(0, len(names), size)]
    return float(simulate(program, profile.costs(stages, ROWS, ranks_are="processes")).makespan_s)


def searched(limit: float) -> Program:
    """Search for a program for each of three placements; return the fastest program.

    The placements have one stage on each rank, two stages in a loop, or two stages in a V.
    """
    return min(
        (
            schedules.get("searched")
            .with_options(
                costs=costs(len(placement)), placement=placement, max_in_flight=int(limit * len(placement) / RANKS)
            )
            .program(RANKS, MICROBATCHES)
            for placement in (linear(RANKS), loop(RANKS, 2), v(RANKS, 2))
        ),
        key=nominal_s,
    )


def sleeping_layers() -> nn.Sequential:
    """Return the layers that sleep, with the same weights in each call."""
    torch.manual_seed(0)
    return nn.Sequential(*(Sleeping(milliseconds / 1e3) for milliseconds in TIMES_MS))


def run_sleeping(rank: int, found: Program, pairs: int) -> list[Measured]:
    """Measure our program, then torch's schedules. Runs on each rank."""
    wake_in_time()
    own = sleeping_layers()
    x, y = torch.randn(MICROBATCHES * ROWS, WIDTH), torch.randn(MICROBATCHES * ROWS, WIDTH)
    with Pipeline(
        own,
        x[:ROWS],
        loss_fn=functional.mse_loss,
        mesh=init_device_mesh("cpu", (RANKS,)),
        schedule=schedules.get("searched").with_options(placement=found.placement, found=found),
        num_microbatches=MICROBATCHES,
        boundaries=[stage * len(own) // found.num_stages for stage in range(1, found.num_stages)],
    ) as pipe:
        return beside_torch(pipe, (x, y), [sleeping_layers() for _ in NAMES], rank, functional.mse_loss, pairs)


def gradients(model: nn.Module) -> Tensor:
    """Return all gradients of a model as one vector, each from the rank that has it. Collective."""
    every = [torch.zeros(each.shape) if each.grad is None else each.grad for each in model.parameters()]
    flat = torch.cat([grad.flatten() for grad in every])
    distributed.all_reduce(flat)
    return flat


def beside_torch(
    pipe: Pipeline,
    batch: tuple[Tensor, Tensor],
    models: Sequence[nn.Sequential],
    rank: int,
    loss_fn: Callable[..., Any],
    pairs: int,
    others: Sequence[Callable[[], Any]] = (),
    *,
    exported: bool = False,
) -> list[Measured]:
    """Measure our pipeline, then torch's schedules on copies of the model, then the other functions.

    With ``exported``, our plan in torch's runtime follows torch's schedules, on one more copy of the model.
    """
    x, y = batch
    rivals = [
        partial(torch_step(name, model, rank, pipe.plan.program.num_ranks, pipe.num_microbatches, loss_fn), x, y)
        for name, model in zip(NAMES, models, strict=False)
    ]
    if exported:
        rivals.append(partial(exported_step(pipe.plan, models[-1], loss_fn), x, y))
    ours = partial(pipe.step, x, target=y)
    for step in (ours, *rivals):
        step()
    own = gradients(pipe.model)
    agree = [torch.allclose(own, gradients(model), atol=1e-5) for model in (pipe.model, *models)]
    agree += [True] * len(others)
    return [Measured(*pair) for pair in zip(in_turn([ours, *rivals, *others], pairs), agree, strict=True)]


def exported_step(plan: Plan, model: nn.Sequential, loss_fn: Callable[..., Any]) -> Any:
    """Return a function that runs one step of a plan's order and cut in torch's runtime."""
    ends = list(accumulate(len(stage) for stage in plan.stages))
    return step_in_torch(plan.program, model, ends[:-1], loss_fn)


def show_sleeping(pairs: int) -> None:
    """Print the simulated and the measured step of each schedule."""
    programs = {name: program(name) for name in NAMES}
    limit = held(programs["zb-v"])
    ours = searched(limit)
    profile = profiled()
    results = in_ranks(RANKS, run_sleeping, ours, pairs)
    print("measured / nominal and measured / simulated, then our step / the step of this schedule: simulated, measured")
    print(f"{f'{RANKS} sleeping ranks':<16}{'held':>16}{'nominal':>10}{'simulated':>11}{'measured':>10}{'ratios':>14}")
    for number, (name, each) in enumerate({"ours": ours, **programs}.items()):
        steps_s, due_s = results[0][number].steps_s, simulated_s(each, profile)
        measured_s = median(steps_s)
        most = f"{held(each):g}{' (over)' if held(each) > limit else ''}"
        times = f"{nominal_s(each) * 1e3:>10.1f}{due_s * 1e3:>11.1f}{measured_s * 1e3:>10.1f}"
        ratios = f"{measured_s / nominal_s(each):>8.3f}{measured_s / due_s:>6.3f}"
        against = f"{simulated_s(ours, profile) / due_s:.3f}, {ratio(results[0][0].steps_s, steps_s)}"
        agree = all(rank[number].agree for rank in results)
        print(f"{name:<16}{most:>16}{times}{ratios}  {against}{'' if agree else '  gradients differ'}", flush=True)


# ---- ranks that compute ---------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(functional.relu(self.first(x)))


class Logits(nn.Linear):
    """A head whose output has the classes in its second to last dimension, as cross_entropy expects."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(1, 2)


def gpt_of(num_blocks: int, width: int, vocabulary: int) -> nn.Sequential:
    """Return a GPT: an embedding, blocks and a head."""
    options = {"dropout": 0.0, "batch_first": True, "norm_first": True, "activation": "gelu"}
    blocks = (nn.TransformerEncoderLayer(width, 4, 4 * width, **options) for _ in range(num_blocks))
    return nn.Sequential(nn.Embedding(vocabulary, width), *blocks, Logits(width, vocabulary))


def gpt() -> tuple[nn.Sequential, Tensor, Tensor]:
    """Return a GPT of twelve layers with a large head, its inputs and its targets."""
    vocabulary, shape = 8192, (2 * COMPUTING_MICROBATCHES, 64)
    model = gpt_of(10, 192, vocabulary)
    return model, torch.randint(vocabulary, shape), torch.randint(vocabulary, shape)


def vgg() -> tuple[nn.Sequential, Tensor, Tensor]:
    """Return VGG-16 as sixteen layers, its inputs and its targets."""
    layers: list[nn.Module] = []
    given = 3
    for channels, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for number in range(1, count + 1):
            pool = [nn.MaxPool2d(2)] if number == count else []
            layers += [nn.Sequential(nn.Conv2d(given, channels, 3, padding=1), nn.ReLU(), *pool)]
            given = channels
    layers += [nn.Sequential(nn.Flatten(), nn.Linear(512, 4096), nn.ReLU())]
    layers += [nn.Sequential(nn.Linear(4096, 4096), nn.ReLU()), nn.Linear(4096, 100)]
    rows = 2 * COMPUTING_MICROBATCHES
    return nn.Sequential(*layers), torch.randn(rows, 3, 32, 32), torch.randint(100, (rows,))


def residual() -> tuple[nn.Sequential, Tensor, Tensor]:
    """Return a residual net of twelve layers, its inputs and its targets. Every fourth layer adds channels."""
    layers: list[nn.Module] = []
    for given, channels in pairwise((3, 32, 64, 128)):
        layers += [nn.Conv2d(given, channels, 3, stride=2 if given > 3 else 1, padding=1)]
        layers += [Residual(channels) for _ in range(3)]
    layers[-1] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 100))
    return nn.Sequential(*layers), torch.randn(4 * COMPUTING_MICROBATCHES, 3, 32, 32), torch.randint(100, (32,))


MODELS = {"gpt": gpt, "vgg": vgg, "residual": residual}


class Tuned(NamedTuple):
    """The results of a rank: the measured steps, the plan of `tune`, and the seconds that `tune` took.

    The last measured steps are those of an unpipelined loop that runs on all ranks at the same time.
    """

    results: list[Measured]
    plan: str
    tune_s: float


def unpipelined(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Run the forward and the backward of all micro-batches, one after the other."""
    for inputs, targets in zip(x.chunk(COMPUTING_MICROBATCHES), y.chunk(COMPUTING_MICROBATCHES), strict=True):
        functional.cross_entropy(model(inputs), targets).backward()


def run_computing(rank: int, name: str, pairs: int, exported: bool) -> Tuned:
    """Find a plan, then measure it and torch's schedules. Runs on each rank."""
    torch.manual_seed(0)
    model, x, y = MODELS[name]()
    whole = partial(unpipelined, copy.deepcopy(model), x, y)
    models = [copy.deepcopy(model) for _ in range(len(NAMES) + exported)]
    mesh = init_device_mesh("cpu", (COMPUTING_RANKS,))
    rows = len(x) // COMPUTING_MICROBATCHES
    begin = time.perf_counter()
    plan: Plan = pipesched.tune(
        model,
        x[:rows],
        mesh=mesh,
        batch_size=len(x),
        num_microbatches=COMPUTING_MICROBATCHES,
        loss_fn=functional.cross_entropy,
        target=y[:rows],
        all_ranks=True,
    )
    tune_s = time.perf_counter() - begin
    with Pipeline(model, x[:rows], loss_fn=functional.cross_entropy, mesh=mesh, plan=plan) as pipe:
        results = beside_torch(pipe, (x, y), models, rank, functional.cross_entropy, pairs, [whole], exported=exported)
    return Tuned(results, f"{plan.schedule}, {[len(stage) for stage in plan.stages]} layers", tune_s)


def show_computing(name: str, pairs: int, *, exported: bool) -> None:
    """Print the measured step of each schedule."""
    ranks = in_ranks(COMPUTING_RANKS, run_computing, name, pairs, exported)
    results, plan, tune_s = ranks[0]
    own_s = results[0].steps_s
    print(f"{name}: tune took {tune_s:.1f} s and chose {plan}; a step takes {median(own_s) * 1e3:.1f} ms")
    for number, other in enumerate([*NAMES, *(["ours, by torch"] if exported else [])], 1):
        steps_s = results[number].steps_s
        agree = all(rank.results[number].agree for rank in ranks)
        print(
            f"  {other:<20}{median(steps_s) * 1e3:>10.1f} ms   ours / torch {ratio(own_s, steps_s)}"
            f"{'' if agree else '  gradients differ'}"
        )
    best = min((each.steps_s for each in results[1 : 1 + len(NAMES)]), key=median)
    perfect_s = [seconds / COMPUTING_RANKS for seconds in results[-1].steps_s]
    print(f"  ours / best of torch {ratio(own_s, best)}; perfect / best of torch {ratio(perfect_s, best)}")
    if exported:
        print(f"  our order in torch's runtime / best of torch {ratio(results[1 + len(NAMES)].steps_s, best)}")
    low, middle, high = (each * 1e3 for each in quantiles(perfect_s, n=4))
    spread = f"half of the steps take {low:.1f} to {high:.1f} ms"
    print(f"  a step of the perfect pipeline takes {middle:.1f} ms; {spread}", flush=True)


def main() -> None:
    """Print a block for each comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--only", nargs="+", default=["sleeping", *MODELS], choices=["sleeping", *MODELS])
    parser.add_argument("--exported", action="store_true", help="also run our plans in torch's runtime")
    args = parser.parse_args()
    keep_freed_memory()
    print(machine())
    for name in args.only:
        if name == "sleeping":
            show_sleeping(args.pairs)
        else:
            show_computing(name, args.pairs, exported=args.exported)


if __name__ == "__main__":
    main()
