"""Bad input gets an error that names the place and the remedy, and is of the built-in type that users expect.

What is wrong with the choices is said at construction, what is wrong with a batch before anything runs.
"""

import math
from collections import Counter, OrderedDict

import pytest
import torch
from torch import nn

from pipesched import Costs, Numerics, Order, Pipeline, schedule, schedules
from pipesched.errors import (
    DeadlockError,
    DeviceCountError,
    ExecutionError,
    GraphError,
    InputError,
    ModelTypeError,
    PartitionError,
    PipeschedError,
    ScheduleError,
)
from pipesched.partitioning.partition import balance
from pipesched.program.lowering import add_gathers
from tests.support.refused_pipelines import ONES, build, linears, mse, refused

# ---- boundaries and stages ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("boundaries", "match"),
    [
        ([2, 1], r"boundaries must be in ascending order; got 1 \(layer 1\) after layer 2; sort the boundaries"),
        (
            [2, 2],
            r"boundaries must be in ascending order; got 2 \(layer 2\) after layer 2; sort .* and remove duplicates",
        ),
        (["3", "1"], r"boundaries must be in ascending order; got '1' \(layer 1\) after layer 3"),
        ([4], r"from 1 to 3 for 4 layers; got 4; remove or move this boundary"),
        ([0], r"other than stage 0 begins, from 1 to 3 for 4 layers; got 0; remove or"),
        ([-1], r"from 1 to 3 for 4 layers; got -1"),
        (["0"], r"other than stage 0 begins, .* got '0'"),
        (["head"], r"must name a layer; got 'head'; the layers are 0, 1, 2, 3; use one of these names, or a position"),
        ([1.5], r"a layer's position or name; got 1\.5; pass an int or a str"),
        ([True], r"a layer's position or name; got True"),
        ([None], r"a layer's position or name; got None"),
        ("2", r"boundaries must be a list of layers, or .*; got '2'; pass a list, such as \['2'\]"),
        (2, r"boundaries must be a list of layers, or .*; got 2; pass a list"),
        (0, r"boundaries must be a list of layers, or .*; got 0; pass a list"),
    ],
)
def test_bad_boundaries(boundaries, match):
    refused(PartitionError, ValueError, match, boundaries=boundaries)


def test_a_long_list_of_layers_is_cut_short():
    refused(PartitionError, ValueError, r"the layers are 0, 1, .*, 11, \.\.\.; use", linears(20), boundaries=["head"])


def test_too_many_boundaries_for_the_stages_asked_for():
    match = (
        r"got a list of 2 layers, which makes 3 stages, but the program has 2 stages; pass a list of 1 layer, or map"
    )
    refused(PartitionError, ValueError, match, boundaries=[1, 2], num_stages=2)


def test_too_many_boundaries_for_the_devices():
    match = (
        r"'1f1b' has one stage per rank; 4 stages need 4 devices, but there are 2; repeat a device, .* interleaved-1f1b"
    )
    refused(DeviceCountError, IndexError, match, boundaries=[1, 2, 3])


def test_stages_that_do_not_go_evenly_on_the_ranks():
    match = r"3 stages cannot be divided evenly among 2 ranks; pass a multiple of 2 as num_stages"
    refused(PartitionError, ValueError, match, num_stages=3, schedule="interleaved-1f1b")


def test_more_stages_than_layers():
    match = r"at least one layer; there are 5 stages on 5 ranks, but the model has 4 layers; use fewer devices"
    refused(PartitionError, ValueError, match, devices=["cpu"] * 5, schedule="1f1b")


def test_more_chunks_than_layers():
    match = r"6 stages on 3 ranks, but the model has 4 layers; .* fewer chunks per rank"
    refused(PartitionError, ValueError, match, devices=["cpu"] * 3, schedule="interleaved-1f1b")


