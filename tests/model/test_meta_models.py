"""Models on the meta device: captured and planned first, then filled, each rank with its own stages."""

import json
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from pipesched.capture.captured_model import CapturedModel
from pipesched.errors import GraphError, InputError, ModelTypeError
from pipesched.model.safetensors_files import WeightFiles
from pipesched.testing import reference_step
from tests.support import places
from tests.support.branching_models import MODELS, inputs_of, made
from tests.support.branching_models import pipeline as any_pipeline
from tests.support.jobs import giant as jobs
from tests.support.models import assert_as
from tests.support.rank_processes import Ranks


@pytest.mark.one_in(2)
def test_weights_do_not_depend_on_who_makes_them(run: places.Run) -> None:
    run(4, jobs.drawn)


def files_of(folder: Path, form: str) -> Any:
    """The weights of a model in files; a tied weight is stored once."""
    state = {name: value.contiguous() for name, value in jobs.real_gpt().state_dict().items() if name != "head.weight"}
    if form == "file":
        save_file(state, folder / "all.safetensors")
        return str(folder / "all.safetensors")
    halves = [dict(list(state.items())[part::2]) for part in range(2)]
    names = [f"part-{part}.safetensors" for part in range(2)]
    for name, half in zip(names, halves, strict=True):
        save_file(half, folder / name)
    if form == "several":
        return [folder / name for name in names]
    table = {key: name for name, half in zip(names, halves, strict=True) for key in half}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    return folder


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("form", "schedule", "options"),
    [
        ("mapping", "1f1b", {}),
        ("file", "zb-h1", {}),
        ("several", "zb-v", {}),
        ("folder", "1f1b", {"checkpoint": "always"}),
    ],
)
def test_a_filled_model_trains_as_one_that_was_built_full(
    run: places.Run, tmp_path: Path, form: str, schedule: str, options: dict[str, Any]
) -> None:
    run(2, jobs.loaded, None if form == "mapping" else files_of(tmp_path, form), schedule, options)


@pytest.mark.one_in(2)
def test_copies_and_optimizers_are_of_the_weights_that_were_made(run: places.Run) -> None:
    run(2, jobs.two_directions)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell a program's own peak")
