"""Layers that do not keep what they save: recomputed in their own backward. What is learned stays the same."""

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from pipesched import Numerics, Pipeline, Plan
from pipesched.errors import ExecutionError, GraphError, ScheduleError
from pipesched.program.checkpoint_options import as_checkpoint, checkpoint_in_words
from pipesched.runtime.stage.stage import Stage
from pipesched.runtime.stage.step_data import StepData
from pipesched.simulation.layer_costs import LayerCosts
from pipesched.testing import reference_step
from tests.support import branching_models as any_models
from tests.support import places
from tests.support.async_replay import batch, transformer
from tests.support.device_memory import check_offloading_frees_memory
from tests.support.jobs.keeping import LAYERS, SCHEDULES, WORDS, X, Y, assert_trains_as_the_loop, wrap
from tests.support.models import Function, compare_step, mixed_model
from tests.support.peer_cases import mse
from tests.support.rank_processes import FORKED
from tests.support.torch_versions import compiles_in_threads

pytestmark = pytest.mark.usefixtures("every_product_deferred")

mixtures = st.fixed_dictionaries({}, optional={name: st.sampled_from(WORDS) for name in LAYERS})


@given(schedule=st.sampled_from(SCHEDULES), checkpoint=mixtures)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_mixture_gives_the_bits_of_the_loop(schedule: str, checkpoint: dict[str, str]) -> None:
    assert_trains_as_the_loop(places.OneProcess(2), schedule, checkpoint)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("name", any_models.MODELS)
def test_layer_checkpointing_keeps_the_bits_of_any_model(name: str, schedule: str) -> None:
    """Tied weights, layers called several times, skips, recurrent nets, and arguments by name."""
    own, plain = any_models.made(name)[0], any_models.made(name)[0]
    with any_models.pipeline(name, own, devices=["cpu"] * 2, schedule=schedule, checkpoint="never") as pipe:
        layers = [layer for names in pipe.plan.stages for layer in names]
    words = {layer: WORDS[at % len(WORDS)] for at, layer in enumerate(layers)}
    with any_models.pipeline(name, own, devices=["cpu"] * 2, schedule=schedule, checkpoint=words) as pipe:
        args, kwargs, target = any_models.inputs_of(name, any_models.ROWS)
        for step in range(2):
            due = reference_step(
                plain, *args, **kwargs, **target, loss_fn=pipe.loss_fn, num_microbatches=3, seed=3, step=step
            )
            assert torch.equal(pipe.step(*args, **kwargs, **target), due)
            any_models.assert_equal(any_models.state(own), any_models.state(plain))


def test_a_recomputed_layer_runs_twice_a_microbatch_and_any_other_once() -> None:
    calls: Counter[int] = Counter()
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(4, 4), Function(lambda x, at=at: calls.update([at]) or x.tanh())) for at in range(4))
    )
    x = torch.randn(6, 4)
    words = {"0.1": "recompute", "3.1": "recompute"}
    with Pipeline(
        model, x[:2], loss_fn=mse, devices=["cpu"] * 2, num_microbatches=3, checkpoint=words, schedule="1f1b"
    ) as pipe:
        calls.clear()
        pipe.step(x, target=x)
        assert calls == {0: 6, 1: 3, 2: 3, 3: 6}
        calls.clear()
        pipe.evaluate(x, target=x)
        assert calls == {0: 3, 1: 3, 2: 3, 3: 3}


class Live(TorchDispatchMode):
    """The memory that operators have made, while it lives: bytes by address."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            one.untyped_storage().data_ptr() for one in (*args, *(kwargs or {}).values()) if isinstance(one, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, Tensor) and tensor.nbytes and tensor.dtype is not torch.uint8:  # that is the host's
                storage = tensor.untyped_storage()
                address = storage.data_ptr()
                if address not in self.held and address not in given:
                    self.held[address] = storage.nbytes()
                    weakref.finalize(storage, self.held.pop, address, None)
        return result


class Block(nn.Module):
    """Saves five tensors of its own beside its input."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(self.narrow(self.wide(x).tanh()).sigmoid() * x, 0.5, self.training)