@pytest.mark.parametrize("num_stages", [0, -1, 2.0, "2"])
def test_a_bad_number_of_stages(num_stages):
    refused(
        PartitionError,
        ValueError,
        r"num_stages must be a whole number, at least 1; got .*; pass 1",
        num_stages=num_stages,
    )


# ---- devices --------------------------------------------------------------------------------------------------------


def test_fewer_devices_than_ranks():
    match = r"3 stages need 3 devices, but there are 2; repeat a device"
    refused(DeviceCountError, IndexError, match, boundaries=[1, 2])
    refused(DeviceCountError, ValueError, match, num_stages=3, schedule="1f1b")


def test_an_empty_list_of_devices_is_refused():
    refused(
        DeviceCountError, IndexError, r"at least one device; got none; for example, pass devices=\['cpu'\]", devices=[]
    )


@pytest.mark.parametrize("devices", ["cpu", torch.device("cpu"), 2, None])
def test_devices_that_are_no_list(devices):
    refused(DeviceCountError, ValueError, r"one device for each rank; got .*; pass a list, such as", devices=devices)


@pytest.mark.parametrize("device", ["gpu0", None, "meta", "cuda:64", 64])
def test_devices_that_cannot_be_used_are_named(device):
    with pytest.raises((InputError, DeviceCountError), match=str(device)):
        build(devices=[device])


# ---- schedule and micro-batches -------------------------------------------------------------------------------------


def test_an_unknown_schedule_lists_those_that_there_are():
    match = "unknown schedule; got '1b1f'; choose one of: " + ", ".join(schedules.names())
    refused(ScheduleError, ValueError, match, schedule="1b1f")


@pytest.mark.parametrize("choice", [None, 3, dict])
def test_a_schedule_of_another_type(choice):
    refused(ScheduleError, ValueError, r"a name, a Schedule or a Program; got \w+; pass one of them", schedule=choice)


@pytest.mark.parametrize("count", [0, -1, 2.5])
def test_a_bad_number_of_microbatches(count):
    match = rf"num_microbatches must be a whole number, at least 1; got {count}; pass 1 or more"
    refused(ScheduleError, ValueError, match, num_microbatches=count)


@pytest.mark.parametrize("mode", ["sometimes", 3, True])
def test_an_unknown_checkpoint_mode_names_the_three(mode):
    match = rf"one of never, always, except_last, or {{layer: option}}; got {mode!r}; choose one of them"
    refused(ScheduleError, ValueError, match, checkpoint=mode)


def test_a_schedule_that_deadlocks_never_runs():
    @schedule("backward-first")
    def wrong(rank, shape):
        order = Order(shape)
        if rank == 0:
            order.F(0)
            order.B(0)
        else:
            order.B(rank)
            order.F(rank)
        return order

    refused((DeadlockError, ScheduleError), ValueError, "1B0", schedule=wrong, num_microbatches=1)


def test_a_program_with_more_ranks_than_devices():
    program = schedules.get("1f1b").program(3, 2)
    match = r"the program has 3 ranks, but the pipeline has 2 devices; pass 3 devices \(a device may repeat\)"
    refused(DeviceCountError, IndexError, match, schedule=program)


@pytest.mark.parametrize(
    ("choices", "match"),
    [
        (
            {"num_microbatches": 4},
            r"program has num_microbatches=3, but num_microbatches=4 was passed; pass num_microbatches=3",
        ),
        ({"num_stages": 4}, r"the program has num_stages=2, but num_stages=4 was passed; pass num_stages=2, or"),
    ],
)
def test_choices_beside_a_program_of_another_shape(choices, match):
    refused(ScheduleError, ValueError, match, schedule=schedules.get("1f1b").program(2, 3), **choices)


def test_a_program_without_backwards():
    program = schedules.get("1f1b").program(2, 3).forward()
    refused(
        ScheduleError, ValueError, r"this program has a different stage graph, or no backward passes", schedule=program
    )


