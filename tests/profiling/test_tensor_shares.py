"""A measured profile says how much of each layer a tensor group divides, and how many bytes its ranks sum."""

import copy
import threading
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pipesched
from pipesched import Link, Links
from pipesched.errors import InputError
from pipesched.parallel import Block as EncoderBlock
from pipesched.parallel import VocabularyCrossEntropy
from pipesched.parallel.styles import divide_losses, split_model
from pipesched.parallel.tensor_group import TensorGroup
from pipesched.profiling import profile_model
from pipesched.simulation.tensor_axis import TensorAxis
from pipesched.simulation.tensor_costs import TensorCosts, shares_of
from tests.support.models import assert_equal_bits

ROWS, LENGTH, WIDTH, WORDS = 4, 6, 16, 64
STATES = ROWS * LENGTH * WIDTH * 4  # bytes of the activations between layers
SPLIT = {"*.up": "column", "*.down": "row"}


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.inner = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.down(self.inner(nn.functional.gelu(self.up(self.norm(x)))))


class Language(nn.Module):
    """An embedding, a block that runs twice, and a head whose logits the loss takes in blocks."""

    def __init__(self):
        super().__init__()
        self.words, self.block, self.head = nn.Embedding(WORDS, WIDTH), Perceptron(), nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        return self.head(self.block(self.block(self.words(x)))).transpose(1, 2)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True) for _ in range(2))

    def forward(self, x):
        return {"states": self.second(self.first(x)) * 2}


def states():
    return torch.randn(ROWS, LENGTH, WIDTH)


def profiled(model, sample, **options):
    return pipesched.profile(model, sample, thorough=False, **options)


def words():
    return torch.randint(0, WORDS, (ROWS, LENGTH))


#: (model, styles, sample, loss, target)
MODELS = {
    "in a row": lambda: (nn.Sequential(Perceptron(), nn.LayerNorm(WIDTH), Perceptron()), SPLIT, states(), None, None),
    "a layer twice": lambda: (
        Language(),
        SPLIT | {"words": "vocabulary", "head": "vocabulary"},
        words(),
        VocabularyCrossEntropy(),
        words(),
    ),
    "attention": lambda: (Encoder(), {"first": "block", "second": "block"}, states(), None, None),
    "sequences": lambda: (nn.Sequential(Perceptron(), Perceptron()), SPLIT, states(), nn.functional.mse_loss, states()),
}
SEQUENCES = {"first": EncoderBlock(sequence=True), "second": EncoderBlock(sequence=True)}


def counted(model, styles, sample, loss_fn, target, size):
    """Return the bytes that a rank sends in a forward and a backward of the whole model."""
    model, loss_fn = copy.deepcopy((model, loss_fn))
    group = TensorGroup.counting(size)
    divide_losses(loss_fn, group)
    split_model(model, styles, group)
    output = model(sample)
    if isinstance(output, dict):
        output = output["states"]
    loss = output.sum() if loss_fn is None else loss_fn(output, target)
    forward = group.counter.total().sent_bytes
    loss.backward()
    return forward, group.counter.total().sent_bytes - forward


@pytest.mark.one_in(4)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_the_layers_send_together_what_the_split_model_sends(name, size):
    torch.manual_seed(0)
    model, styles, sample, loss_fn, target = MODELS[name]()
    known = profiled(
        model, sample, rows=[ROWS], loss_fn=loss_fn, target=target, tensor_parallel=styles, tensor_size=size
    )
    costs = TensorCosts(TensorAxis(size=size), size)
    each = [costs.traffic(shares_of(node)) for node in known.graphs[ROWS].nodes.values()]
    forward, backward = counted(model, styles, sample, loss_fn, target, size)
    assert sum(own.forward_bytes for own in each) == pytest.approx(forward, abs=4 * len(each))
    assert sum(own.backward_bytes for own in each) == pytest.approx(backward, abs=4 * len(each))


def test_shares_and_sums_of_a_layer():
    model = nn.Sequential(Perceptron(), nn.LayerNorm(WIDTH))
    graph = profiled(model, states(), rows=[2, ROWS], tensor_parallel=SPLIT, tensor_size=4).graphs[ROWS]
    split, whole = (shares_of(graph.nodes[name]) for name in ("0", "1"))
    weights = sum(parameter.numel() for parameter in model[0].parameters())
    assert split.split_parameters == pytest.approx(1 - 3 * WIDTH / weights)  # the norm, and the bias of the second
    assert 0 < split.split_activations < 1
    assert (split.all_reduce_forward_bytes, split.all_reduce_backward_bytes) == (STATES, STATES)
    assert (split.all_reduces_forward, split.all_reduces_backward) == (1, 1)
    assert not whole


