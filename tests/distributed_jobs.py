"""What the processes of test_distributed run: each function in all ranks of a group at once."""

import os
import random
import threading
import time
from collections.abc import Hashable
from typing import Any

import pytest
import torch
from models import gradients, mixed_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from pipesched import Action, Costs, Kind, Pipeline, Program, backward, schedules
from pipesched.batch import Splitter
from pipesched.errors import ExecutionError, InputError, PipeschedError
from pipesched.executors.distributed import DistributedExecutor, look
from pipesched.executors.fake import FakeStage
from pipesched.executors.local import Work
from pipesched.lowering import add_recompute, halves, lower
from pipesched.payload import Payload
from pipesched.stage import Feed, Head, Stage
from pipesched.testing import reference_step


def work(program: Program, stages: dict[int, Any], **others: Any) -> Work:
    return Work(program, stages, lambda caller: None, **others)


# ---- values -------------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool]
PLAIN = [None, 3, 3.0, True, "text", float("nan"), (), -0.0]


def tensor(rng: random.Random) -> Tensor:
    """Any plain tensor: of any type, dense or with gaps, permuted, expanded, overlapping, empty, without dims."""
    shape = [rng.randrange(5) for _ in range(rng.randrange(4))]
    made = (
        torch.rand([2 * size for size in shape], generator=torch.Generator().manual_seed(rng.randrange(99))) * 9
    ).to(rng.choice(DTYPES))
    for dim in range(len(shape)):
        step = rng.choice([1, 2])
        made = made[(slice(None),) * dim + (slice(rng.randrange(2), None, step),)]
    if shape and rng.random() < 0.5:
        made = made.permute(rng.sample(range(len(shape)), len(shape)))
    if rng.random() < 0.3:
        made = made.unsqueeze(0).expand(3, *made.shape)
    if made.dim() and made.shape[-1] >= 3 and rng.random() < 0.3:
        made = made.unfold(-1, 2, 1)
    if rng.random() < 0.3:
        made = made.conj().imag if made.is_complex() and rng.random() < 0.5 else made.conj()
    if made.dtype.is_floating_point and rng.random() < 0.5:
        made = made.detach().requires_grad_()
    return made


def value(rng: random.Random, depth: int = 2) -> Any:
    kind = rng.randrange(6) if depth else rng.randrange(3)
    if kind < 2:
        return tensor(rng)
    if kind == 2:
        return rng.choice(PLAIN)
    if kind == 3:  # several views of one memory
        whole = torch.arange(24.0)
        return [whole[rng.randrange(6) :], whole.view(4, 6).t(), whole.view(torch.int32)[3:7], tensor(rng)]
    parts = [value(rng, depth - 1) for _ in range(rng.randrange(3))]
    if kind == 4 and parts:
        return (*parts, parts[0])  # one thing in two places
    return {str(index): part for index, part in enumerate(parts)}


def assert_same(got: Any, sent: Any) -> None:
    if isinstance(sent, Payload):
        assert (got.spec, got.places, got.needs_grad) == (sent.spec, sent.places, sent.needs_grad)
        got, sent = got.leaves, sent.leaves
    assert len(got) == len(sent)
    for one, other in zip(got, sent, strict=True):
        assert type(one) is type(other), (one, other)
        if isinstance(other, Tensor):
            assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
            assert torch.equal(one, other)
        else:
            assert repr(one) == repr(other)
    assert sharing(got) == sharing(sent)


def sharing(leaves: Any) -> list[tuple[int, int]]:
    """Which leaves lie in one memory."""
    places = [
        leaf.untyped_storage().data_ptr() if isinstance(leaf, Tensor) and leaf.numel() else -index
        for index, leaf in enumerate(leaves)
    ]
    unlike = [isinstance(leaf, Tensor) and (leaf.is_conj() or leaf.is_neg()) for leaf in leaves]
    pairs = ((a, b) for b in range(len(places)) for a in range(b))
    return [(a, b) for a, b in pairs if places[a] == places[b] and not (unlike[a] or unlike[b])]