def test_a_program_with_gathers():
    program = add_gathers(schedules.get("1f1b").program(2, 3))
    refused(
        ScheduleError,
        ValueError,
        r"'1f1b' is 2, but this pipeline splits no weights; pass",
        schedule=program,
    )


def test_a_short_batch_for_a_program_names_drop_last():
    with build(schedule=schedules.get("1f1b").program(2, 3)) as pipe:
        with pytest.raises(InputError, match=r"the 3 micro-batches of a step; the batch has 2 rows; .*drop_last=True"):
            pipe.step(torch.ones(2, 3), target=torch.ones(2, 3))
        pipe.step(torch.ones(3, 3), target=torch.ones(3, 3))


# ---- the model ------------------------------------------------------------------------------------------------------


class OwnForward(nn.Sequential):
    """A Sequential in name only."""

    def forward(self, x):
        return x


@pytest.mark.parametrize(
    ("model", "match"),
    [([nn.Linear(3, 3), mse], "the list contains an object of type function"), (mse, "got function")],
)
def test_what_is_no_module(model, match):
    refused(ModelTypeError, TypeError, match, model)


@pytest.mark.parametrize("model", [nn.Linear(3, 3), OwnForward(nn.Linear(3, 3))])
def test_a_module_that_calls_no_layer_is_one(model):
    refused(
        PartitionError,
        ValueError,
        "there are 2 stages on 2 ranks, but the model has 1 layer; use fewer devices",
        model,
        schedule="1f1b",
    )


def test_a_layer_that_takes_the_name_of_the_loss_module():
    model = nn.Sequential(OrderedDict(loss_fn=nn.Linear(3, 3), head=nn.Linear(3, 3)))
    match = r"must not have a layer called loss_fn, .* named loss_fn\.\*; this model has such a layer; rename it"
    refused(GraphError, ValueError, match, model, loss_fn=nn.MSELoss())


def test_a_sample_that_does_not_fit_names_the_layer_that_refused_it():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        Pipeline(linears(), torch.ones(2, 7), devices=["cpu"] * 2)
    assert caught.value.__notes__ == ["while layer '0' was being measured on cpu with the given sample"]


# ---- other choices --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, -1, 1.5, None, True, 4097])
def test_a_bad_number_of_intra_op_threads(count):
    with pytest.raises(InputError, match=rf"from 1 to 4096; got intra_op_threads={count}; pass a number from 1"):
        Numerics(intra_op_threads=count)


@pytest.mark.parametrize("seed", ["a", 1.5])
def test_a_bad_seed(seed):
    refused(InputError, ValueError, rf"a whole number; got {seed!r}; pass an int", seed=seed)


def test_a_function_that_cannot_be_called():
    refused(ModelTypeError, TypeError, "loss_fn must be a function or a Module; got 3", loss_fn=3)
    with pytest.raises(ModelTypeError, match="loss_weight must be a function or a Module; got 3"):
        Numerics(loss_weight=3)


def test_an_unknown_loss_reduction_names_the_two():
    refused(
        InputError,
        ValueError,
        r"one of mean, sum; got 'none'; pass the reduction that loss_fn uses over rows",
        numerics=Numerics(loss_reduction="none"),
    )


@pytest.mark.parametrize("dims", ["0", 0.5, True, [0, 0.5], {"x": "0"}])
def test_split_dims_that_are_no_dims(dims):
    refused(
        InputError,
        ValueError,
        r"one dim for all arguments, or one dim for each argument; got .*; pass integers",
        numerics=Numerics(split_dims=dims),
    )


def test_a_plan_of_another_model_names_the_first_difference():
    with build(boundaries=[2]) as pipe:
        plan = pipe.plan
    match = r"the plan has 4 layers, the model has 5; layer '4' is in no stage of the plan; make a new plan"
    refused(PartitionError, ValueError, match, linears(5), plan=plan)
    named = nn.Sequential(OrderedDict((name, nn.Linear(3, 3)) for name in "abcd"))
    refused(PartitionError, ValueError, r"layer 0 is '0' in the plan and 'a' in the model", named, plan=plan)


