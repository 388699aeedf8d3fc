"""Models of any code: skips, tied weights, layers used again, parameters and dropout between layers, many outputs."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipesched import Pipeline
from pipesched.errors import GraphError, InputError, ModelTypeError, ScheduleError
from pipesched.runtime.microbatches import Splitter
from pipesched.runtime.step_call import StepCall, scatter_call
from pipesched.testing import reference_step
from tests.support import places
from tests.support.branching_models import (
    FLOATS,
    IMAGES,
    MODELS,
    ROWS,
    TEXT,
    Block,
    Both,
    Looped,
    Shift,
    assert_equal,
    inputs_of,
    made,
    pipeline,
    square,
    state,
)
from tests.support.models import assert_as
from tests.support.rank_processes import Ranks

SCHEDULES = ["1f1b", "zb-h1", "interleaved-1f1b"]


@pytest.mark.one_in(9)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MODELS)
def test_any_model_trains_as_the_loop_bit_by_bit(name: str, schedule: str) -> None:
    own, plain = made(name)[0], made(name)[0]
    with pipeline(name, own, devices=["cpu"] * 3, schedule=schedule) as pipe:
        for step, rows in enumerate((ROWS, 7, ROWS)):  # a batch of another size in between
            args, kwargs, target = inputs_of(name, rows)
            due = reference_step(
                plain, *args, **kwargs, **target, loss_fn=pipe.loss_fn, num_microbatches=3, seed=3, step=step
            )
            loss = pipe.step(*args, **kwargs, **target)
            assert torch.equal(loss, due)
            assert_equal(state(own), state(plain))


def train(group: places.Group, name: str, schedule: str, inputs: str) -> None:
    own, plain = made(name)[0], made(name)[0]
    told = inputs == "all" or group.rank() == 0
    with pipeline(name, own, schedule=schedule, **places.place(group, inputs)) as pipe:
        for step, rows in enumerate((ROWS, 7)):
            args, kwargs, target = inputs_of(name, rows)
            due = reference_step(
                plain, *args, **kwargs, **target, loss_fn=pipe.loss_fn, num_microbatches=3, seed=3, step=step
            )
            assert torch.equal(pipe.step(*args, **kwargs, **target) if told else pipe.step(), due)
            if any(True for _ in pipe.parameters()):  # a rank may hold only uses of tied weights
                assert_as(pipe, plain)
            with torch.no_grad():
                for model in (own, plain):
                    for parameter in model.parameters():
                        if parameter.grad is not None:
                            parameter.sub_(parameter.grad, alpha=0.1)
            pipe.zero_grad()
            plain.zero_grad()
        whole = pipe.full_state_dict()
        assert whole.keys() == plain.state_dict().keys()
        assert not [key for key, value in plain.state_dict().items() if not torch.equal(value, whole[key])]


@pytest.mark.one_in(24)
@pytest.mark.parametrize(("schedule", "inputs"), [("1f1b", "all"), ("zb-v", "first")])
@pytest.mark.parametrize("name", MODELS)
def test_any_model_trains_over_a_mesh(ranks: Ranks, name: str, schedule: str, inputs: str) -> None:
    ranks.run(3, train, name, schedule, inputs)


def test_inputs_go_where_they_are_used() -> None:
    batch = Splitter(3, fixed=False).batch((), {"left": FLOATS, "right": FLOATS.flip(0)})
    with pipeline("towers", made("towers")[0], devices=["cpu"] * 3, boundaries=["left.2", "right.2"]) as pipe:
        program = pipe.plan.program
        _, messages = scatter_call(StepCall("forward", batch), program, pipe._running.assembly.bodies, [[range(3)]])
        sent = [[type(value) for value in message[3][0][1].values()] for message in messages]
        late = (), {"left": FLOATS, "right": FLOATS.clone().requires_grad_()}
        with pytest.raises(InputError, match=r"requires a gradient may be used on rank 0 only; rank 1 also uses"):
            scatter_call(
                StepCall("forward", Splitter(3, fixed=False).batch(*late)),
                program,
                pipe._running.assembly.bodies,
                [[range(3)]],
            )
    assert [[kind is Tensor for kind in kinds] for kinds in sent] == [[True, False], [False, True], [False, False]]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
@pytest.mark.parametrize("name", MODELS)
def test_recomputed_models_have_the_bits_of_the_loop(name: str, checkpoint: str) -> None:
    own, plain = made(name)[0], made(name)[0]
    args, kwargs, target = inputs_of(name, ROWS)
    with pipeline(name, own, devices=["cpu"] * 3, checkpoint=checkpoint) as pipe:
        reference_step(plain, *args, **kwargs, **target, loss_fn=pipe.loss_fn, num_microbatches=3, seed=3)
        pipe.step(*args, **kwargs, **target)
    assert_equal(state(own), state(plain))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("towers", "loose")])
def test_outputs_are_the_models_own(name: str) -> None:
    own, plain = made(name)[0].eval(), made(name)[0].eval()
    args, kwargs, _ = inputs_of(name, ROWS)
    with pipeline(name, own, devices=["cpu"] * 3) as pipe, torch.no_grad():
        got, due = pipe.forward(*args, **kwargs), plain(*args, **kwargs)
    if isinstance(due, dict):
        got, due = got["logits"], due["logits"]
    torch.testing.assert_close(got, due)


class Gives(nn.Module):
    """Its output holds an input, and a value computed without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Any]:
        places = torch.arange(8.0) + 0 * x
        for block in self.blocks:
            x = torch.tanh(block(x)) * mask
        return {"x": x, "others": Both(mask, places, x + mask)}