def test_sequence_parallel_layers_count_a_gather_and_a_scatter_as_a_sum():
    model = nn.Sequential(
        *(nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True, norm_first=True) for _ in range(2))
    )
    model = nn.Sequential(nn.Identity(), *model, nn.Identity())
    styles = {"0": "sequence-begin", "1": SEQUENCES["first"], "2": SEQUENCES["second"], "3": "sequence-end"}
    graph = profiled(model, states(), rows=[ROWS], tensor_parallel=styles).graphs[ROWS]
    for name in ("1", "2"):
        shares = shares_of(graph.nodes[name])
        assert (shares.all_reduces_forward, shares.all_reduce_forward_bytes) == (2, 2 * STATES)


@pytest.mark.parametrize("size", [2, 4])
def test_the_costs_of_a_rank_are_those_of_the_split_copy(monkeypatch, size):
    """Where the planner divides a layer among as many ranks as the copy, it gets the copy's own costs."""
    measure = profile_model.measure

    def by_weights(known, *args):
        """Give each layer times in proportion to its weights."""
        costs = measure(known, *args)
        sizes = {name: sum(one.numel() for one in known.modules[name].parameters()) for name in costs}
        return {
            name: replace(own, forward_s=1e-6 * sizes[name], backward_s=2e-6 * sizes[name], weight_grad_s=0.0)
            for name, own in costs.items()
        }

    monkeypatch.setattr(profile_model, "measure", by_weights)
    model = nn.Sequential(Perceptron(), nn.LayerNorm(WIDTH), Perceptron())
    known = profiled(model, states(), rows=[ROWS], tensor_parallel=SPLIT, tensor_size=size)
    split_model(model, SPLIT, TensorGroup.counting(size))
    copied = profiled(model, states(), rows=[ROWS])
    divided = TensorCosts(TensorAxis(size=size), size).divided(known)
    for name in known.graphs[ROWS]:
        own, due = divided.graphs[ROWS].nodes[name], copied.graphs[ROWS].nodes[name]
        for key in ("forward_s", "backward_s", "parameter_bytes", "activation_bytes"):
            assert own[key] == pytest.approx(
                due[key], rel=1e-9, abs=1e-15 if key.endswith("_s") else 4
            )  # each is rounded


def test_the_model_stays_as_it_was():
    torch.manual_seed(0)
    model, random = nn.Sequential(Perceptron(), Perceptron()), torch.get_rng_state()
    before, kinds = copy.deepcopy(model.state_dict()), [type(one) for one in model.modules()]
    profiled(model, states(), rows=[ROWS], tensor_parallel=SPLIT)
    torch.set_rng_state(random)
    assert_equal_bits(model.state_dict(), before)
    assert [type(one) for one in model.modules()] == kinds
    assert all(one.grad is None for one in model.parameters())


def test_a_model_on_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(Perceptron(), Perceptron())
    graph = profiled(model, states(), rows=[ROWS], tensor_parallel=SPLIT).graphs[ROWS]
    assert shares_of(graph.nodes["1"]).all_reduce_backward_bytes == STATES


class Recomputing(Perceptron):
    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()  # a dropout must not run in a backward

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def test_what_a_layer_computes_again_counts_for_its_backward():
    model = nn.Sequential(Recomputing(), Recomputing())
    graph = profiled(model, states(), rows=[ROWS], tensor_parallel=SPLIT).graphs[ROWS]
    for name in ("0", "1"):
        shares = shares_of(graph.nodes[name])
        assert shares.all_reduces_forward == 1
        assert shares.all_reduces_backward in (1, 2)  # torch may stop before the last sum


def test_a_frozen_layer_exchanges_nothing_in_its_backward():
    model = nn.Sequential(Perceptron(), Perceptron())
    model.requires_grad_(False)
    graph = profiled(model, states(), rows=[ROWS], tensor_parallel=SPLIT).graphs[ROWS]
    assert [shares_of(graph.nodes[name]).all_reduces_forward for name in ("0", "1")] == [1, 1]
    assert [shares_of(graph.nodes[name]).all_reduces_backward for name in ("0", "1")] == [0, 0]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_callers_mode_changes_nothing(mode):
    model, sample = nn.Sequential(Perceptron(), Perceptron()), states()
    with mode():
        graph = profiled(model, sample, rows=[ROWS], tensor_parallel=SPLIT).graphs[ROWS]
    assert shares_of(graph.nodes["1"]).all_reduces_backward == 1


