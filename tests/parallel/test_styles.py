"""Splitting a model by names: patterns, sizes and ties are checked, and the model stays the user's."""

import copy

import pytest
import torch
from torch import nn

from pipesched.errors import ArgumentError, InputError
from pipesched.parallel.divided_regions import divided_regions
from pipesched.parallel.layer_styles import Block, Column, Heads, Row, SequencePart
from pipesched.parallel.styles import split_model, styles_of, unsplit_model
from pipesched.parallel.tensor_group import TensorGroup
from pipesched.parallel.weight_split import WeightSplit
from tests.support.divided_layers import Perceptron


class Blocks(nn.Module):
    """Three perceptrons between an embedding and a head with the same weight."""

    def __init__(self, *, tied=True):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(Perceptron(8, 12, dtype=torch.float32) for _ in range(3))
        self.head = nn.Linear(8, 12, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, numbers):
        x = self.embedding(numbers)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def group(size=2, rank=0):
    return TensorGroup.counting(size, rank)


SPLIT = {"blocks.*.up": "column", "blocks.*.down": "row"}
ENDS = {"embedding": "vocabulary", "head": "column-gathered"}


def test_modules_and_parameters_stay_the_same_objects_and_hold_blocks():
    model = Blocks()
    objects = dict(model.named_modules()) | dict(model.named_parameters())
    whole = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    splits = split_model(model, SPLIT | ENDS, group(2, 1))
    assert {
        name: part for named in (model.named_modules(), model.named_parameters()) for name, part in named
    } == objects
    assert isinstance(model.blocks[0].up, nn.Linear)
    assert model.blocks[0].up.out_features == 6
    assert model.blocks[2].down.in_features == 6
    assert model.embedding.num_embeddings == 6
    assert model.embedding.weight is model.head.weight
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, splits.own(name, whole[name])), name
        assert weight.untyped_storage().nbytes() == weight.nbytes  # the whole weight is freed
        if name in splits:
            assert weight.numel() * 2 == whole[name].numel()
            assert tuple(splits.whole_shape(name, weight.shape)) == whole[name].shape
    assert {name for name in whole if name not in splits} == {
        f"blocks.{i}.{name}" for i in range(3) for name in ("norm.weight", "norm.bias", "down.bias")
    }
    assert splits["blocks.0.down.weight"] == WeightSplit(dim=1)


def test_a_split_model_becomes_whole_again():
    model = Blocks()
    kinds = {name: type(module) for name, module in model.named_modules()}
    facts = {name: {k: v for k, v in vars(module).items() if type(v) is int} for name, module in model.named_modules()}
    splits = split_model(model, SPLIT | ENDS, group())
    assert type(model.blocks[0].up).__name__ == "ColumnLinear"
    assert type(model.blocks[0].norm).__name__ == "LayerNorm"
    unsplit_model(model)
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    assert facts == {n: {k: v for k, v in vars(m).items() if type(v) is int} for n, m in model.named_modules()}
    for name, weight in model.named_parameters():
        if name in splits:
            weight.data = splits[name].joined([weight.data, weight.data])
    model(torch.randint(12, (2, 3)))


def test_a_graph_made_before_the_split_does_not_matter():
    model = Blocks()
    output = model(torch.randint(12, (2, 3)))
    split_model(model, SPLIT, group())
    model(torch.randint(12, (2, 3))).sum().backward()
    assert model.blocks[0].up.weight.grad.shape == (6, 8)
    assert output.requires_grad


def test_gradients_are_split_with_their_weights():
    model = Blocks(tied=False)
    model(torch.randint(12, (2, 3))).sum().backward()
    whole = model.blocks[0].down.weight.grad.clone()
    split_model(model, SPLIT, group(2, 1))
    assert torch.equal(model.blocks[0].down.weight.grad, whole[:, 6:])


def test_models_on_the_meta_device_hold_blocks():
    with torch.device("meta"):
        model = Blocks()
    split_model(model, SPLIT | ENDS, group())
    assert all(weight.is_meta for weight in model.parameters())
    assert model(torch.zeros(2, 3, dtype=torch.long, device="meta")).shape == (2, 3, 12)


def test_copies_of_a_split_model_have_the_same_group():
    model = Blocks()
    own = group()
    split_model(model, SPLIT, own)
    twin = copy.deepcopy(model)
    twin(torch.randint(12, (2, 3))).sum().backward()
    assert own.counter.total(kind="all-reduce").calls == 6  # of three blocks


