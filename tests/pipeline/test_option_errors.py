"""Every argument of Pipeline with values that it does not take, and what else goes wrong with models and steps."""

import inspect
import re

import pytest
import torch
from torch import nn

from pipesched import Distributed, Links, Numerics, Pipeline, Search, graph_of, profile
from pipesched.errors import (
    ArgumentError,
    DeviceCountError,
    GraphError,
    InputError,
    ModelTypeError,
    PartitionError,
    PipeschedError,
    ScheduleError,
)
from pipesched.testing import reference_step
from tests.support.refused_pipelines import ONES, build, linears, mse, refused
from tests.support.torch_versions import compiles_in_threads
from tests.support.wrong_arguments import STRANGE, but, cases
from tests.support.wrong_arguments import refused as strange_refused

LISTS = "an empty list", "an empty dict"  # of nothing
NUMBERS = "zero", "a number", "negative", "a fraction", "NaN", "infinite"
ARGUMENTS = {
    "model": but("a module"),
    "sample": but("a tensor"),  # a layer refuses that
    "devices": but(),
    "mesh": but("None"),
    "loss_fn": but("None", "a class"),
    "num_stages": but("None", "a number"),
    "schedule": but(),
    "num_microbatches": but("None", "a number"),
    "boundaries": but("None", *LISTS),
    "together": but(*LISTS, "a tensor"),
    "checkpoint": but("None", "an empty dict"),
    "optimizer": but("None", "a module", "a class"),
    "wrap": but("None", "a class"),
    "compile": but("a bool", "an empty dict"),
    "seed": but("None", "a bool", "zero", "a number", "negative"),
    "plan": but("None"),
    "search": but("None"),
    "numerics": but("None"),
    "distributed": but("None"),
    "init": but("None"),
}
SEARCH = {
    "links": but("None"),
    "profile": but("None"),
    "batch_size": but("None", "a number"),
    "memory_limit_bytes": but("None", "a number", "a fraction"),
    "offload": but("a bool"),
    "effort": but("a number"),
}
NUMERICS = {
    "loss_weight": but("None", "a function", "a module", "a class"),
    "loss_reduction": but("None"),
    "split_dims": but("None", "zero", "a number", "negative", "an empty list", "a list of None", *LISTS, "a dict"),
    "batch_norm": but(),
    "intra_op_threads": but("a number"),
    "clip_grad_norm": but("None", "a number", "a fraction"),
    "norm_type": but(),
    "scaler": but("None"),
    "on_nonfinite": but("None"),
}
DISTRIBUTED = {
    "inputs": but(),
    "timeout": but("None"),
    "redundancy": but("None"),
    "on_failure": but(),
    "on_recovery": but("None"),  # without redundancy=
}


def make(**given):
    good = {"model": linears(), "sample": torch.ones(2, 3), "loss_fn": mse, "schedule": "1f1b"}
    devices = {} if "mesh" in given else {"devices": ["cpu"] * 2}
    Pipeline(**good | devices | given).close()


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("argument", "name"), cases(ARGUMENTS))
def test_an_argument_of_pipeline_that_is_not_taken(argument, name):
    strange_refused(make, **{argument: STRANGE[name]})


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("option", "name"), cases(SEARCH))
def test_an_option_of_the_search_that_is_not_taken(option, name):
    strange_refused(lambda **given: make(search=Search(**given)), **{option: STRANGE[name]})


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("option", "name"), cases(NUMERICS))
def test_an_option_of_the_numbers_that_is_not_taken(option, name):
    strange_refused(lambda **given: make(numerics=Numerics(**given)), **{option: STRANGE[name]})


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("option", "name"), cases(DISTRIBUTED))
def test_an_option_of_processes_that_is_not_taken(option, name):
    strange_refused(lambda **given: make(distributed=Distributed(**given)), **{option: STRANGE[name]})


def test_pipeline_has_at_most_20_keyword_arguments():
    """More options belong in Search, Numerics or Distributed, or in a group of their own."""
    parameters = inspect.signature(Pipeline).parameters.values()
    assert sum(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters) <= 20


# ---- functions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "function", "match"),
    [
        ("wrap", 3, r"wrap must be a function or a Module; got 3; pass a function"),
        (
            "wrap",
            lambda stage: stage,
            r"wrap\(stage_module, stage\); got .*too many positional arguments\); pass a function",
        ),
        ("loss_fn", lambda output: output, r"loss_fn\(output, target\); got "),
        ("loss_fn", nn.MSELoss, r"got the class MSELoss; pass an instance, MSELoss\(\)"),
        ("optimizer", torch.optim.SGD([nn.Parameter(torch.ones(1))]), r"a function params -> Optimizer, .* got SGD;"),
        ("optimizer", lambda: None, r"optimizer\(params\); got .*; pass a function that takes these arguments"),
    ],
)
def test_functions_that_do_not_take_what_they_are_called_with(name, function, match):
    refused(ModelTypeError, TypeError, match, **{name: function})