def test_a_saved_profile_says_the_same(tmp_path):
    known = profiled(nn.Sequential(Perceptron(), Perceptron()), states(), tensor_parallel=SPLIT)
    known.save(tmp_path / "profile.json")
    loaded = pipesched.Profile.load(tmp_path / "profile.json")
    for rows, graph in known.graphs.items():
        assert all(shares_of(loaded.graphs[rows].nodes[name]) == shares_of(graph.nodes[name]) for name in graph)


def test_profiles_in_a_cache_are_told_apart(tmp_path):
    model, sample = nn.Sequential(Perceptron(), Perceptron()), states()
    for options in ({}, {"tensor_parallel": SPLIT}, {"tensor_parallel": SPLIT, "tensor_size": 4}):
        profiled(model, sample, rows=[ROWS], cache=tmp_path, **options)
    assert len(list(tmp_path.glob("*.json"))) == 3


def test_tune_splits_a_measured_model_that_does_not_fit_otherwise():
    torch.manual_seed(0)
    model = nn.Sequential(Perceptron(), Perceptron())
    size = sum(parameter.nbytes for parameter in model.parameters())
    wanted = {"num_ranks": 4, "batch_size": 8, "num_microbatches": 2, "axes": "auto", "links": Links(inside=Link(1e-6))}
    limits = {"memory_limit_bytes": 2 * size + 8 * STATES, "optimizer": "adamw", "zero": 0}
    plan = pipesched.tune(model, states(), **wanted, **limits, tensor=(1, 2, 4), tensor_parallel=SPLIT)
    assert plan.tensor is not None
    assert plan.mesh["tp"] == plan.tensor.size > 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tensor": (1, 2)}, "got up to 2 ranks, but no layers that can be split; pass tensor_parallel='auto'"),
        ({"tensor_parallel": SPLIT}, "all tensor groups have 1 rank; pass axes='auto' and tensor="),
        ({"tensor": (1, 2, 3), "tensor_parallel": SPLIT}, "3"),
        ({"tensor": (1, 5), "tensor_parallel": SPLIT}, "5"),
        ({"tensor": (1, 2), "tensor_parallel": {"*.no": "row"}}, "no"),
        ({"tensor": (1, 2), "tensor_parallel": 3}, "tensor_parallel"),
        ({"tensor": (1, 2), "tensor_parallel": SPLIT, "profile": True}, "leave tensor_parallel= out, and measure"),
        ({"tensor": (1, 2), "profile": True}, r"pipesched\.profile\(tensor_parallel=\.\.\.\)"),
    ],
)
def test_what_cannot_be_split_is_refused(options, text):
    model = nn.Sequential(Perceptron(), Perceptron())
    if options.pop("profile", False):
        options["profile"] = profiled(model, states(), rows=[ROWS])
    with pytest.raises((InputError, pipesched.errors.PipeschedError), match=text):
        pipesched.tune(model, states(), num_ranks=12, batch_size=24, axes="auto", **options)


class Locked(Perceptron):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class Opened(Locked):
    """A class with the remedy that the error names."""

    def __deepcopy__(self, memo):
        made = Opened()
        made.load_state_dict(self.state_dict())
        return made


def test_a_model_that_cannot_be_copied_is_refused_and_the_remedy_works():
    with pytest.raises(InputError, match=r"copy\.deepcopy .* raised TypeError: .*lock.*__deepcopy__"):
        profiled(nn.Sequential(Locked()), states(), rows=[ROWS], tensor_parallel=SPLIT)
    graph = profiled(nn.Sequential(Opened()), states(), rows=[ROWS], tensor_parallel=SPLIT).graphs[ROWS]
    assert shares_of(graph.nodes["0"]).all_reduces_forward == 1


@pytest.mark.parametrize("size", [0, 1, 2.0, True, "2"])
def test_a_group_has_at_least_two_ranks(size):
    with pytest.raises(InputError, match="at least 2"):
        profiled(nn.Sequential(Perceptron()), states(), tensor_parallel=SPLIT, tensor_size=size)