def test_a_rank_never_holds_more_than_its_share(ranks: Ranks, tmp_path: Path) -> None:
    """Two ranks hold half of a 50 MB model each; a rank with the whole model would peak 25 MB higher."""
    slack = 16 << 20  # a layer of 4 MB, measured or with its gradient on its way, and what code takes: 4 to 8 MB
    names = [f"{layer}.weight" for layer in range(jobs.DEPTH)]
    save_file({name: torch.ones(jobs.WIDTH, jobs.WIDTH) for name in names}, tmp_path / "all.safetensors")
    results = ranks.run(2, jobs.peaks, "reset", None)
    results += ranks.run(2, jobs.peaks, str(tmp_path), [jobs.DEPTH // 2])
    for share, weights, with_gradients in results:
        assert share // 2 < weights < share + slack
        assert with_gradients < 2 * share + slack


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", MODELS)
def test_any_model_is_filled(name: str) -> None:
    kind, plain = MODELS[name][0], made(name)[0]
    given = {key: value.clone() for key, value in plain.state_dict().items()}
    args, kwargs, target = inputs_of(name, 12)
    with any_pipeline(name, kind, init=given, devices=["cpu"] * 3) as pipe:
        loss = pipe.step(*args, **kwargs, **target)
        due = reference_step(plain, *args, **kwargs, **target, loss_fn=pipe.loss_fn, num_microbatches=3, seed=3)
        assert torch.equal(loss, due)
        assert_as(pipe, plain)


def calls(model: nn.Module, sample: Any) -> list[Any]:
    captured = CapturedModel(model, sample)
    return [
        (mode, str(call), call.takes, call.uses, call.gives, dict(call.changes), call.reads, call.random, call.joined)
        for mode, capture in captured.captures.items()
        for call in capture.calls
    ] + [(capture.output, capture.looked_at, capture.nbytes) for capture in captured.captures.values()]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [*MODELS, "gpt"])
def test_a_model_without_contents_is_captured_as_one_with_contents(name: str) -> None:
    if name == "gpt":
        kind, sample = jobs.GPT, ((jobs.TEXT, jobs.TEXT), {})
    else:
        kind, sample = MODELS[name][0], inputs_of(name, 3)[:2]
    with torch.device("meta"):
        empty = kind()
    assert calls(empty, sample) == calls(kind(), sample)
    assert all(parameter.is_meta for parameter in empty.parameters())


class Kept:
    """An object for values that layers store, one for each layer."""

    def __init__(self) -> None:
        self.values: dict[int, list[Tensor]] = {}


class Routed(nn.Module):
    """A layer that reads a computed value after it has changed its input."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.one, self.two = nn.Linear(8, 2), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, kept: Kept) -> Tensor:
        kept.values.setdefault(id(self), []).append(x)
        x = torch.stack(kept.values[id(self)]).mean(0)
        chosen, result = self.router(x).argmax(1), torch.zeros_like(x)
        for number, expert in enumerate((self.one, self.two)):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                result = result.index_add(0, rows, expert(x[rows]))
        return x + result


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Routed() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        kept = Kept()
        for layer in self.layers:
            x = layer(x, kept)
        return x


def test_a_layer_that_looks_at_what_it_computes_is_captured_and_measured() -> None:
    with jobs.row_pipeline(Mixture, devices=["cpu"] * 2) as pipe:
        pipe.step(jobs.ROWS, target=jobs.TARGET)


def test_code_between_layers_that_reads_what_weights_make_is_an_error() -> None:
    class Reads(Mixture):
        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x, Kept())
            return self.layers[1](x, Kept()) if x.sum() > 0 else x

    with pytest.raises(
        GraphError, match=r"calls __bool__ on a value computed from the weights .* move that code into a layer"
    ):
        jobs.row_pipeline(Reads, devices=["cpu"])


# ---- building -----------------------------------------------------------------------------------------------------


def test_a_function_builds_parameters_without_contents_and_buffers_with() -> None:
    elsewhere = []

    class Ties(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
            self.one.weight = self.two.weight = weight
            self.register_buffer("noise", torch.randn(3))
            other = threading.Thread(target=lambda: elsewhere.append(nn.Linear(2, 2).weight.is_meta))
            other.start()
            other.join()

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x)) + self.noise.sum()

    before = torch.get_rng_state()
    with jobs.row_pipeline(Ties, devices=["cpu"], loss_fn=lambda x, _: x.sum()) as pipe:
        model, noise = pipe.model, pipe.model.noise.clone()
        assert model.one.weight is model.two.weight
        assert not model.one.weight.requires_grad
        assert model.two.bias.requires_grad
        pipe.step(jobs.ROWS, target=jobs.TARGET)
    assert torch.equal(torch.get_rng_state(), before)
    assert elsewhere == [False]
    assert not nn.Linear(2, 2).weight.is_meta
    with jobs.row_pipeline(Ties, devices=["cpu"], loss_fn=lambda x, _: x.sum()) as pipe:
        assert torch.equal(pipe.model.noise, noise)


def test_tensors_with_contents_stay_the_same_objects() -> None:
    """Adapters beside a model on the meta device; the adapters' tensors stay the same objects."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model[1] = nn.Linear(8, 4)
    adapter, first = model[1].weight.detach().clone(), model[0].weight
    first.mark = "mine"
    given = {"0.weight": torch.ones(8, 8, dtype=torch.bfloat16), "0.bias": torch.zeros(8)}
    with jobs.row_pipeline(model, devices=["cpu"] * 2, boundaries=[1], init=given):
        assert torch.equal(model[1].weight, adapter)
        assert model[0].weight is first
        assert isinstance(first, nn.Parameter)
        assert first.mark == "mine"
        assert torch.equal(first, torch.ones(8, 8))
        assert first.dtype == torch.float32


# ---- errors -------------------------------------------------------------------------------------------------------


def without(name: str) -> dict[str, Tensor]:
    return {key: value for key, value in jobs.row().state_dict().items() if key != name}


def empty_hooked() -> nn.Sequential:
    model = jobs.empty_row()
    model[0].weight.register_hook(lambda grad: grad)
    return model


def empty_custom() -> nn.Sequential:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        model[0].shift = nn.Parameter(torch.zeros(8))
    return model


def empty_gpt() -> jobs.GPT:
    with torch.device("meta"):
        return jobs.GPT()


@pytest.mark.parametrize(
    ("model", "init", "kind", "text"),
    [
        (jobs.row, "reset", InputError, "this Sequential has no meta weights"),
        (
            jobs.empty_row,
            without("4.bias"),
            InputError,
            r"missing names \(1 of the model's 14\): 4\.bias; add or rename the missing weights$",
        ),
        (
            jobs.empty_row,
            {**without(""), "9.x": torch.ones(1)},
            InputError,
            r"state_dict; unknown names \(1 of 15 that were passed\): 9\.x; remove the unknown weights$",
        ),
        (
            jobs.empty_row,
            {**without(""), "0.bias": torch.ones(3)},
            InputError,
            r"'0\.bias' is .*\[8\] in the model, but .* of shape \[3\] in the mapping",
        ),
        (
            jobs.empty_row,
            {**without(""), "0.bias": torch.ones(8).int()},
            InputError,
            r"but torch\.int32 of shape \[8\] in the mapping",
        ),
        (jobs.empty_row, 7, InputError, "init= must be 'reset', a function that fills a given module.* got int"),
        (jobs.empty_row, "nowhere.safetensors", InputError, "nowhere.safetensors does not exist"),
        (empty_hooked, None, GraphError, r"'0\.weight' is on the meta device and has hooks"),
        (empty_custom, None, GraphError, r"nothing fills 0\.shift\. Give the modules a reset_parameters method"),
        (
            lambda: 3,
            None,
            ModelTypeError,
            "the model must be an nn.Module, or a function without arguments that builds one; got int",
        ),
    ],
)
def test_what_cannot_be_filled_is_named(model: Callable[[], Any], init: Any, kind: type, text: str) -> None:
    with pytest.raises(kind, match=text):
        jobs.row_pipeline(model(), devices=["cpu"] * 2, boundaries=[1], init=init)


def test_a_computed_buffer_has_contents_where_a_function_builds_the_model() -> None:
    options: dict[str, Any] = {"devices": ["cpu"] * 2, "boundaries": [3], "init": jobs.real_gpt().state_dict()}
    with pytest.raises(GraphError, match=r"nothing fills scale\. .* pass a function that builds the model"):
        jobs.gpt_pipeline(empty_gpt(), **options)
    jobs.gpt_pipeline(jobs.GPT, **options).close()


def test_a_function_that_builds_no_module_and_a_loss_without_contents_say_so() -> None:
    with pytest.raises(ModelTypeError, match="returned int"):
        jobs.row_pipeline(lambda: 3, devices=["cpu"])
    with torch.device("meta"):
        loss = nn.CrossEntropyLoss(weight=torch.ones(4))
    with pytest.raises(GraphError, match="the loss module CrossEntropyLoss is on the meta device"):
        jobs.row_pipeline(jobs.row, devices=["cpu"], loss_fn=loss)


def test_a_rank_whose_files_are_broken_stops_all(ranks: Ranks, tmp_path: Path) -> None:
    save_file(jobs.row().state_dict(), tmp_path / "all.safetensors")
    results = ranks.run(2, jobs.broken_on_one, str(tmp_path / "all.safetensors"))
    assert "ends before" in results[1]
    assert "rank 1 failed" in results[0]
    assert "ends before" in results[0]


# ---- files --------------------------------------------------------------------------------------------------------

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
]  # fmt: skip
tensors = st.builds(
    lambda shape, dtype: torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from(DTYPES),
)