def test_functions_are_looked_at_before_layers_are_measured():
    def never(*_):
        raise AssertionError

    model = linears()
    model[0].register_forward_pre_hook(never)
    optimizer = torch.optim.SGD(model.parameters())
    refused(
        ModelTypeError,
        TypeError,
        "optimizer must be a function",
        model,
        optimizer=optimizer,
        search=Search(memory_limit_bytes=10**9),
    )


@pytest.mark.parametrize("weight", [None, "much", [1.0, 2.0]])
def test_a_loss_weight_that_is_no_number(weight):
    match = r"loss_weight must return one number for each micro-batch; got .*; for example, return"
    with (
        build(boundaries=[2], numerics=Numerics(loss_weight=lambda _: weight)) as pipe,
        pytest.raises(InputError, match=match),
    ):
        pipe.step(ONES, target=ONES)


# ---- compile --------------------------------------------------------------------------------------------------------


@compiles_in_threads
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mod": "reduce-overhead"}, "unexpected keyword argument 'mod'"),
        ({"mode": "fast"}, "mode=fast"),
        ({"backend": "nothing"}, "nothing"),
        ({"backend": 3}, "a name or a function, not 3"),
        ({3: 4}, "must be strings"),
    ],
)
def test_options_that_torch_compile_does_not_take(options, says):
    match = rf"valid arguments of torch\.compile; with .*{says}.*correct the arguments"
    refused(InputError, ValueError, match, compile=options)


# ---- models ---------------------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(3)])
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def compiled_in_place(model):
    model.compile()
    return model


