"""Jobs of test_giant_models: models that are built on the meta device and filled later."""

import ctypes
import gc
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched import Numerics, Pipeline, schedules
from pipesched.errors import InputError, PipeschedError
from pipesched.model import safetensors_files as weight_files
from pipesched.testing import reference_step
from tests.support import places
from tests.support.models import assert_as

TEXT = torch.arange(10 * 6).view(10, 6) % 11 + 1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.norm(x)
        y = self.attention(y, y, y, attn_mask=mask)[0]
        return x + self.down(functional.gelu(self.up(y)))


class GPT(nn.Module):
    """A GPT with a tied head, and with a parameter, a buffer and a branch on the input values between its layers."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(12, 8), nn.Parameter(torch.empty(6, 8))
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(4)), nn.LayerNorm(8)
        self.register_buffer("scale", torch.linspace(1, 2, 8).expand(6, -1), persistent=False)
        self.head = nn.Linear(8, 12)
        self.head.weight = self.embed.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.place, std=0.02)

    def forward(self, text: Tensor, labels: Tensor) -> dict[str, Tensor]:
        length = text.shape[1]
        x = self.embed(text) + self.place[:length]
        kept = torch.zeros(x.shape, device=x.device)
        kept[:] = x
        mask = torch.triu(torch.full((length, length), float("-inf"), device=x.device), 1)
        if not (text != 0).all():
            kept = kept * (text != 0)[..., None]
        for block in self.blocks:
            kept = block(kept, mask)
        logits = self.head(self.norm(kept) * self.scale)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def row() -> nn.Sequential:
    """Return a chain of layers with BatchNorm, dropout and a frozen layer."""
    layers = (nn.Linear(8, 8), nn.BatchNorm1d(8, track_running_stats=True), nn.Tanh(), nn.Dropout(0.2))
    model = nn.Sequential(*layers, nn.Linear(8, 16), nn.RMSNorm(16), nn.Linear(16, 8), nn.Linear(8, 4))
    model[4].requires_grad_(False)
    return model


def empty_row() -> nn.Sequential:
    with torch.device("meta"):
        return row()


def small(module: nn.Module) -> None:
    """Draw the weights of a linear layer. Serves as ``init=``."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.5)


ROWS = torch.randn(10, 8, generator=torch.Generator().manual_seed(3))
TARGET = torch.arange(10) % 4


LABELS = torch.where(TEXT % 4 == 0, -100, TEXT)


def gpt_pipeline(model: Any, **options: Any) -> Pipeline:
    sample = {"text": TEXT[:2], "labels": LABELS[:2]}
    return Pipeline(model, sample, **{"seed": 3, "num_microbatches": 4, **options})