def test_an_argument_is_the_same_however_it_is_passed() -> None:
    model, other = Gives(), FLOATS.flip(0)
    calls = [((FLOATS,), {"mask": other}), ((), {"mask": other, "x": FLOATS}), ((FLOATS, FLOATS), {})]
    for sample in ((FLOATS[:2], other[:2]), (FLOATS[:2], FLOATS[:2])):
        with Pipeline(model, sample, devices=["cpu"] * 3, loss_fn=square, schedule="1f1b") as pipe, torch.no_grad():
            for args, kwargs in calls:
                got, due = pipe(*args, **kwargs), model(*args, **kwargs)
                torch.testing.assert_close(
                    [got["x"], *vars(got["others"]).values()], [due["x"], *vars(due["others"]).values()]
                )


def test_a_dataclass_can_be_differentiated() -> None:
    own, plain = made("towers")[0].eval(), made("towers")[0].eval()
    _, kwargs, _ = inputs_of("towers", ROWS)
    with pipeline("towers", own, devices=["cpu"] * 3) as pipe:
        own.train()
        for module in (*own.modules(), *plain.modules()):
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        pipe(**kwargs).loss.mean().backward()
    plain(**kwargs).loss.backward()
    for one, other in zip(own.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_the_output_can_be_differentiated() -> None:
    own, plain = made("unet")[0], made("unet")[0]
    with pipeline("unet", own, devices=["cpu"] * 3) as pipe:
        pipe(IMAGES).pow(2).mean().backward()
    plain(IMAGES).pow(2).mean().backward()
    for one, other in zip(own.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_tied_weight_has_one_gradient_and_one_name() -> None:
    model = made("tied")[0]
    with pipeline("tied", model, devices=["cpu"] * 3) as pipe:
        names = [name for name, _ in pipe.named_parameters()]
        assert names.count("embed.weight") == 1
        assert "head.weight" not in names
        assert {"embed.weight", "head.weight"} <= pipe.state_dict().keys()
        calls = []
        model.embed.weight.register_post_accumulate_grad_hook(calls.append)
        pipe.step(text=TEXT, labels=TEXT)
        assert len(calls) == 1


def test_boundaries_are_layers_in_the_order_of_their_calls() -> None:
    model = made("tied")[0]
    with pipeline("tied", model, devices=["cpu"] * 3, boundaries=["shared#2", "head"]) as pipe:
        assert pipe.boundaries == ["shared#2", "head"]
        assert pipe.plan.stages[1] == ("shared#2", "blocks.2", "shared#3", "shared#4")


def optimize(group: places.Group, name: str, schedule: str, kind: Callable[..., torch.optim.Optimizer]) -> None:
    """A tied weight has one optimizer state, at its first use, and stays one weight."""
    own, plain = made(name)[0], made(name)[0]
    loop = kind(plain.parameters())
    with pipeline(name, own, schedule=schedule, optimizer=kind, **places.place(group)) as pipe:
        for step, rows in enumerate((ROWS, 7, ROWS, ROWS)):
            args, kwargs, target = inputs_of(name, rows)
            due = reference_step(
                plain, *args, **kwargs, **target, loss_fn=pipe.loss_fn, num_microbatches=3, seed=3, step=step
            )
            assert torch.equal(pipe.step(*args, **kwargs, **target), due)
            loop.step()
            loop.zero_grad()
        optimized = [p for one in pipe.optimizers.values() for group in one.param_groups for p in group["params"]]
        assert sorted(map(id, optimized)) == sorted(id(parameter) for _, parameter in pipe.named_parameters())
        assert not [name for name, parameter in pipe.named_parameters() if parameter.grad is not None]
        assert_equal(pipe.full_state_dict(), plain.state_dict())


def both_ways(group: places.Group, name: str, schedule: str) -> None:
    own, plain = made(name)[0], made(name)[0]
    with pipeline(name, own, schedule=schedule, **places.place(group)) as pipe:
        for step, rows in enumerate((ROWS, 7)):
            args, kwargs, target = inputs_of(name, rows)
            due = reference_step(
                plain, *args, **kwargs, **target, loss_fn=pipe.loss_fn, num_microbatches=3, seed=3, step=step
            )
            assert torch.equal(pipe.step(*args, **kwargs, **target), due)
            expected = dict(plain.named_parameters())
            for key, parameter in pipe.named_parameters():
                torch.testing.assert_close(parameter.grad, expected[key].grad, rtol=1e-4, atol=1e-6)
            with torch.no_grad():
                for parameter in (*own.parameters(), *plain.parameters()):
                    parameter.mul_(0.9)
            assert torch.equal(pipe.evaluate(*args, **kwargs, **target), pipe.evaluate(*args, **kwargs, **target))


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", ["attends", "tied", "loose", "towers", "repeated"])
def test_two_directions_train_any_model(run: places.Run, name: str) -> None:
    run(2, both_ways, name, "dualpipe" if name == "loose" else "chimera")


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("schedule", "kind"), [("1f1b", sgd), ("zb-v", adam)])
@pytest.mark.parametrize("name", ["tied", "loose", "repeated"])
def test_weights_after_steps_are_those_of_one_optimizer(run: places.Run, name: str, schedule: str, kind: Any) -> None:
    run(3, optimize, name, schedule, kind)


def test_tied_weights_have_no_versions() -> None:
    for name in ("tied", "loose"):
        with pytest.raises(
            ScheduleError, match=r"updates each stage as soon as .* calls that share .* different versions"
        ):
            pipeline(name, made(name)[0], devices=["cpu"] * 3, schedule="pipedream", optimizer=sgd)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw", "1f1b"])
def test_updates_in_flight_are_those_of_the_same_layers_in_a_row(schedule: str) -> None:
    torch.manual_seed(0)
    row = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), Shift(), nn.LayerNorm(8))))
    other = Looped(copy.deepcopy(row))
    for model, boundaries in ((row, [3, 6]), (other, [2, 4])):
        options = {"optimizer": lambda params: torch.optim.Adam(params, lr=0.02), "boundaries": boundaries}
        with Pipeline(
            model, FLOATS[:3], devices=["cpu"] * 3, loss_fn=square, schedule=schedule, num_microbatches=4, **options
        ) as pipe:
            for _ in range(6):
                pipe.step(FLOATS, target=torch.ones(ROWS, 8))
            pipe.flush()
    ways = [[layer.shift for layer in row if isinstance(layer, Shift)], list(other.shifts)]
    ways[0] += [p for layer in row if not isinstance(layer, Shift) for p in layer.parameters()]
    ways[1] += list(other.layers.parameters())
    for one, two in zip(*ways, strict=True):
        assert torch.equal(one, two)