@pytest.mark.parametrize(
    ("wrapped", "match"),
    [
        (torch.compile, "OptimizedModule is compiled into one graph; pass the original model, with compile=True"),
        (compiled_in_place, "is compiled into one graph"),
        (lambda model: torch.jit.trace(model, torch.ones(2, 3)), "is scripted or traced; pass the original module"),
        (nn.DataParallel, r"DataParallel is wrapped for replication; pass its \.module"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", [linears, Blocks])
def test_models_whose_layers_are_not_called_one_by_one(kind, wrapped, match):
    refused(ModelTypeError, TypeError, match, wrapped(kind()))


def test_a_container_that_is_compiled_is_one_layer():
    model = Blocks()
    for block in model.blocks:
        block.compile(backend="eager")
    with build(model, schedule="1f1b") as pipe:
        assert [name for stage in pipe.plan.stages for name in stage] == ["blocks.0", "blocks.1", "blocks.2", "head"]


@pytest.mark.parametrize("kind", ["a function", "None", "a number", "a class"])
@pytest.mark.parametrize("take", [graph_of, profile])
def test_graphs_and_profiles_are_of_modules(take, kind):
    with pytest.raises(
        ModelTypeError, match=r"the model must be an nn\.Module or a list of nn\.Modules; got .*; pass the module"
    ):
        take(STRANGE[kind], torch.ones(2, 3))


@pytest.mark.parametrize("sample", [None, {}, (), torch.ones(0, 3), "text", {"x": 3}])
@pytest.mark.parametrize("take", [graph_of, profile])
def test_a_sample_has_a_tensor(take, sample):
    with pytest.raises(InputError, match=r"a sample must be one example micro-batch, .* got .*; pass a tensor, a tupl"):
        take(linears(), sample)


class TakesADict(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, batch):
        return self.head(batch["x"])


@pytest.mark.parametrize(
    ("sample", "got"),
    [
        ({"x": torch.ones(2, 3)}, r"keyword x \(missing a required argument: 'batch'\)"),
        ((torch.ones(2, 3), torch.ones(2, 3)), r"2 positional arguments \(too many positional arguments\)"),
    ],
)
@pytest.mark.parametrize("take", [graph_of, profile, lambda *taken: Pipeline(*taken, devices=["cpu"])])
def test_a_sample_is_what_the_forward_takes(take, sample, got):
    match = rf"model's forward, TakesADict\.forward\(batch\); the sample has {got}; pass .* that is a dict"
    with pytest.raises(InputError, match=match):
        take(TakesADict(), sample)


def test_a_forwards_own_error_is_raised_as_it_is():
    with pytest.raises(TypeError, match="indices"):
        graph_of(TakesADict(), ((torch.ones(2, 3),),))


# ---- a model that has changed since ---------------------------------------------------------------------------------


def replaced(model):
    model[2] = nn.Linear(3, 3)


def appended(model):
    model.append(nn.ReLU())


def removed(model):
    del model[3]


def replaced_inside(model):
    model.blocks[1][0] = nn.Linear(3, 3)


def another_head(model):
    model.head = nn.Linear(3, 3)


@pytest.mark.parametrize(
    ("kind", "change", "match"),
    [
        (linears, replaced, "in the model, '2' is a new module"),
        (linears, appended, "in the model, '4' is a new module"),
        (linears, removed, "in the model, 3 of 4 modules are left"),
        (Blocks, replaced_inside, r"in blocks\.1, '0' is a new module"),
        (Blocks, another_head, "in the model, 'head' is a new module"),
    ],
)
def test_a_layer_that_was_replaced_since_is_not_trained_silently(kind, change, match):
    model = kind()
    with build(model, schedule="1f1b") as pipe:
        pipe.step(ONES, target=ONES)
        change(model)
        for use in (lambda: pipe.step(ONES, target=ONES), lambda: pipe.evaluate(ONES, target=ONES), lambda: pipe(ONES)):
            with pytest.raises(
                GraphError, match=rf"had when the pipeline was built; .*{match}; restore the old modules, or close"
            ):
                use()


def test_modules_that_do_not_run_may_change_between_steps():
    model = Blocks()
    model.register_module("other", nn.Linear(3, 3))
    with build(model, schedule="1f1b") as pipe:
        pipe.step(ONES, target=ONES)
        model.another = nn.Linear(3, 3)
        del model.other
        model.head.weight = nn.Parameter(torch.zeros(3, 3))
        pipe.step(ONES, target=ONES)
        assert model.head.weight.grad is not None


# ---- init -----------------------------------------------------------------------------------------------------------


def empty():
    with torch.device("meta"):
        return linears()


STATE = linears().state_dict()


@pytest.mark.parametrize(
    ("init", "error", "match"),
    [
        (
            STATE | {"0.weight": None},
            InputError,
            r"from names to tensors that are not on the meta device; '0\.weight' is None; pass the state",
        ),
        (STATE | {"0.weight": [1.0]}, InputError, r"'0\.weight' is \[1\.0\]"),
        (
            STATE | {"0.weight": torch.ones(2, 3)},
            InputError,
            r"shape \[3, 3\] in the model, but torch\.float32 of shape \[2, 3\] in the mapping; use",
        ),
        (STATE | {"0.weight": torch.ones(3, 3, device="meta")}, InputError, r"tensors that are not on the meta device"),
        (
            STATE | {3: torch.ones(3)},
            InputError,
            r"unknown names \(1 of 9 that were passed\): 3; remove the unknown",
        ),
        (
            {},
            InputError,
            r"state_dict; missing names \(8 of the model's 8\): 0\.weight, .* and 3 more; add or rename the missing",
        ),
        ([], InputError, r"missing names \(8 of the model's 8\): "),
        ([3], InputError, r"or safetensors files; got list; pass one of them"),
        ("rest", InputError, "rest does not exist; check the path"),
        (3, InputError, "got int; pass one of them"),
        (lambda: None, ModelTypeError, r"init\(module\); got "),
        (nn.Linear, ModelTypeError, "got the class Linear"),
    ],
)
def test_what_a_model_cannot_be_filled_from(init, error, match):
    with pytest.raises(error, match=match) as caught:
        build(empty(), init=init, schedule="1f1b").close()
    assert isinstance(caught.value, PipeschedError)


def test_an_error_of_the_function_that_fills_says_where():
    def fail(module):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        build(empty(), init=fail, schedule="1f1b").close()
    assert caught.value.__notes__ == ["while init filled '0'"]


# ---- the rest -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [True, 1.5, "4", [4], {}])
def test_counts_that_are_no_whole_numbers(count):
    refused(
        ScheduleError,
        ValueError,
        r"num_microbatches must be a whole number, at least 1; got .*; pass",
        num_microbatches=count,
    )
    refused(
        PartitionError, ValueError, r"num_stages must be a whole number, at least 1; got .*; pass 1", num_stages=count
    )


@pytest.mark.parametrize("limit", ["10 G bytes", ["10 GB", "much"], True, [1e9], [1e9, None], [1e9, -1.0]])
def test_invalid_memory_limits_are_refused(limit):
    match = r"bytes, which applies to each rank, or a list .* each rank \(2 in all\); got .*; for example, pass"
    refused(PartitionError, ValueError, match, search=Search(memory_limit_bytes=limit))


@pytest.mark.parametrize("devices", [["cpu", "gpu"], [["cpu"]], [1.5], ["CPU"], [True], {"cpu"}, b"cpu", ["cpu", None]])
def test_devices_of_other_types(devices):
    with pytest.raises((InputError, DeviceCountError), match=r"; got .*pass|; got .*choose"):
        build(devices=devices)


@pytest.mark.parametrize(
    ("name", "near"), [("1F1BB", "1f1b"), ("gpip", "gpipe"), ("zbv", "zb-v"), ("dualpipe_v", "dual")]
)
def test_a_misspelt_schedule_names_the_nearest(name, near):
    refused(
        ScheduleError,
        ValueError,
        f"unknown schedule; got '{name}'; choose one of.*the nearest is '{near}",
        schedule=name,
    )


def test_links_can_be_made_without_arguments():
    assert Links().inside.latency_s == 0


def test_a_batch_that_is_not_dense():
    with (
        build(boundaries=[2]) as pipe,
        pytest.raises(InputError, match=r"has a tensor of layout torch\.sparse_coo; make the tensor d"),
    ):
        pipe.step(ONES.to_sparse(), target=ONES)


# ---- batches in another form than the sample's ----------------------------------------------------------------------


class Keyed(nn.Module):
    """Takes one argument, a dict."""

    def __init__(self):
        super().__init__()
        self.layers = linears()

    def forward(self, batch):
        return self.layers(batch["x"])


class Named(Keyed):
    """Takes keywords alone."""

    def forward(self, *, x, mask=None):
        return self.layers(x) if mask is None else self.layers(x) * mask


@pytest.mark.one_in(4)
@pytest.mark.parametrize("method", ["step", "evaluate", "forward"])
@pytest.mark.parametrize(
    ("model", "sample", "args", "kwargs", "own", "given", "why"),
    [
        (Keyed, ({"x": ONES},), (ONES,), {}, "{'x': tensor}", "tensor", "GraphError"),
        (Keyed, ({"x": ONES},), ((ONES,),), {}, "{'x': tensor}", "(tensor,)", "TypeError: tuple indices"),
        (Keyed, ({"x": ONES},), ({"y": ONES},), {}, "{'x': tensor}", "{'y': tensor}", "KeyError: 'x'"),
        (Keyed, ({"x": ONES},), (), {"x": ONES}, "{'x': tensor}", "x=tensor", "TypeError: .* keyword argument 'x'"),
        (Named, {"x": ONES}, (ONES,), {}, "x=tensor", "tensor", "TypeError: .* takes 1 positional argument"),
        (linears, ONES, ([ONES],), {}, "tensor", "[tensor]", "TypeError: linear"),
    ],
)
def test_a_batch_in_another_form_than_the_samples(method, model, sample, args, kwargs, own, given, why):
    forms = rf"{method}\({re.escape(own)}\); got {method}\({re.escape(given)}\)"
    match = (
        rf"must have the form of the sample, {forms}, and the model raised {why}.*; pass the batch in the sample's form"
    )
    with Pipeline(model(), sample, loss_fn=mse, devices=["cpu"] * 2, boundaries=[2]) as pipe:
        target = {} if method == "forward" else {"target": ONES}
        with pytest.raises(ArgumentError, match=match) as caught:
            getattr(pipe, method)(*args, **kwargs, **target)
        assert isinstance(caught.value, TypeError)
        assert "micro-batch 0), rank" in caught.value.__notes__[0]


class Masked(Keyed):
    """Code that goes another way for other types and dimensions."""

    def forward(self, x, mask=None):
        x = self.layers(x if x.dim() == 2 else x.flatten(1))
        if mask is not None and mask.dtype == torch.bool:
            x = x * mask.float()
        return x


@pytest.mark.parametrize(
    "batch", [{"x": ONES, "mask": ONES}, {"x": ONES[:, :, None], "mask": ONES.bool()}, {"x": ONES, "mask": None}]
)
def test_a_batch_of_other_types_or_dimensions_takes_its_own_path(batch):
    own, plain = Masked(), Masked()
    plain.load_state_dict(own.state_dict())
    sample = {"x": ONES, "mask": ONES.bool()}
    with Pipeline(own, sample, loss_fn=mse, devices=["cpu"] * 2, boundaries=[2], num_microbatches=1) as pipe:
        due = reference_step(plain, **batch, target=ONES, loss_fn=mse)
        assert torch.equal(pipe.step(**batch, target=ONES), due)


def test_a_batch_with_an_unused_extra_entry_is_accepted():
    with Pipeline(Keyed(), ({"x": ONES},), loss_fn=mse, devices=["cpu"] * 2, boundaries=[2]) as pipe:
        assert pipe.step({"x": ONES, "id": 3}, target=ONES).isfinite()


def test_what_a_layer_raises_of_a_batch_in_the_samples_form_is_its_own():
    with build(boundaries=[2]) as pipe, pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        pipe.step(torch.ones(4, 7), target=ONES)


def test_a_sample_that_a_captured_models_layer_refuses_names_it():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        Pipeline(Keyed(), ({"x": torch.ones(2, 7)},), devices=["cpu"] * 2)
    assert caught.value.__notes__ == ["while layer 'layers.0' was running with the given sample"]
