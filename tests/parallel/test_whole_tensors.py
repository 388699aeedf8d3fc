"""Blocks and whole weights, with the ranks of a tensor group as threads, or one after another, without processes."""

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipesched.errors import CheckpointError, InputError, ModelTypeError
from pipesched.model.initialization import Initial, built
from pipesched.model.parameter_order import ParameterOrder
from pipesched.parallel.layer_styles import Column
from pipesched.parallel.model_forms import ModelForms
from pipesched.parallel.styles import split_model
from pipesched.parallel.tensor_group import TensorGroup, _ended
from pipesched.parallel.weight_split import SplitWeights, WeightSplit
from pipesched.pipeline.split_state import own_state, whole_state
from pipesched.runtime.gradients.norms import GradientNorms
from pipesched.runtime.gradients.plane_norms import NormMeasure, PlaneNorms
from pipesched.runtime.stage.elementwise import check_elementwise, is_elementwise
from pipesched.saving.chunks import Rows
from pipesched.saving.manifest import TensorEntry
from pipesched.saving.split_states import OwnBlocks
from pipesched.saving.tensor_files import TensorFile, write_tensors
from pipesched.saving.whole_tensors import WholeTensor, WholeTensors
from tests.support.random_programs import quick

STYLES: dict[str, Any] = {"0": Column(sections=2), "1": "row", "2": "vocabulary"}


class Threads:
    """A rank of a tensor group whose ranks are threads."""

    def __init__(self, rank: int, size: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, size
        self._values, self._barrier = values, barrier

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        self._values[self.rank] = tensor
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found


def on_ranks(size: int, job: Callable[[Any], Any]) -> list[Any]:
    """Return the results of a job on each rank of a tensor group of threads."""
    values: list[Any] = [None] * size
    barrier = threading.Barrier(size, timeout=20)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        results[rank] = job(Threads(rank, size, values, barrier))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@quick
@given(st.sampled_from([1, 2, 4, 8]), st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(0, 2))
def test_blocks_join_to_the_whole(size: int, parts: list[int], dim: int) -> None:
    sections = tuple(size * part for part in parts)
    shape = [3, 2, 5]
    shape[dim] = sum(sections)
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    split = WeightSplit(dim=dim, sections=sections)
    blocks = [split.own(whole, rank, size) for rank in range(size)]
    assert torch.equal(split.joined(blocks), whole)
    assert {split.whole_shape(block.shape, size) for block in blocks} == {tuple(shape)}
    assert all(tuple(block.shape) == split.own_shape(shape, size) for block in blocks)


def test_blocks_that_do_not_divide_evenly_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"dimension 0 of 'w' has 6 elements for 4 ranks; choose a number of ranks that"
    ):
        WeightSplit(dim=0, sections=(8, 6)).check((14, 2), 4, "'w'")


def test_a_collective_that_ends_just_after_a_rank_has_looked_has_not_failed() -> None:
    class Ends:
        """A collective that ends between a wait that was too short and the question whether it has ended."""

        def wait(self, *limit: Any) -> None:
            if limit:
                raise RuntimeError("Operation timed out!")

        def is_completed(self) -> bool:
            return True

    assert _ended(Ends())


# ---- norms --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("size", [2, 4])
def test_norms_of_planes_are_those_of_whole_gradients(size: int, norm_type: float) -> None:
    torch.manual_seed(0)
    whole = [torch.randn(8, 3, dtype=torch.float64), torch.randn(5, dtype=torch.float64), torch.randn(4, 8)]
    splits = [WeightSplit(dim=0, sections=(4, 4)), None, WeightSplit(dim=1)]

    def job(group: Any) -> tuple[GradientNorms, GradientNorms]:
        own = [one if split is None else split.own(one, group.rank, group.size) for one, split in zip(whole, splits)]
        model = nn.ParameterList(own)
        for parameter in model:
            parameter.grad = parameter.detach().clone()
        planes = PlaneNorms(group, {one: True for one, split in zip(model, splits) if split is not None})
        measured = NormMeasure(ParameterOrder({"": model}), planes).of(list(model), norm_type)
        flag = torch.tensor(group.rank == 1)
        return measured, planes.of(list(model), measured._replace(nonfinite=flag), norm_type)

    results = on_ranks(size, job)
    for measured, flagged in results:
        assert measured.norms is not None
        for norm, one in zip(measured.norms, whole, strict=True):
            torch.testing.assert_close(norm, torch.linalg.vector_norm(one.double(), norm_type), rtol=1e-6, atol=0)
        assert torch.equal(measured.norms, results[0][0].norms)
        assert measured.nonfinite is None
        assert flagged.nonfinite is not None
        assert bool(flagged.nonfinite)