@contextmanager
def stage_of_blocks(
    checkpoint_of_call: Mapping[tuple[str, int], Any], rows: Tensor, split: bool = False
) -> Iterator[Stage]:
    """A stage of three blocks that one micro-batch has passed."""
    torch.manual_seed(0)
    stage = Stage({str(at): Block() for at in range(3)}, torch.device("cpu"), checkpoint_of_call=checkpoint_of_call)
    step_data = StepData(0, 0, [((rows,), {}), ((rows,), {}), ((rows,), {})])
    step_data.output_grads = [(torch.ones_like(rows),)] * 3
    stage.begin(step_data)
    stage.forward(0, split=split)  # which is learnt from
    stage.backward(0)
    yield stage
    stage.end(False)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("again", "own"),
    [([], 11), ([1], 8), ([0, 1, 2], 2)],  # of a block its tanh, sigmoid and mask; and the inputs of blocks 1 and 2
)
def test_a_recomputed_layer_keeps_only_its_input(split: bool, again: list[int], own: int) -> None:
    rows = torch.randn(64, 8)
    with stage_of_blocks({(str(at), 0): "recompute" for at in again}, rows, split) as stage, Live() as live:
        stage.forward(1, split=split)
        assert sum(live.held.values()) == own * rows.nbytes
        if split:
            stage.input_grad(1)  # of each product stay the gradient of its output, and its input, if not the batch
            assert sum(live.held.values()) == 11 * rows.nbytes
            stage.weight_grad(1)
        else:
            stage.backward(1)
        assert not live.held


@pytest.mark.one_in(4)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("going", "left"),
    # out of block 1 alone stays what block 2 saves, out of all what leaves the stage or is the batch
    [([], 11), ([1], 7), ([0, 2], 4), ([0, 1, 2], 0)],
)
def test_a_tensor_that_only_offloaded_layers_save_is_offloaded_once(split: bool, going: list[int], left: int) -> None:
    rows = torch.randn(64, 8)
    with stage_of_blocks({(str(at), 0): "offload" for at in going}, rows, split) as stage, Live() as live:
        stage.forward(1, split=split)
        assert sum(live.held.values()) == 11 * rows.nbytes
        stage.offload(1)
        assert sum(live.held.values()) == 11 * rows.nbytes
        stage.free(1)
        assert sum(live.held.values()) == left * rows.nbytes
        stage.fetch(1)
        assert on_host(stage) == (11 - left) * rows.nbytes
        (stage.input_grad if split else stage.backward)(1)
        stage.weight_grad(1) if split else None
        assert not live.held
        assert not on_host(stage)


def on_host(stage: Stage) -> int:
    if stage._runner.offloads is None:
        return 0
    pieces = [one for own in stage._runner.offloads._pieces.values() for one in own]
    return sum(len(piece.host) for piece in pieces if piece is not None)


class Counts(TorchDispatchMode):
    """How often operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_recompute_cheap_does_not_recompute_expensive_operations() -> None:
    rows, counted = torch.randn(64, 8), {}
    for word in ("", "recompute", "recompute-cheap"):
        with stage_of_blocks({(str(at), 0): word for at in range(3) if word}, rows) as stage, Live() as live:
            stage.forward(1)
            held = len(live.held)
            with Counts() as counts:
                stage.backward(1)
        counted[word] = counts.calls["addmm"], counts.calls["sigmoid"], held
    # of a block without: tanh, sigmoid, mask; again: its input; cheap: its input and two products
    assert counted == {"": (0, 0, 11), "recompute": (6, 3, 2), "recompute-cheap": (0, 3, 2 + 6)}


class Rewrites(nn.Module):
    """Modifies in place what it has saved."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.sigmoid()
        y = x * 2
        x.zero_()
        return y


def test_what_is_modified_in_place_after_it_was_saved_is_an_error_as_ever() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Rewrites(), nn.Linear(8, 8))
    with (
        Pipeline(
            model, X[:2], loss_fn=mse, devices=["cpu"], num_microbatches=2, checkpoint={"0": "offload"}, schedule="1f1b"
        ) as pipe,
        pytest.raises(ExecutionError, match=r"a tensor of shape \[6, 8\] was modified in place after it was saved"),
    ):
        pipe.step(X, target=X)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_on_a_gpu_the_bits_are_the_same_and_memory_is_given_back() -> None:
    check_offloading_frees_memory("cuda:0")