@given(st.dictionaries(st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"), tensors))
def test_files_hold_what_was_written(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Tensor]) -> None:
    path = tmp_path_factory.mktemp("files") / "x.safetensors"
    save_file(state, path, metadata={"format": "pt"})
    files = WeightFiles(path)
    assert set(files) == set(state)
    for name, tensor in files.items():
        assert tensor.dtype == state[name].dtype
        assert tensor.shape == state[name].shape == files.shape(name)
        assert tensor.tolist() == state[name].tolist()


def test_a_weight_is_read_in_pieces_and_cast(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    wide = torch.randn(1100, 1000)  # more than a piece
    save_file({"x": wide, "b": wide.bfloat16()}, path)
    files = WeightFiles(path)
    assert torch.equal(files["x"], wide)
    into = torch.empty(1000, 1100, dtype=torch.float64).T
    files.read_into("b", into)
    assert torch.equal(into, wide.bfloat16().double())


def broken(folder: Path) -> dict[str, Path]:
    save_file({"x": torch.ones(4)}, folder / "good.safetensors")
    good = (folder / "good.safetensors").read_bytes()
    contents = {"short": good[:-1], "empty": b"", "text": b"not a file of weights", "other": good}
    header = b'{"x":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}'
    contents["dtype"] = struct.pack("<Q", len(header)) + header + bytes(4)
    for name, content in contents.items():
        (folder / f"{name}.safetensors").write_bytes(content)
    (folder / "bad.json").write_text("[]")
    (folder / "none.json").write_text(json.dumps({"weight_map": {"x": "absent.safetensors"}}))
    (folder / "void").mkdir()
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("short.safetensors", "must begin with a header"),
        ("empty.safetensors", r"empty\.safetensors \(0 bytes\) cannot be read"),
        ("text.safetensors", "must begin with a header"),
        ("dtype.safetensors", "F99"),
        ("bad.json", "must have a weight_map"),
        ("none.json", r"absent\.safetensors does not exist; download this file"),
        ("void", "contains neither"),
        ("absent", "absent does not exist; check the path"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(InputError, match=text):
        WeightFiles(broken(tmp_path).get(name, tmp_path / name))


def with_offsets(**offsets: tuple[int, int]) -> bytes:
    """A file of three floats with tensors at these offsets in bytes."""
    header = {
        name: {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": own}
        for name, own in offsets.items()
        for begin, end in [own]
    }
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(12)


@pytest.mark.parametrize(
    "offsets",
    [
        {"x": (-8, 4)},  # the header's bytes would be weights
        {"x": (0, 12), "y": (-4, 0)},
        {"x": (0, 8), "y": (4, 12)},
        {"x": (0, 16)},
        {"x": (0, 4)},
        {"x": (2**63, 2**63 + 12)},
    ],
    ids=str,
)
def test_tensors_lie_in_their_file_side_by_side(tmp_path: Path, offsets: Any) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(with_offsets(**offsets))
    with pytest.raises(
        InputError,
        match=r"must begin with a header that describes its tensors; .* cannot be read .*; download the file again",
    ):
        WeightFiles(path)


def test_a_file_that_changes_once_it_is_known_is_named(tmp_path: Path) -> None:
    path = broken(tmp_path)["good.safetensors"]
    files = WeightFiles(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"good\.safetensors \(\d+ bytes\) cannot be read"):
        files.read_into("x", torch.empty(4))


@pytest.mark.parametrize("name", ["../outside.safetensors", "sub/../../outside.safetensors", "absolute"])
def test_an_index_names_files_of_its_own_folder(tmp_path: Path, name: str) -> None:
    outside, folder = tmp_path / "outside.safetensors", tmp_path / "own"
    folder.mkdir()
    save_file({"x": torch.ones(4)}, outside)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": str(outside) if name == "absolute" else name}}))
    with pytest.raises(
        InputError, match=r"must name safetensors files in its own folder; .*outside\.safetensors'; move"
    ):
        WeightFiles(index)


def test_a_file_in_a_folder_may_be_a_link_as_in_a_cache(tmp_path: Path) -> None:
    blob, folder = tmp_path / "blob", tmp_path / "snapshot"
    folder.mkdir()
    save_file({"x": torch.ones(4)}, blob)
    (folder / "model.safetensors").symlink_to(blob)
    assert torch.equal(WeightFiles(folder)["x"], torch.ones(4))


def test_without_the_library_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = broken(tmp_path)["good.safetensors"]
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(InputError, match=r"pip install 'pipesched\[safetensors\]', or pass a state_dict"):
        WeightFiles(path)


def test_a_name_lies_in_one_file(tmp_path: Path) -> None:
    files = broken(tmp_path)
    with pytest.raises(InputError, match=r"'x' is in .*good.* and in .*other"):
        WeightFiles([files["good.safetensors"], files["other.safetensors"]])