def test_a_whole_weight_has_the_norm_of_the_first_plane() -> None:
    def job(group: Any) -> float:
        weight = nn.Parameter(torch.ones(1))
        norms = GradientNorms("0", torch.tensor([1.0 + group.rank]))
        found = PlaneNorms(group, {}).of([weight], norms, 2.0).norms
        assert found is not None
        return float(found[0])

    assert on_ranks(2, job) == [1.0, 1.0]


# ---- initial weights ----------------------------------------------------------------------------------------------


def build() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(8, 8), nn.Embedding(16, 4))
    model[2].weight.requires_grad_(False)
    return model


def weights_of(rank: int, size: int, init: Any) -> tuple[nn.Module, SplitWeights | None]:
    """Return the model of one rank of a tensor group, filled by ``init``."""
    model = built(build, 3)
    initial = Initial(model, init, 3)
    split = None if size == 1 else split_model(model, STYLES, TensorGroup.counting(size, rank))
    owners: Any = SimpleNamespace(rank=lambda name: 0)
    ranks: Any = SimpleNamespace(devices=[torch.device("cpu")], holds=lambda rank: True)

    def fail(what: str, error: Exception) -> Any:
        raise error

    initial.fill(owners, ranks, fail, split)
    return model, split


@pytest.mark.parametrize("init", ["reset", "mapping", "function", "files"])
@pytest.mark.parametrize("size", [2, 4])
def test_blocks_of_initial_weights_are_those_of_whole_weights(size: int, init: Any, tmp_path: Path) -> None:
    if init == "mapping":
        init = build().state_dict()
    elif init == "files":
        pytest.importorskip("safetensors")
        write_tensors(tmp_path / "model.safetensors", build().state_dict(), {"format": "pt"})
        init = tmp_path
    elif init == "function":
        init = lambda module: [one.data.normal_() for one in module.parameters(recurse=False)]  # noqa: E731
    due, _ = weights_of(0, 1, init)
    for rank in range(size):
        model, split = weights_of(rank, size, init)
        assert split is not None
        for (name, block), whole in zip(model.named_parameters(), due.parameters(), strict=True):
            assert torch.equal(block, split.own(name, whole)), name
            assert block.untyped_storage().nbytes() == block.nbytes
            assert block.requires_grad == whole.requires_grad


def test_a_mapping_with_weights_of_another_shape_is_refused_with_whole_shapes() -> None:
    class Lazily(dict):  # type: ignore[type-arg]
        """A mapping that makes its tensors on access, so that their shapes are not known before."""

    wrong = build().state_dict() | {"0.weight": torch.zeros(8, 8)}
    with pytest.raises(InputError, match=r"'0.weight' is .* of shape \[16, 8\] in the model, but .* of shape \[8, 8\]"):
        weights_of(0, 2, Lazily(wrong))


def test_only_one_layer_is_whole_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = []
    own = SplitWeights.own

    def counted(self: SplitWeights, name: str, whole: Tensor) -> Tensor:
        gc.collect()
        alive.append(weakref.ref(whole.untyped_storage()))
        most.append(sum(one() is not None for one in alive))
        return own(self, name, whole)

    monkeypatch.setattr(SplitWeights, "own", counted)
    weights_of(0, 2, "reset")
    assert max(most) <= 2  # the weight and the bias of a layer


# ---- files --------------------------------------------------------------------------------------------------------


def test_whole_tensors_are_made_one_at_a_time_in_the_order_of_the_file(tmp_path: Path) -> None:
    made: list[str] = []
    alive: list[weakref.ref[Tensor]] = []

    def whole(key: str, tensor: Tensor) -> Tensor:
        assert not any(one() is not None for one in alive)
        made.append(key)
        joined = torch.cat([tensor, tensor + 1])
        alive.append(weakref.ref(joined))
        return joined

    tensors = {"b": torch.ones(2, 3), "a": torch.zeros(4), "z": torch.ones(2, dtype=torch.float64), "c": torch.ones(5)}
    makers = {
        key: WholeTensor((2 * len(own), *own.shape[1:]), partial(whole, key, own)) for key, own in tensors.items()
    }
    del makers["c"]
    wholes = WholeTensors(tensors, makers)
    write_tensors(tmp_path / "f", tensors, None, wholes)
    assert made == ["z", "a", "b"]
    read = TensorFile(tmp_path / "f").read("b", torch.float32, (4, 3))
    assert torch.equal(read, torch.cat([torch.ones(2, 3), torch.full((2, 3), 2.0)]))
    wholes.finish()
    assert made == ["z", "a", "b"]
    again = WholeTensors(tensors, makers)
    again.get("z", tensors["z"])
    again.finish()
    assert made[3:] == ["z", "a", "b"]