class Carries:
    """A stage that gives what it was told to give, and compares what arrives with what the others were told."""

    def __init__(self, index: int, outputs: list[Payload], grads: list[Any]) -> None:
        self.index, self.outputs, self.grads = index, outputs, grads
        self.seen = 0

    def forward(self, microbatch: int, *arrived: Any, split: bool, checkpointed: bool) -> Any:
        for one in arrived:
            assert_same(one, self.outputs[microbatch])
            self.seen += 1
        return self.outputs[microbatch]

    def backward(self, microbatch: int, *grads: Any) -> Any:
        for one in grads:
            assert_same(one, self.grads[microbatch])
            self.seen += 1
        return self.grads[microbatch]


def round_trips(group: Any, seeds: list[int]) -> int:
    """Forward and back between two ranks: forms unknown at first, foreseen then, and then others than foreseen."""
    rngs = [random.Random(seed) for seed in seeds]
    outputs = [Payload.of(value(rng)) for rng in rngs]
    grads = [tuple(rng.choice([None, tensor(rng).detach()]) for _ in range(rng.randrange(4))) for rng in rngs]
    program = lower(schedules.get("gpipe").program(2, len(seeds)))
    executor = DistributedExecutor(group, timeout_s=10)
    seen = 0
    for order in (1, 1, -1, -1, 1):
        stages = {index: Carries(index, outputs[::order], grads[::order]) for index in range(2)}
        executor.run(work(program, stages), grad=False, looks=list(range(len(seeds))))
        seen += stages[group.rank()].seen
    executor.close()
    return seen


def long_values(group: Any, kilobytes: list[int]) -> int:
    """Values longer than the buffers of a connection, all sent before the first is received."""
    outputs = [Payload.of(torch.full((size, 256), float(size))) for size in kilobytes]
    grads = [one.leaves for one in outputs]
    program = lower(schedules.get("gpipe").program(2, len(outputs)))
    executor = DistributedExecutor(group, timeout_s=10)
    for _ in range(3):
        stages = {index: Carries(index, outputs, grads) for index in range(2)}
        executor.run(work(program, stages), grad=False, looks=kilobytes)
    executor.close()
    return stages[group.rank()].seen


# ---- programs -----------------------------------------------------------------------------------------------------


class Checks(FakeStage):
    """A fake stage whose values travel as tensors do, of shapes that differ from stage to stage."""

    def forward(self, microbatch: int, *arrived: Any, split: bool, checkpointed: bool) -> Any:
        given = [Told(Kind.F, int(one.leaves[0][0]), int(one.leaves[0][1])) for one in arrived]
        super().forward(microbatch, *given, split=split, checkpointed=checkpointed)
        return Payload.of(torch.tensor([self.index, microbatch] + [0] * self.index))

    def backward(self, microbatch: int, *grads: Any) -> Any:
        super().backward(microbatch, *map(told, grads))
        return (torch.tensor([self.index, microbatch]), None)

    def input_grad(self, microbatch: int, *grads: Any) -> Any:
        super().input_grad(microbatch, *map(told, grads))
        return (torch.tensor([self.index, microbatch]), None)

    def _check(self, values: Any, kind: Kind, microbatch: int) -> None:
        super()._check(values, kind, microbatch)
        self.givers = [one.stage for one in values]


class Told:
    """What a fake stage looks at."""

    def __init__(self, kind: Kind, stage: int, microbatch: int) -> None:
        self.kind, self.stage, self.microbatch = kind, stage, microbatch


def told(grads: Any) -> Told:
    return Told(Kind.B, int(grads[0][0]), int(grads[0][1]))


def checked_run(executor: DistributedExecutor, program: Program) -> Any:
    free = Costs.uniform(program.num_stages, forward_s=0, input_grad_s=0, weight_grad_s=0)
    stages = {index: Checks(index, free) for index in range(program.num_stages)}
    timeline = executor.run(work(program, stages), grad=False, looks=[0] * program.num_microbatches)
    order = program.orders[executor.rank]
    assert [span.action for span in timeline.spans()] == list(order)
    for index in program.chunks(executor.rank):
        assert not list(stages[index].missing(program))
    return timeline