def test_choices_beside_a_plan():
    with build(boundaries=[2]) as pipe:
        plan = pipe.plan
    refused(
        PartitionError, ValueError, r"got plan= and other options, .*; pass plan= alone", plan=plan, schedule="gpipe"
    )


def test_a_plan_on_too_few_devices():
    with build(boundaries=[2]) as pipe:
        plan = pipe.plan
    refused(DeviceCountError, IndexError, r"2 ranks, but the pipeline has 1 device", plan=plan, devices=["cpu"])


def test_a_path_instead_of_a_plan():
    refused(PartitionError, ValueError, r"plan= must be a Plan; got 'plan\.json'; .*Plan\.load", plan="plan.json")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, None, "fast"])
def test_times_that_are_no_times(bad):
    with pytest.raises(
        PartitionError, match=r"costs must be finite and not negative; the time of layer 1 is .*; measure it again"
    ):
        balance([1.0, bad, 1.0], 2)
    with pytest.raises(
        ScheduleError, match=r"costs must be finite and not negative; forward_s of stage 0 is .*; measure it again"
    ):
        Costs.uniform(2, forward_s=bad)


def test_nothing_is_left_behind_by_a_construction_that_fails():
    model = linears()
    devices, grads = [p.device for p in model.parameters()], [p.grad for p in model.parameters()]
    refused(PartitionError, ValueError, "boundaries must be in ascending order", model, boundaries=[2, 1])
    assert [p.device for p in model.parameters()] == devices
    assert [p.grad for p in model.parameters()] == grads


# ---- a step ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def calls():
    """How often a layer of ``counted_model`` was called."""
    return Counter()


@pytest.fixture
def counted_model(calls):
    model = linears()
    for index, layer in enumerate(model):
        layer.register_forward_pre_hook(lambda *_, i=index: calls.update([i]))
    return model


def step_refused(model, calls, error, match, *args, choices=None, **kwargs):
    """The step raises before any layer is called, and a good step works afterwards."""
    with build(model, boundaries=[2], num_microbatches=2, **(choices or {})) as pipe:
        with pytest.raises(error, match=match) as caught:
            pipe.step(*args, **kwargs)
        assert isinstance(caught.value, PipeschedError)
        assert not calls
        pipe.forward(torch.ones(4, 3))
        assert calls


@pytest.mark.parametrize(
    ("args", "kwargs", "match"),
    [
        ((ONES,), {"target": ONES[:3]}, r"same number of rows; argument 0 has 4 rows, the target has 3; make the num"),
        ((ONES, ONES[:2]), {"target": ONES}, r"argument 0 has 4 rows, argument 1 has 2; .*split_dims=.1: None"),
        ((), {"x": ONES, "mask": ONES[:2], "target": ONES}, r"x= has 4 rows, mask= has 2"),
        (((ONES, ONES[:2]),), {"target": ONES}, r"argument 0\[0\] has 4 rows, argument 0\[1\] has 2"),
        ((ONES,), {}, r"needs a target; none was passed; pass target=, or call forward"),
        ((ONES[:0],), {"target": ONES[:0]}, r"at least one row; argument 0 has no rows; skip the empty batch"),
        (
            ("text",),
            {"target": "text"},
            r"a tensor that can be split by rows; this batch contains no such tensor; pass a tensor",
        ),
        ((torch.ones(()),), {"target": torch.ones(())}, r"this batch contains no such tensor; pass a tensor"),
    ],
)
def test_a_batch_that_cannot_be_split(counted_model, calls, args, kwargs, match):
    step_refused(counted_model, calls, InputError, match, *args, **kwargs)