@pytest.mark.parametrize("rows", [None, Rows(1, 3)])
@pytest.mark.parametrize("split", [WeightSplit(dim=0), WeightSplit(dim=1), WeightSplit(dim=0, sections=(4, 12))])
def test_a_rank_reads_its_rows_of_its_block(split: WeightSplit, rows: Rows | None) -> None:
    whole = torch.arange(16 * 4.0).view(16, 4)
    asked: list[Rows | None] = []

    def read(key: str, rows: Rows | None = None) -> Tensor:
        asked.append(rows)
        return whole if rows is None else whole[rows.start : rows.end]

    for rank in range(4):
        group: Any = SimpleNamespace(rank=rank, size=4)
        splits = SplitWeights(group, {"w": split})
        block = split.own(whole, rank, 4)
        run: Any = SimpleNamespace(
            split=splits, shapes={"w": tuple(block.shape)}, whole_shape=lambda name: tuple(whole.shape)
        )
        entries = {
            key: TensorEntry(kind=kind, name="w", file="f", shape=shape, dtype="float32")
            for key, kind, shape in (
                ("parameter/w", "parameter", (16, 4)),
                ("optimizer/w/exp", "optimizer state", (16, 4)),
                ("optimizer/w/step", "optimizer state", ()),
            )
        }
        saved: Any = SimpleNamespace(entries=entries, values={}, where="c")
        blocks = OwnBlocks(saved, run, dict.fromkeys(entries, rows))
        due = block if rows is None else block[rows.start : rows.end]
        for key in ("parameter/w", "optimizer/w/exp"):
            assert torch.equal(blocks.reading(read)(key, rows), due)
            assert asked[-1] == blocks.needed(key, rows)
        assert blocks.needed("optimizer/w/step", None) is None
        entries["optimizer/w/exp"] = TensorEntry(
            kind="optimizer state", name="w", file="f", shape=(16,), dtype="float32"
        )
        with pytest.raises(
            CheckpointError, match=r"'optimizer/w/exp' has shape \[16\], but 'w' has shape \[16, 4\] on c"
        ):
            OwnBlocks(saved, run, dict.fromkeys(entries, rows))


# ---- models -------------------------------------------------------------------------------------------------------


def test_state_dicts_are_whole_and_keep_ties() -> None:
    whole = nn.ModuleDict({"embed": nn.Embedding(8, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 8, bias=False)})
    whole["head"].weight = whole["embed"].weight

    def job(group: Any) -> dict[str, Tensor]:
        model = copy.deepcopy(whole)
        due = {name: value.clone() for name, value in model.state_dict().items()}
        splits = split_model(
            model, {"embed": "vocabulary", "head": "column-gathered"}, TensorGroup.counting(group.size, group.rank)
        )
        split = SplitWeights(group, {name: splits[name] for name in ("embed.weight", "head.weight")})
        state = whole_state(model, model.state_dict(), split)
        assert state["embed.weight"] is state["head.weight"]
        assert all(torch.equal(value, due[name]) for name, value in state.items())
        own = own_state(model, state, split)
        assert all(torch.equal(own[name], value) for name, value in model.state_dict().items())
        with pytest.raises(
            RuntimeError, match=r"for embed.weight: .* shape torch.Size\(\[4, 4\]\) from .*\(\[8, 4\]\)"
        ):
            own_state(model, model.state_dict(), split)
        return state

    assert len(on_ranks(2, job)) == 2


def test_a_model_changes_between_whole_layers_and_blocks() -> None:
    torch.manual_seed(0)
    model = build()
    due = {name: value.clone() for name, value in model.state_dict().items()}
    kinds = [type(module) for module in model]
    blocks = split_model(model, STYLES, TensorGroup.counting(2, 1))
    split_kinds = [type(module) for module in model]
    assert split_kinds != kinds
    forms = ModelForms(model, blocks)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        assert not forms.is_whole
        for name, parameter in model.named_parameters():
            parameter.data = due[name].clone()
        forms.make_whole(model.parameters())
        assert [type(module) for module in model] == kinds
        assert forms.is_whole
        assert (model[0].out_features, model[1].in_features) == (16, 8)
        forms.make_blocks()
        assert [type(module) for module in model] == split_kinds
        assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())


# ---- optimizers ---------------------------------------------------------------------------------------------------


def test_optimizers_that_may_combine_elements_are_refused() -> None:
    class Own(torch.optim.SGD):
        """A subclass, which may do anything."""

    weights = [nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4, 4))]
    split = {weights[1]: "b"}
    for kind in (torch.optim.Adafactor, torch.optim.Muon, torch.optim.LBFGS, Own):
        optimizer = kind(weights, lr=0.1)
        assert not is_elementwise(optimizer)
        check_elementwise(optimizer, weights[:1], split)
        with pytest.raises(ModelTypeError, match=rf"{kind.__name__} may combine .* holds 1 split weight: 'b'; use one"):
            check_elementwise(optimizer, weights, split)
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad):
        check_elementwise(kind(weights, lr=0.1), weights, split)