def row_pipeline(model: Any, **options: Any) -> Pipeline:
    choices = {"seed": 3, "num_microbatches": 4, "loss_fn": functional.cross_entropy, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # BatchNorm warns about its running statistics
        return Pipeline(model, ROWS[:2], **choices)


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert not [name for name, value in one.items() if not torch.equal(value, other[name])]


def drawn(group: places.Group) -> None:
    """Check that initial weights do not depend on the cut: they equal those of a pipeline with one stage."""
    for model, init, pipeline, layers in (
        (GPT, "reset", gpt_pipeline, 7),
        (GPT, small, gpt_pipeline, 7),
        (row, "reset", row_pipeline, 8),
        (None, small, row_pipeline, 8),
    ):
        with pipeline(model or empty_row(), init=init, devices=["cpu"]) as alone:
            due = alone.full_state_dict()
        assert model is not GPT or not torch.equal(due["blocks.0.up.weight"], due["blocks.1.up.weight"])
        cuts = places.even_boundaries(layers, group.size())
        with pipeline(model or empty_row(), init=init, boundaries=cuts, **places.place(group)) as pipe:
            assert_same(pipe.full_state_dict(), due)
            assert all(not parameter.is_meta for parameter in pipe.parameters())
            assert all(parameter.isfinite().all() for parameter in pipe.parameters())


def loaded(group: places.Group, init: Any, schedule: str, options: Mapping[str, Any]) -> None:
    """Check that a model built on the meta device, with weights from ``init``, trains like one built with weights."""
    plain = real_gpt()
    cuts = [3] if schedules.get(schedule).chunks_per_rank == 1 else [2, 3, 5]
    given = plain.state_dict() if init is None else init
    choices = {"schedule": schedule, "boundaries": cuts, **options}
    with gpt_pipeline(GPT, init=given, **choices, **places.place(group)) as pipe:
        for step in range(2):
            due = reference_step(plain, text=TEXT, labels=LABELS, num_microbatches=4, seed=3, step=step)
            assert torch.equal(pipe.step(text=TEXT, labels=LABELS), due)
        if any(True for _ in pipe.parameters()):
            assert_as(pipe, plain)
        if not places.is_one_process(group):
            own = set(pipe.state_dict())
            empty = {name for name, value in pipe.model.state_dict().items() if value.is_meta}
            assert not own & empty
            assert empty  # this rank has never created the weights of other ranks
        pipe.load_state_dict(real_gpt(1).state_dict())
        whole = pipe.full_state_dict()
        assert_same(whole, real_gpt(1).state_dict())


def real_gpt(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT()


def two_directions(group: places.Group) -> None:
    """Check that models filled by ``init=`` have the losses of models built with weights.

    Tested with schedules that copy stages (chimera and dualpipe), and with ``optimizer=``.
    """
    torch.manual_seed(0)
    plain = row()
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    optimizer = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1)}
    copies = {"checkpoint": "always", "numerics": Numerics(batch_norm="mini-batch")}
    for schedule, options in (("chimera", copies), ("1f1b", optimizer)):
        losses = []
        for model, init in ((empty_row(), state), (_with(state), None)):
            with row_pipeline(
                model, init=init, schedule=schedule, boundaries=[4], **options, **places.place(group)
            ) as pipe:
                losses += [pipe.step(ROWS, target=TARGET).clone() for _ in range(2)]
                losses.append(pipe.evaluate(ROWS, target=TARGET).clone())
        assert all(map(torch.equal, losses[:3], losses[3:]))
    losses = []
    for model, init in ((GPT, real_gpt().state_dict()), (real_gpt(), None)):  # copies of tied weights
        with gpt_pipeline(model, init=init, schedule="dualpipe", boundaries=[3], **places.place(group)) as pipe:
            losses += [pipe.step(text=TEXT[:8], labels=LABELS[:8]).clone() for _ in range(2)]
    assert all(map(torch.equal, losses[:2], losses[2:]))


def _with(state: Mapping[str, Tensor]) -> nn.Sequential:
    model = row()
    model.load_state_dict(state)
    return model


def broken_on_one(group: places.Group, path: str) -> str:
    """Return this rank's error if reading the weights fails on rank 1 after the file's header was read."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            if group.rank() == 1:
                patch.setattr(weight_files, "_read", _ends)
            with row_pipeline(row, init=path, boundaries=[4], **places.place(group)) as pipe:
                pipe.step(ROWS, target=TARGET)
    except PipeschedError as error:
        return str(error)
    return "nothing"


def _ends(name: str, into: Tensor, path: Path, part: Any) -> None:
    raise InputError(f"{path} ends before")


# ---- memory -------------------------------------------------------------------------------------------------------

WIDTH, DEPTH = 1024, 12
_M_MMAP_THRESHOLD = -3  # the constant of malloc.h


def wide() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))


def begin_peak() -> None:
    """Reset the peak, and return freed memory to the system, because glibc keeps much of it."""
    gc.collect()
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)
        libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def peak_bytes() -> int:
    """Return the peak memory of this process. (ru_maxrss would also count the process that started this one.)"""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def peaks(group: places.Group, init: Any, boundaries: list[int] | None) -> tuple[int, int, int]:
    """Return the bytes of this rank's weights, and by how much construction and a step have raised the peak memory."""
    x = torch.ones(4, WIDTH)
    with row_pipeline(row, **places.place(group)) as pipe:  # imports the code that a step needs
        pipe.step(ROWS, target=TARGET)
    begin_peak()
    before = peak_bytes()
    choices = {"init": init, "num_microbatches": 2, "boundaries": boundaries, "seed": 1}
    with Pipeline(wide, x, loss_fn=functional.mse_loss, **choices, **places.place(group)) as pipe:
        made = peak_bytes() - before
        pipe.step(x, target=x)
        return sum(parameter.nbytes for parameter in pipe.parameters()), made, peak_bytes() - before