def test_a_target_without_a_loss_function(counted_model, calls):
    match = (
        r"a target may only be passed to a pipeline with a loss_fn; this pipeline has none, .*; pass loss_fn= to "
        r"Pipeline, or leave target= out"
    )
    step_refused(counted_model, calls, InputError, match, ONES, target=ONES, choices={"loss_fn": None})


@pytest.mark.parametrize(
    ("dims", "match"),
    [
        (
            5,
            r"argument 0 is split along dim 5, but has a tensor of shape \[4, 3\]; .* to None to pass the whole tensor",
        ),
        (-3, r"split along dim -3, but has a tensor of shape \[4, 3\]"),
        ({"maskk": 1}, r"the call, or 'target' or 'output'; the call has no argument 'maskk'; correct the key"),
        ({0: 1, "target": 0}, r"argument 0 has 3 rows, the target has 4"),
        (
            [],
            r"one dim for each argument; got a list of 0 dims, but the call has 1 positional argument; add the missing",
        ),
    ],
)
def test_split_dims_that_do_not_fit_the_batch(counted_model, calls, dims, match):
    choices = {"numerics": Numerics(split_dims=dims), "boundaries": [2], "num_microbatches": 2}
    with build(counted_model, **choices) as pipe, pytest.raises(InputError, match=match):
        pipe.step(ONES, target=ONES)
    assert not calls


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_loss_weights_that_add_up_to_nothing(counted_model, calls, weight):
    match = r"loss weights must be finite and above 0; got .*; check loss_weight, or skip this batch"
    choices = {"numerics": Numerics(loss_weight=lambda _: weight)}
    step_refused(counted_model, calls, InputError, match, ONES, target=ONES, choices=choices)


def test_a_step_under_no_grad(counted_model, calls):
    with build(counted_model, boundaries=[2]) as pipe, torch.no_grad():
        with pytest.raises(InputError, match=r"called under no_grad; call it outside no_grad, or call evaluate"):
            pipe.step(ONES, target=ONES)
        assert not calls
        pipe.evaluate(ONES, target=ONES)


def test_every_use_after_close(counted_model, calls):
    pipe = build(counted_model, boundaries=[2])
    pipe.close()
    for use in (lambda: pipe.step(ONES, target=ONES), lambda: pipe.evaluate(ONES, target=ONES), lambda: pipe(ONES)):
        with pytest.raises(ExecutionError, match=r"closed pipeline cannot run; .*; make a new pipeline") as caught:
            use()
        assert isinstance(caught.value, RuntimeError)
    assert not calls


@pytest.mark.parametrize(
    ("loss_fn", "got"),
    [
        (lambda output, target: output - target, r"a tensor of shape \[1, 3\]"),
        (lambda output, target: (output - target).sum().item(), "float"),
        (lambda output, target: None, "NoneType"),
    ],
)
def test_a_loss_that_is_no_scalar(loss_fn, got):
    match = rf"scalar loss; got {got}; .*reduces the loss with mean\(\) or sum\(\)"
    with build(boundaries=[2], loss_fn=loss_fn) as pipe, pytest.raises(InputError, match=match) as caught:
        pipe.step(ONES, target=ONES)
    assert "stage 1, micro-batch 0" in caught.value.__notes__[0]


def test_a_model_without_a_loss_of_its_own():
    match = r"model's output or its 'loss' entry must be a scalar loss; got a tensor .*; pass a loss_fn="
    with build(boundaries=[2], loss_fn=None) as pipe, pytest.raises(InputError, match=match):
        pipe.step(ONES)


def test_layers_that_refuse_their_arguments_say_where():
    match = "unexpected keyword argument 'mask'"
    with build(boundaries=[2]) as pipe, pytest.raises(TypeError, match=match) as caught:
        pipe.step(ONES, mask=ONES, target=ONES)
    assert "0F0 (stage 0, micro-batch 0), rank 0" in caught.value.__notes__[0]