@pytest.mark.parametrize("mode", ["micro-batch", "mini-batch"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_norms_count_each_microbatch_once(schedule: str, mode: Any) -> None:
    expected, actual = mixed_model(), mixed_model()
    with wrap(
        actual, places.OneProcess(2), schedule, checkpoint={"5": "recompute"}, numerics=Numerics(batch_norm=mode)
    ) as pipe:
        for step in range(2):
            compare_step(pipe, expected, X, target=Y, seed=5, step=step, batch_norm=mode)
    assert actual[5].num_batches_tracked.item() == (8 if mode == "micro-batch" else 2)


class Power(nn.Module):
    """Its output depends on a buffer that it changes, in place or by putting another one there."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("u", torch.ones(8))
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.u.mul_(0.5).add_(x.detach().mean(0))
        else:
            self.u = self.u * 0.5 + x.detach().mean(0)
        return (x * self.weight * self.u).tanh()


@pytest.mark.parametrize("in_place", [True, False])
def test_a_layer_runs_again_with_the_buffers_that_its_forward_saw(in_place: bool) -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), Power(in_place), nn.Linear(8, 4))

    expected, actual = model(), model()
    choices: dict[str, Any] = {"boundaries": [1], "num_microbatches": 3, "seed": 1, "schedule": "gpipe"}
    with Pipeline(
        actual,
        X[:2],
        loss_fn=functional.cross_entropy,
        devices=["cpu"] * 2,
        checkpoint={"1": "recompute"},
        **choices,
    ) as pipe:
        for step in range(2):
            compare_step(pipe, expected, X, target=Y, seed=1, step=step)


@pytest.mark.parametrize("word", WORDS)
def test_autocast_holds_where_a_layer_runs_again(word: str) -> None:
    expected, actual = mixed_model(), mixed_model()
    words = dict.fromkeys(LAYERS, word)
    with wrap(actual, places.OneProcess(2), "gpipe", checkpoint=words) as pipe, torch.autocast("cpu", torch.bfloat16):
        compare_step(pipe, expected, X, target=Y, seed=5)


@pytest.mark.parametrize("word", WORDS)
def test_a_loss_that_is_computed_outside_goes_backward_through_them(word: str) -> None:
    ends = []
    for words in ({}, dict.fromkeys(LAYERS, word)):
        model, x = mixed_model(), X.clone().requires_grad_()
        with wrap(model, places.OneProcess(2), "gpipe", checkpoint=words) as pipe:
            functional.cross_entropy(pipe(x), Y).backward()
        ends.append([x.grad, *(parameter.grad for parameter in model.parameters()), *model.buffers()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def compiled_are_the_same() -> bool:
    """Whether compiled layers leave the same gradients and buffers, whatever becomes of what they save."""
    ends = []
    for words in ({}, {name: WORDS[at % 3] for at, name in enumerate(LAYERS)}):
        model = mixed_model()
        with wrap(
            model, places.OneProcess(2), "zb-h1", checkpoint=words, compile={"backend": "aot_eager"}, num_microbatches=5
        ) as pipe:
            pipe.step(X, target=Y)
        ends.append([*(parameter.grad for parameter in model.parameters()), *model.buffers()])
    return all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


@compiles_in_threads
def test_compiled_layers_run_again_and_go_to_the_host() -> None:
    """In a process of its own: torch's compiler depends on what a process has run before, and leaves layers as they are
    once it has compiled them eight times.
    """
    with FORKED.Pool(1) as pool:
        assert pool.apply(compiled_are_the_same)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", ["pipedream", "pipedream-2bw"])
def test_older_weights_are_those_of_the_forward_where_a_layer_runs_again(kind: str) -> None:
    ends = []
    for words in ({}, dict.fromkeys("01234", "recompute"), dict.fromkeys("01234", "offload")):
        model = transformer()
        x, y = batch(0)
        with Pipeline(
            model,
            x[:2],
            loss_fn=mse,
            devices=["cpu"] * 4,
            schedule=kind,
            num_microbatches=6,
            boundaries=[1, 3, 4],
            checkpoint={name: word for name, word in words.items() if name in dict(model.named_children())},
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
            seed=3,
        ) as pipe:
            for step in range(4):
                x, y = batch(step)
                pipe.step(x, target=y)
            pipe.flush()
        ends.append(model.state_dict())
    assert all(torch.equal(ends[0][name], end[name]) for end in ends for name in ends[0])


def test_a_plan_states_the_checkpointing_of_each_layer(tmp_path: Any) -> None:
    words = {"3.0": "recompute", "0": "recompute"}
    with wrap(mixed_model(), places.OneProcess(2), "1f1b", checkpoint=words) as pipe:
        plan, repeated = pipe.plan, repr(pipe)
        assert list(plan.checkpoint) == ["0", "3.0"]  # in the model's order
        assert pipe.checkpoint == words
    assert "checkpoint='recompute 2 layers'" in repeated
    assert "checkpoint 'recompute 2 layers'" in plan.explain()
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.checkpoint == words
    expected, actual = mixed_model(), mixed_model()
    with Pipeline(actual, X[:2], loss_fn=functional.cross_entropy, devices=["cpu"] * 2, plan=loaded, seed=5) as pipe:
        compare_step(pipe, expected, X, target=Y, seed=5)
    (tmp_path / "plan.json").write_text((tmp_path / "plan.json").read_text().replace('"3.0": ', '"x": '))
    with pytest.raises(ScheduleError, match=r"checkpoint= may only name layers of the model; 'x' is not one of its"):
        Plan.load(tmp_path / "plan.json")


def test_the_costs_of_a_recomputed_layer_are_those_that_the_plan_is_made_with() -> None:
    with wrap(mixed_model(), places.OneProcess(2), "zb-h1", checkpoint={"3.0": "recompute"}) as pipe:
        plain = pipe._cost_model.measured()
        costs = pipe.predicted.costs
        stage = next(at for at, names in enumerate(pipe.plan.stages) if "3.0" in names)
        again = plain["3.0"].recomputed()
        assert again.memory.activation_bytes == plain["3.0"].memory.input_bytes
        sizes = [again if name == "3.0" else plain[name] for name in pipe.plan.stages[stage]]
        whole = reduce(LayerCosts.__add__, sizes)  # what one layer keeps of its output, and the next as its input, once
        in_batch = plain["0"].memory.kept_input_bytes if stage == 0 else 0
        assert costs.activation_bytes[stage] == whole.memory.activation_bytes - in_batch
        assert costs.input_grad_s[stage] == whole.input_grad_s


def test_unknown_checkpoint_options_and_layers_are_refused() -> None:
    for checkpoint, match in (
        (
            {"11": "recompute"},
            r"checkpoint= may only name layers of the model; '11' is not one of its 12 layers: 0, 1, .*\.\.\.; choose",
        ),
        (
            {"10": "forget"},
            r"option must be one of recompute, recompute-cheap, offload; layer '10' has 'forget'; choose one",
        ),
        ("sometimes", r"one of never, always, except_last, or \{layer: option\}; got 'sometimes'"),
    ):
        with pytest.raises(ScheduleError, match=match):
            wrap(mixed_model(), places.OneProcess(2), "1f1b", checkpoint=checkpoint)
    assert checkpoint_in_words(as_checkpoint({}, [])) == "never"


def test_a_layer_that_is_told_something_by_attributes_does_not_run_again() -> None:
    class Told(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), Function(lambda x: x * self.second.scale)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            self.second.scale = x.detach().mean()
            return self.second(x)

    with pytest.raises(
        GraphError, match=r"must receive all tensors from other layers as arguments; second reads attributes"
    ):
        Pipeline(Told(), X[:2], devices=["cpu"], checkpoint={"second": "recompute"}, schedule="1f1b")


def test_a_buffer_that_changes_later_than_in_the_first_forward_is_an_error() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(8))
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 3:
                self.seen.add_(x.detach().mean(0))
            return (x + self.seen).tanh()

    model = nn.Sequential(nn.Linear(8, 8), Late(), nn.Linear(8, 8))
    with (
        Pipeline(
            model,
            X[:2],
            loss_fn=mse,
            boundaries=[],
            devices=["cpu"],
            schedule="gpipe",
            num_microbatches=5,
            checkpoint={"1": "recompute"},
        ) as pipe,
        pytest.raises(ExecutionError, match=r"buffer 'seen' of layer '1' was modified between"),
    ):
        pipe.step(X, target=X)