REFUSED = {
    "no such layer": (
        {"blocks.*.uq": "column"},
        r"'blocks\.\*\.uq' matches none of \d+ names; similar are 'blocks\.\d\.up'.* correct the pattern",
    ),
    "part of a name": ({"up": "column"}, "'up' matches none"),
    "two patterns": ({"blocks.*.up": "column", "blocks.0.*": "row"}, r"'blocks\.0\.up' matches 'blocks\.\*\.up' and"),
    "unknown style": ({"blocks.*.up": "colum"}, "'blocks.0.up' got 'colum'; choose one of: column, row,"),
    "not a linear layer": ({"blocks.*.norm": "row"}, r"'blocks\.0\.norm' is a LayerNorm with neither"),
    "uneven sections": ({"blocks.*.up": Column(sections=5)}, r"'blocks\.0\.up' has 12 outputs for 5 sections"),
    "wrong sizes": ({"blocks.*.up": Column(sections=(4, 6))}, r"has 12 outputs, but \[4, 6\] add up to 10"),
    "gathered sections": ({"blocks.*.up": Column(sections=3, gathered=True)}, "must have one section"),
    "no heads": ({"blocks.*.up": "heads"}, r"'blocks\.0\.up' is a Linear; pass Heads\('num_heads'\)"),
    "no such attribute": ({"blocks.*": Heads("num_heads")}, r"'blocks\.0'.*has num_heads=None"),
    "not a block": ({"blocks.*": "block"}, r"'blocks\.0' is a Perceptron; give styles to the layers inside it"),
    "a head alone": ({"head": "column-gathered"}, "'embedding.weight' is the weight 'head.weight'.*'embedding' has no"),
    "an embedding alone": ({"embedding": "vocabulary"}, "'head.weight' is the weight 'embedding.weight'"),
    "ties split apart": ({"embedding": "vocabulary", "head": "row-whole-input"}, "are one weight"),
    "a parameter by columns": ({"blocks.*.norm.weight": "column"}, "a parameter must have the style 'heads'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_names_and_styles_are_refused_by_name(case):
    wanted, message = REFUSED[case]
    model = Blocks()
    with pytest.raises(InputError, match=message):
        split_model(model, wanted, group())
    assert all(weight.numel() for weight in model.parameters())
    model(torch.randint(12, (2, 3)))  # nothing was changed


@pytest.mark.parametrize(
    ("wanted", "name", "length"),
    [(SPLIT, "blocks.0.up.weight", 12), (ENDS, "embedding.weight", 12), ({"blocks.*.up": Column(sections=3)}, "up", 4)],
)
def test_sizes_that_do_not_divide_are_refused_by_name(wanted, name, length):
    with pytest.raises(InputError, match=rf"{name}.* has {length} elements for 5 ranks; choose a number of ranks"):
        split_model(Blocks(), wanted, group(5))


def test_heads_that_do_not_divide_are_refused_by_name():
    layer = nn.Sequential(nn.TransformerEncoderLayer(24, 6, 24))
    with pytest.raises(
        InputError, match=r"num_heads of '0\.self_attn' is 6 for 4 ranks; choose a number of ranks that"
    ):
        split_model(layer, {"0": "block"}, group(4))


@pytest.mark.parametrize(("wanted", "kind"), [(3, "int"), (None, "NoneType"), ("all", "str"), ([], "list")])
def test_arguments_of_other_types_are_refused(wanted, kind):
    with pytest.raises(ArgumentError, match=f"must be 'auto' or a dict of names and styles; got a {kind}"):
        split_model(Blocks(), wanted, group())


def test_keys_that_are_no_strings_are_refused():
    with pytest.raises(ArgumentError, match="must be names or patterns of layers; got 3"):
        split_model(Blocks(), {3: "column"}, group())


def test_a_star_does_not_match_the_model_itself():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    assert styles_of(model, {"*": Column()}, 2).keys() == {"0", "1", "2"}
    assert styles_of(model, {"[02]": Column()}, 2).keys() == {"0", "2"}


def test_a_model_is_split_once():
    model = Blocks()
    split_model(model, SPLIT, group())
    with pytest.raises(InputError, match=r"must be split once; 'blocks\.0\.norm' is divided already"):
        split_model(model, SPLIT, group())


def test_a_layer_and_its_parts_are_not_both_split():
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8))
    with pytest.raises(InputError, match="must be divided once"):
        split_model(model, {"0": "block", "0.linear1": "column"}, group())
    assert type(model[0].linear1) is nn.Linear


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_embeddings_with_options_that_need_the_whole_weight_are_refused(option):
    (name,) = option
    with pytest.raises(InputError, match=f"must have no {name}"):
        split_model(nn.Sequential(nn.Embedding(8, 4, **option)), {"0": "vocabulary"}, group())


