"""What holds on devices for which torch makes new Parameters, and on machines with many devices."""

import copy
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import pipesched
from pipesched.devices.generators import default_generator, generators_kept
from pipesched.model.state_guard import untouched
from tests.simulated.features import outcome, same

MOVED = [
    "schedule 1f1b",
    "schedule chimera",
    "skip connections and ties",
    "ties over three devices",
    "gru",
    "batch norm of micro batches",
    "saved and loaded",
    "replanned",
    "checked",
]


@contextmanager
def new_parameters(sim):
    """Within the ``with`` block, `Module.to` makes new Parameters."""
    sim.keep_parameters(False)
    try:
        yield
    finally:
        sim.keep_parameters(True)


@pytest.mark.one_in(12)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", MOVED)
def test_parameters_stay_the_same_objects_where_module_to_makes_new_ones(sim, name):
    torch.set_num_threads(1)
    expected = outcome(name, "cpu")
    sim.judge.forget()
    with new_parameters(sim):
        assert same(expected, outcome(name, "sim"))
    assert not sim.judge.violations, str(sim.judge.violations[0])


def test_a_pipeline_keeps_ties_where_module_to_loses_them(sim):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    first = model[0].weight
    with new_parameters(sim):
        copied = copy.deepcopy(model).to("sim:0")
        assert copied[1].weight is not copied[0].weight
        options = {"devices": ["sim:0"], "schedule": "1f1b", "num_microbatches": 2}
        with pipesched.Pipeline(model, torch.ones(2, 4), loss_fn=nn.MSELoss(), **options):
            assert model[1].weight is model[0].weight is first
            assert first.device == torch.device("sim:0")


def test_hooks_of_weights_run_after_they_have_moved(sim):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    seen = []
    model[0].weight.register_hook(lambda grad: seen.append(grad.device))
    options = {"devices": ["sim:1"], "schedule": "1f1b", "num_microbatches": 1}
    with new_parameters(sim), pipesched.Pipeline(model, torch.ones(2, 4), loss_fn=nn.MSELoss(), **options) as pipe:
        pipe.step(torch.ones(2, 4), target=torch.ones(2, 4))
    assert seen == [torch.device("sim:1")]


def test_only_the_generators_of_the_models_devices_are_kept():
    others = [default_generator(torch.device("sim", index)).get_state() for index in (1, 2)]
    model = nn.Linear(4, 4).to("sim:1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's fork_rng warns if there are many devices
        with untouched(model, True):
            torch.rand(3, device="sim:1")
            torch.rand(3, device="sim:2")
            torch.rand(3)
    after = [default_generator(torch.device("sim", index)).get_state() for index in (1, 2)]
    assert torch.equal(others[0], after[0])
    assert not torch.equal(others[1], after[1])


def fails(*_):
    raise ValueError("a negative number")


def test_generators_are_kept_after_an_error():
    before = torch.get_rng_state(), default_generator(torch.device("sim:0")).get_state()
    with pytest.raises(ValueError, match="negative"), generators_kept([torch.device("sim:0")]):
        fails(torch.rand(1), torch.rand(1, device="sim:0"))
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], default_generator(torch.device("sim:0")).get_state())