class Patches(nn.Module):
    """Returns the number of patches beside the patches."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(2, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, int]]:
        patches = self.project(x.unfold(1, 2, 2))
        return patches, {"count": patches.shape[1]}


class Sized(nn.Module):
    """A size returned by a layer is used by the code at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.blocks = Patches(), nn.ModuleList(Block() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x, sizes = self.patches(x)
        for block in self.blocks:
            x = block(x)
        return x.sum(1) / sizes["count"] + torch.arange(sizes["count"]).sum()


def other_sizes(group: places.Group) -> None:
    torch.manual_seed(0)
    own = Sized()
    plain = copy.deepcopy(own)
    options: dict[str, Any] = {"loss_fn": square, "num_microbatches": 3, "seed": 3}
    target = torch.zeros(ROWS, 8)
    with Pipeline(own, torch.randn(2, 6), **options, **places.place(group)) as pipe:
        for step, size in enumerate((6, 10, 6, 4)):
            x = torch.randn(ROWS, size, generator=torch.Generator().manual_seed(step))
            due = reference_step(plain, x, target=target, step=step, **options)
            assert torch.equal(pipe.step(x, target=target), due)
        expected = dict(plain.named_parameters())
        for name, parameter in pipe.named_parameters():
            assert torch.equal(parameter.grad, expected[name].grad)


@pytest.mark.one_in(3)
def test_numbers_that_layers_give_follow_the_batch(run: places.Run) -> None:
    run(3, other_sizes)


class Chooses(nn.Module):
    """Takes another path for other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if x.sum() > 0 else -block(-x)
        return x


def test_a_way_that_depends_on_the_batch_is_an_error() -> None:
    rows = torch.ones(4, 8)
    with Pipeline(Chooses(), rows, devices=["cpu", "cpu"], loss_fn=square, num_microbatches=1, schedule="1f1b") as pipe:
        pipe.step(rows, target=rows)
        with pytest.raises(GraphError, match="must make the same calls as for the sample"):
            pipe.step(-rows, target=rows)
        pipe.zero_grad()
        pipe.step(rows, target=rows)


def test_what_is_no_model_says_so() -> None:
    with pytest.raises(
        ModelTypeError,
        match=r"the model must be an nn\.Module, or a function without arguments that builds one; got function",
    ):
        Pipeline(square, FLOATS[:2])  # type: ignore[arg-type]


def test_capture_leaves_the_model_as_it_was() -> None:
    model = made("recurrent")[0]
    before, random = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    pipeline("recurrent", model, devices=["cpu"] * 3).close()
    assert_equal(before, model.state_dict())
    assert torch.equal(random, torch.get_rng_state())
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_with_code_for_each_mode_trains_and_evaluates() -> None:
    own, plain = made("residual")[0], made("residual")[0]
    with pipeline("residual", own, devices=["cpu"] * 3) as pipe:
        pipe.eval()
        got = pipe.evaluate(FLOATS, target=torch.zeros(ROWS, 8))
        pipe.train()
        pipe.step(FLOATS, target=torch.zeros(ROWS, 8))
    plain.eval()
    torch.testing.assert_close(got, square(plain(FLOATS), torch.zeros(ROWS, 8)).detach())


def test_a_sample_that_does_not_fit_the_first_layer_of_a_row() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    x = torch.randn(4, 8)
    for sample in ((x, x), {"input": x, "target": x}, {"x": x}):
        with pytest.raises(InputError, match=r"a sample must match the signature of .*Linear\.forward"):
            Pipeline(model, sample, devices=["cpu"] * 2, schedule="1f1b", num_microbatches=4)
    with pytest.raises(InputError, match=r"a sample must fit the model's first layer; layer '0' \(Linear\) refuses"):
        Pipeline(model, [x], devices=["cpu"] * 2, schedule="1f1b", num_microbatches=4)