def run_programs(group: Any, texts: list[str]) -> int:
    """Run each; how many values reached this rank."""
    executor = DistributedExecutor(group, timeout_s=10)
    spans = [span for text in texts for span in checked_run(executor, lower(Program.parse(text))).spans()]
    executor.close()
    return sum(span.action.kind in (Kind.RECV_F, Kind.RECV_B) for span in spans)


def one_clock(group: Any, name: str) -> list[Any]:
    """The spans of all ranks, as rank 0 has them."""
    executor = DistributedExecutor(group, timeout_s=10)
    program = lower(schedules.get(name).program(group.size(), 4))
    costs = Costs.uniform(program.num_stages, forward_s=0.002, input_grad_s=0.002, weight_grad_s=0.002)
    stages = {index: FakeStage(index, costs) for index in range(program.num_stages)}
    timeline = executor.run(work(program, stages), grad=False)
    spans = executor.gather(timeline)
    executor.close()
    return spans if group.rank() == 0 else []


def memory_of_messages(group: Any, name: str, num_microbatches: int) -> int:
    """The most messages of one form that a rank holds memory for."""
    executor = DistributedExecutor(group, timeout_s=10)
    program = lower(schedules.get(name).program(group.size(), num_microbatches))
    for _ in range(3):
        checked_run(executor, program)
    made = most_made(executor)
    executor.close()
    return made


def memory_of_long_messages(group: Any, name: str, num_microbatches: int) -> int:
    """The same for messages that gloo carries."""
    executor = DistributedExecutor(group, timeout_s=10)
    program = lower(schedules.get(name).program(group.size(), num_microbatches))
    outputs = [Payload.of(torch.ones(1100, 256))] * num_microbatches
    for _ in range(3):
        stages = {index: Carries(index, outputs, [one.leaves for one in outputs]) for index in range(2)}
        executor.run(work(program, stages), grad=False)
    made = most_made(executor)
    executor.close()
    return made


def most_made(executor: DistributedExecutor) -> int:
    channels = [channel for one in executor._wire._neighbours.values() for channel in one.outgoing]
    return max(
        sum(sent.spare is form.spare for sent in channel._sent) + len(form.spare)
        for channel in channels
        for form in channel.book.foreseen
    )


# ---- models -------------------------------------------------------------------------------------------------------