class Own(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def test_a_linear_layer_with_a_forward_of_its_own_is_refused():
    with pytest.raises(InputError, match="'0' is a Own with a forward of its own"):
        split_model(nn.Sequential(Own(4, 4)), {"0": "column"}, group())


class Shifted(nn.Embedding):
    def forward(self, numbers):
        return super().forward(numbers) + numbers.unsqueeze(-1)


@pytest.mark.parametrize("style", ["vocabulary", "column-gathered", "heads"])
def test_an_embedding_with_a_forward_of_its_own_is_refused(style):
    with pytest.raises(InputError, match="'0' is a Shifted with a forward of its own; leave it out"):
        split_model(nn.Sequential(Shifted(4, 4)), {"0": style}, group())


def test_auto_refuses_unknown_models_and_uneven_heads():
    with pytest.raises(InputError, match="got a Blocks; name its layers instead"):
        split_model(Blocks(), "auto", group())
    with pytest.raises(InputError, match=r"num_heads of 'layers\.0\.self_attn' is 3 for 2 ranks"):
        split_model(
            nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 3, 8), 2, enable_nested_tensor=False), "auto", group()
        )


def test_auto_finds_the_blocks_of_torch():
    model = nn.Transformer(16, 4, 1, 1, 32, batch_first=True)
    styles = styles_of(model, "auto", 2)
    assert styles == {"encoder.layers.0": Block(), "decoder.layers.0": Block()}


def test_regions_contain_columns_and_rows():
    model = Blocks()
    assert divided_regions(model, styles_of(model, SPLIT | ENDS, 2)) == ["blocks.0", "blocks.1", "blocks.2"]
    block = nn.TransformerEncoderLayer(16, 4, 32)
    assert divided_regions(block, {"": Block()}) == [""]


class PerHead(nn.Module):
    """Each head of 4 is normalised by a norm that all heads share, and scaled."""

    def __init__(self, *, scaled=False):
        super().__init__()
        self.q, self.out = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.ones(4)) if scaled else None

    def forward(self, x):
        heads = self.norm(self.q(x).unflatten(-1, (-1, 4)))
        if self.scale is not None:
            heads = heads * self.scale[:, None]
        return self.out(heads.flatten(-2))


def test_whole_weights_between_divided_layers_are_refused_without_a_style(ranks):
    """The gradient of a norm of heads is a part of a sum on each rank (NVIDIA/Megatron-LM#7452)."""
    for message in ranks.run(2, refused, {"q": "column", "out": "row"}):
        assert "'norm' (a LayerNorm) runs where activations are divided by heads or columns" in message
        assert "give it the style 'summed' if its input is divided, or 'whole'" in message


def refused(process_group, wanted):
    model = PerHead()
    split_model(model, wanted, TensorGroup(process_group, rank=torch.distributed.get_rank(), size=2))
    try:
        model(torch.randn(3, 8))
    except InputError as error:
        return str(error)
    return ""


def test_parameters_beside_divided_layers_are_refused_without_a_style():
    wanted = {"q": "column", "out": "row", "norm": "summed"}
    with pytest.raises(InputError, match=r"'scale' has none; .*'heads' if its last dimension is heads, or 'whole'"):
        split_model(PerHead(scaled=True), wanted, group())
    model = PerHead(scaled=True)
    splits = split_model(model, wanted | {"scale": "heads"}, group())
    assert model.scale.shape == (2,)
    assert splits["scale"] == WeightSplit(dim=0)
    model(torch.randn(3, 8))
    split_model(PerHead(scaled=True), wanted | {"scale": "whole"}, group())


def test_styles_are_shown_as_they_are_written():
    assert repr(Heads("num_heads", "split_size")) == "Heads('num_heads', 'split_size')"
    assert repr(Row()) == "Row()"
    assert repr(Column(sections=3, gathered=True)) == "Column(sections=3, gathered=True)"
    assert repr(SequencePart(begins=True)) == "SequencePart(begins=True)"