class Trainer:
    """A model cut into a program's stages, this rank's trained by the executor."""

    def __init__(self, group: Any, model: nn.Sequential, program: Program, executor: DistributedExecutor) -> None:
        self.group, self.program, self.executor, self.model = group, program, executor, model
        layers = dict(model.named_children())
        names = list(layers)
        cuts = [len(names) * stage // program.num_stages for stage in range(program.num_stages + 1)]
        last = program.num_stages - 1
        self.stages = {
            index: Stage(
                {name: layers[name] for name in names[cuts[index] : cuts[index + 1]]},
                torch.device("cpu"),
                Head(functional.cross_entropy) if index == last else None,
            )
            for index in program.chunks(group.rank())
        }
        self.own = {name for stage in self.stages.values() for name in stage.layers}
        self.last_rank = program.placement[last]
        self.steps = 0

    def step(self, x: Tensor, y: Tensor, orders: list[Any] = [None]) -> Tensor:
        batch = Splitter(self.program.num_microbatches, False, 0, None, "mean").batch((x,), {}, y)
        factors = Splitter(self.program.num_microbatches, False, 0, None, "mean").factors(batch)
        feed = Feed(3, self.steps, list(batch.inputs), batch.targets, factors)
        self.steps += 1

        def begin(caller: Any) -> None:
            feed.autocast = caller.autocast
            for stage in self.stages.values():
                stage.begin(feed)

        looks: list[Hashable] = [look(one) for one in batch.inputs]
        for number, part in enumerate(orders):
            prepare = begin if number == 0 else lambda caller: None
            self.executor.run(Work(self.program, self.stages, prepare, part), grad=True, looks=looks)
        total = None
        if self.group.rank() == self.last_rank:
            for microbatch in range(len(batch)):
                loss = feed.losses[microbatch]
                total = loss if total is None else total + loss
        return self.executor.share(self.last_rank, total)()


def train(group: Any, names: list[str], checkpoint: str) -> None:
    """Two steps of each schedule, the second with another batch size, equal the loop without a pipeline, bit by bit."""
    executor = DistributedExecutor(group, timeout_s=10)
    backward.PAYS_FLOPS = 0  # every product is deferred, however small
    for name in names:
        expected, actual = mixed_model(), mixed_model()
        program = lower(add_recompute(schedules.get(name).program(group.size(), 4), checkpoint))
        trainer = Trainer(group, actual, program, executor)
        train_both(trainer, expected)
        if name == "gpipe":
            trainer.steps = 0
            trainer.model.zero_grad()
            expected = mixed_model()
            actual.load_state_dict(expected.state_dict())
            train_both(trainer, expected, list(halves(program)))
    executor.close()


def train_both(trainer: Trainer, expected: nn.Sequential, orders: Any = (None,)) -> None:
    for step, rows in enumerate((19, 8)):
        torch.manual_seed(rows)
        x, y = torch.randn(rows, 8), torch.randint(0, 4, (rows,))
        loss = trainer.step(x, y, list(orders))
        wanted = reference_step(
            expected, x, target=y, loss_fn=functional.cross_entropy, num_microbatches=4, seed=3, step=step
        )
        assert torch.equal(loss, wanted), (trainer.program.name, step)
        ours, theirs = gradients(trainer.model), gradients(expected)
        assert {name.split(".")[0] for name in ours} <= trainer.own
        for name in theirs:
            if name.split(".")[0] in trainer.own:
                assert torch.equal(ours[name], theirs[name]), (trainer.program.name, step, name)
        buffers = dict(trainer.model.named_buffers())
        for name, buffer in expected.named_buffers():
            if name.split(".")[0] in trainer.own:
                assert torch.equal(buffers[name], buffer)


# ---- failures -----------------------------------------------------------------------------------------------------


class Raises(FakeStage):
    """Fails in one action."""

    failing: Action | None = None
    how: Any = None
    slow: Action | None = None

    def _run(self, kind: Kind, microbatch: int, after: Any) -> None:
        if self.failing == Action(self.index, kind, microbatch):
            self.how()
        if self.slow == Action(self.index, kind, microbatch):
            be_late()
        super()._run(kind, microbatch, after)


def divide() -> None:
    raise ZeroDivisionError("a layer's own error")


def end_process() -> None:
    os._exit(1)


def be_late() -> None:
    time.sleep(2)


def fail(
    group: Any, failing: Action, how: Any, timeout_s: float = 10, slow: Action | None = None
) -> tuple[float, str, str, list[str], str]:
    """One good step, then one that fails. Returns seconds, type, text, notes, and what the next step says."""
    executor = DistributedExecutor(group, timeout_s=timeout_s)
    program = lower(schedules.get("1f1b").program(group.size(), 8))
    costs = Costs.uniform(program.num_stages, forward_s=0, input_grad_s=0, weight_grad_s=0)

    def step(stage: Any, executor: DistributedExecutor) -> None:
        executor.run(work(program, {index: stage(index, costs) for index in range(program.num_stages)}), grad=False)

    step(FakeStage, executor)
    start_s = time.perf_counter()
    caught: BaseException = AssertionError("nothing was raised")
    try:
        step(type("Failing", (Raises,), {"failing": failing, "how": staticmethod(how), "slow": slow}), executor)
    except BaseException as error:
        caught = error
    seconds = time.perf_counter() - start_s
    try:
        step(FakeStage, executor)
        after = "it ran"
    except ExecutionError as error:
        after = str(error)
    executor.close()
    del executor
    assert not [thread for thread in threading.enumerate() if "alarm" in thread.name]
    return seconds, type(caught).__name__, str(caught), getattr(caught, "__notes__", []), after


def different_programs(group: Any, odd: int) -> tuple[str, int]:
    """One rank has another program: what it says, and how many forwards ran; then the same program runs."""
    executor = DistributedExecutor(group, timeout_s=10)
    name = "gpipe" if group.rank() == odd else "1f1b"
    program = lower(schedules.get(name).program(group.size(), 6))
    free = Costs.uniform(program.num_stages, forward_s=0, input_grad_s=0, weight_grad_s=0)
    stages = {index: FakeStage(index, free) for index in range(program.num_stages)}
    try:
        executor.run(work(program, stages), grad=False)
        text = "it ran"
    except ExecutionError as error:
        text = str(error)
    ran = sum(len(stage._state) for stage in stages.values())
    checked_run(executor, lower(schedules.get("1f1b").program(group.size(), 6)))
    executor.close()
    return text, ran


def different_batches(group: Any) -> str:
    """Ranks see other rows: messages would have other sizes than are foreseen."""
    executor = DistributedExecutor(group, timeout_s=10)
    program = lower(schedules.get("1f1b").program(group.size(), 4))
    checked_run(executor, program)
    free = Costs.uniform(program.num_stages, forward_s=0, input_grad_s=0, weight_grad_s=0)
    stages = {index: Checks(index, free) for index in range(program.num_stages)}
    try:
        executor.run(work(program, stages), grad=False, looks=[group.rank()] * 4)
    except ExecutionError as error:
        return str(error)
    return "it ran"


def several_at_once(group: Any) -> int:
    """Executors on one group in turn, and what is left of them once they are dropped."""
    executors = [DistributedExecutor(group, timeout_s=10) for _ in range(3)]
    program = lower(schedules.get("interleaved-1f1b").program(group.size(), 4))
    for _ in range(2):
        for executor in executors:
            checked_run(executor, program)
    executors[0].close()
    executors[0].close()
    checked_run(executors[1], program)
    executors[1].exchange(None)  # nobody drops what another one still waits for
    sleepers = [thread for thread in threading.enumerate() if "alarm" in thread.name]
    del executor, executors
    for sleeper in sleepers:
        sleeper.join(5)
    return sum(sleeper.is_alive() for sleeper in sleepers)


def settings(group: Any) -> dict[str, Any]:
    """What a stage sees of the caller's settings, and that they are the caller's again afterwards."""
    seen: dict[str, Any] = {}

    class Looks(FakeStage):
        def forward(self, *args: Any, **named: Any) -> Any:
            seen.update(
                threads=torch.get_num_threads(),
                grad=torch.is_grad_enabled(),
                inference=torch.is_inference_mode_enabled(),
            )
            super().forward(*args, **named)
            return Payload.of(torch.ones(3).t())

        def _check(self, *_: Any) -> None:
            pass

    executor = DistributedExecutor(group, intra_op_threads=2, timeout_s=10)
    program = lower(schedules.get("gpipe").program(group.size(), 3).forward())
    free = Costs.uniform(program.num_stages, forward_s=0)
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            executor.run(work(program, {i: Looks(i, free) for i in range(program.num_stages)}), grad=False)
    executor.close()
    return {**seen, "after": torch.get_num_threads()}


def exchange(group: Any) -> tuple[list[Any], Any]:
    executor = DistributedExecutor(group, timeout_s=10)
    values = executor.exchange({"rank": group.rank(), "big": torch.full((group.rank() * 1000,), 1.0)})
    read = [executor.share(1, torch.tensor(float(number)) if group.rank() == 1 else None) for number in range(3)]
    shared = [float(one()) for one in reversed(read)]
    executor.close()
    return [(one["rank"], float(one["big"].sum())) for one in values], shared


# ---- the front door ----


def pipeline(group: Any, name: str, model: nn.Module, **options: Any) -> Pipeline:
    """A Pipeline over the group."""
    mesh = DeviceMesh.from_group(group, "cpu")
    chunks = schedules.get(name).chunks_per_rank * group.size()
    cut = [len(model) * stage // chunks for stage in range(1, chunks)]
    choices = {"num_microbatches": 4, "boundaries": cut, "seed": 5, **options}
    return Pipeline(model, X[:2], loss_fn=functional.cross_entropy, mesh=mesh, schedule=name, **choices)


X, Y = torch.randn(19, 8, generator=torch.Generator().manual_seed(3)), torch.arange(19) % 4


def train_pipelines(group: Any, names: list[str], checkpoint: str) -> None:
    """Loss, gradients, buffers and outputs equal to the loop's, on every rank its own; two batch sizes."""
    for name in names:
        expected, actual = mixed_model(), mixed_model()
        with pipeline(group, name, actual, checkpoint=checkpoint) as pipe:
            for step, rows in enumerate((19, 6)):
                loss = pipe.step(X[:rows], target=Y[:rows])
                wanted = reference_step(
                    expected,
                    X[:rows],
                    target=Y[:rows],
                    loss_fn=functional.cross_entropy,
                    num_microbatches=4,
                    seed=5,
                    step=step,
                )
                assert torch.equal(loss, wanted), name
            mine = dict(pipe.named_parameters())
            due = dict(expected.named_parameters())
            assert all(torch.equal(p.grad, due[key].grad) for key, p in mine.items() if due[key].grad is not None)
            shares = pipe._site.executor.exchange(sorted(mine))
            assert sorted(key for share in shares for key in share) == sorted(due)
            buffers = dict(expected.named_buffers())
            assert all(torch.equal(buffer, buffers[key]) for key, buffer in pipe.named_buffers())
            trace = pipe.gather_trace()
            program = schedules.get(name).program(group.size(), 4)
            assert len(trace.by_rank) == group.size()
            assert [len(row) for row in trace.by_rank][group.rank()] == len(pipe.trace.by_rank[group.rank()])
            assert trace.num_microbatches == program.num_microbatches


def train_with_optimizer(group: Any) -> None:
    """Weights after steps with one optimizer a stage, gathered, equal those of the loop; evaluation and its outputs."""
    expected, actual = mixed_model(), mixed_model()
    theirs = torch.optim.Adam(expected.parameters(), lr=0.05)
    with pipeline(group, "1f1b", actual, optimizer=lambda params: torch.optim.Adam(params, lr=0.05)) as pipe:
        for step in range(3):
            pipe.step(X, target=Y)
            reference_step(
                expected, X, target=Y, loss_fn=functional.cross_entropy, num_microbatches=4, seed=5, step=step
            )
            theirs.step()
            theirs.zero_grad()
        whole = pipe.full_state_dict()
        assert whole.keys() == expected.state_dict().keys()
        assert all(torch.equal(whole[key], value) for key, value in expected.state_dict().items())
        loss, outputs = pipe.eval().evaluate(X, target=Y, return_outputs=True)
        assert (outputs is None) == (group.rank() != group.size() - 1)
        assert loss.isfinite()
        pipe.load_state_dict(mixed_model().state_dict())
        fresh = mixed_model().state_dict()
        assert all(torch.equal(value, fresh[key]) for key, value in pipe.state_dict().items())


def refusals(group: Any) -> list[str]:
    """What a pipeline over a mesh says that it cannot do."""
    said = []
    mesh = DeviceMesh.from_group(group, "cpu")
    for options in (
        {"schedule": "chimera"},
        {"schedule": "pipedream", "optimizer": lambda params: torch.optim.SGD(params, lr=0.1)},
        {"devices": ["cpu"] * group.size()},
        {"boundaries": [2 + group.rank()]},
        {"num_stages": 1},
    ):
        choices = {"mesh": mesh, "schedule": "1f1b", "num_microbatches": 2, "timeout": 20, **options}
        try:
            Pipeline(mixed_model(), X[:2], loss_fn=functional.cross_entropy, **choices).close()
            said.append(f"nothing against {options}")
        except PipeschedError as error:
            said.append(str(error))
    return said


def balanced(group: Any) -> list[str]:
    """Without boundaries rank 0 measures, and all cut alike; each draws with one seed."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)), nn.Dropout(0.5))
    torch.manual_seed(group.rank())
    mesh = DeviceMesh.from_group(group, "cpu")
    with Pipeline(model, X[:2], loss_fn=functional.cross_entropy, mesh=mesh, num_microbatches=2) as pipe:
        assert pipe.predicted.makespan_s > 0
        with pytest.raises(InputError, match="runs in one process, so far"):
            pipe(X)
        return [*pipe.boundaries, str(pipe.step(X, target=Y))]
