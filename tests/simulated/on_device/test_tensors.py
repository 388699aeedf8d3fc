"""Tensors of a simulated device: aliasing, memory, devices that must not mix, and modules that move."""

import gc

import pytest
import torch
from torch import nn

from tests.simulated.violations import ViolationKind

DEVICE = "sim:0"


def test_views_alias_their_base_and_count_its_version():
    base, wanted = torch.arange(12.0, device=DEVICE).view(3, 4), torch.arange(12.0).view(3, 4)
    for values in (base, wanted):
        values[:, 1].add_(100)
        values.T[0].zero_()
        values.as_strided((2,), (5,), 1).mul_(2)
    assert torch.equal(base.cpu(), wanted)
    assert base[0]._base is not None
    assert base[0]._version == base._version > 0
    assert base.untyped_storage().data_ptr() == base[1].untyped_storage().data_ptr()


def test_a_kernel_returns_the_tensor_that_it_changes():
    values = torch.ones(3, device=DEVICE)
    assert values.add_(1) is values
    out = torch.empty(3, device=DEVICE)
    assert torch.mul(values, 2, out=out) is out
    assert out.tolist() == [4, 4, 4]


def test_an_out_argument_is_resized():
    out = torch.empty(0, device=DEVICE)
    torch.add(torch.ones(3, 2, device=DEVICE), 1, out=out)
    assert torch.equal(out.cpu(), torch.full((3, 2), 2.0))
    indices = torch.empty(0, dtype=torch.long, device=DEVICE)
    torch.max(torch.eye(3, device=DEVICE), 1, out=(torch.empty(0, device=DEVICE), indices))
    assert indices.tolist() == [0, 1, 2]


def test_resize_keeps_the_values_and_set_shares_storages():
    values = torch.arange(4.0, device=DEVICE)
    values.resize_(6)
    assert values[:4].tolist() == [0, 1, 2, 3]
    window = torch.empty(0, device=DEVICE).set_(values.untyped_storage(), 1, (2,), (2,))
    assert window.tolist() == [1, 3]
    raw = torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(values.untyped_storage())
    assert raw.numel() == values.untyped_storage().nbytes()
    values.untyped_storage().resize_(0)
    assert values.untyped_storage().nbytes() == 0
    assert torch.empty(3, device=DEVICE).set_().numel() == 0


def test_new_memory_is_not_a_number():
    for _ in range(3):
        assert torch.empty(100, device=DEVICE).isnan().all()
        torch.ones(100, device=DEVICE)
    assert torch.empty(100, device=DEVICE, dtype=torch.bfloat16).isnan().all()
    assert torch.empty(100, pin_memory=True).isnan().all()


def counted_bytes():
    return torch.accelerator.memory_stats(DEVICE)["allocated_bytes.all.current"]


def test_memory_is_counted_in_blocks_for_each_device():
    gc.collect()  # what earlier tests have left
    torch.accelerator.reset_peak_memory_stats(DEVICE)
    before, elsewhere = torch.accelerator.memory_allocated(DEVICE), torch.accelerator.memory_allocated("sim:1")
    counted = counted_bytes()
    values = torch.ones(129, device=DEVICE)
    assert counted_bytes() - counted == 1024
    assert torch.accelerator.memory_allocated(DEVICE) - before == 1024
    more = values + 1
    del values
    assert torch.accelerator.memory_allocated(DEVICE) - before == 1024
    assert torch.accelerator.max_memory_allocated(DEVICE) - before == 2048
    del more
    assert torch.accelerator.memory_allocated(DEVICE) == before
    torch.accelerator.reset_peak_memory_stats(DEVICE)
    assert torch.accelerator.max_memory_allocated(DEVICE) == before
    assert torch.accelerator.memory_allocated("sim:1") == elsewhere
    assert counted_bytes() == counted
    assert torch.sim.memory_allocated(DEVICE) == before
    assert torch.accelerator.get_memory_info(DEVICE)[1] == torch.sim.get_device_properties(0).total_memory


MIXED = {
    "device and CPU": lambda a, b, c: a + c,
    "CPU and device": lambda a, b, c: c * a,
    "two devices": lambda a, b, c: a + b,
    "a product": lambda a, b, c: a @ c,
    "a list": lambda a, b, c: torch.cat([a, b]),
    "an out argument": lambda a, b, c: torch.add(a, a, out=b),
    "weights": lambda a, b, c: nn.functional.linear(a, c),
    "in place": lambda a, b, c: a.add_(b),
}


@pytest.mark.parametrize("mix", MIXED.values(), ids=MIXED)
def test_devices_do_not_mix(mix):
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device, but found at least two"):
        mix(torch.ones(3, 3, device="sim:0"), torch.ones(3, 3, device="sim:1"), torch.ones(3, 3))


def test_numbers_and_scalars_of_the_cpu_mix():
    values = torch.ones(3, device=DEVICE)
    assert (values + torch.tensor(1.0)).tolist() == [2, 2, 2]
    assert (2 * values).tolist() == [2, 2, 2]


def test_a_device_that_does_not_exist_is_refused():
    with pytest.raises(RuntimeError, match="there are 8 devices"):
        torch.ones(3, device="sim:8")


@pytest.mark.parametrize("keep", [True, False])
def test_moving_a_module_keeps_its_parameters_as_on_cuda_or_makes_new_ones(sim, keep):
    sim.keep_parameters(keep)
    try:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = weight = model[0].weight
        model.to(DEVICE)
    finally:
        sim.keep_parameters(True)
    assert (model[0].weight is weight) == keep
    assert (model[1].weight is model[0].weight) == keep  # ties are lost with new ones
    assert model[0].weight.device == torch.device(DEVICE)


def test_a_tensor_is_printed_saved_and_loaded(tmp_path):
    values = torch.arange(3.0, device=DEVICE)
    assert "device='sim:0'" in str(values)
    torch.save({"values": values}, tmp_path / "file")
    assert torch.load(tmp_path / "file")["values"].device == torch.device(DEVICE)
    assert torch.load(tmp_path / "file", map_location="cpu")["values"].tolist() == [0, 1, 2]


def test_a_slice_of_a_storage_is_memory_of_the_storage(sim):
    """As in a message, whose tensors are slices of its memory. As on CUDA, `record_stream` does not see them."""
    memory = torch.zeros(8, dtype=torch.uint8, device="sim:0")
    piece = torch.empty(0, device="sim:0").set_(memory.untyped_storage()[4:8], 0, (1,), (1,))
    side = torch.Stream(device="sim:0")
    with side:
        memory += 1
    assert sim.backend.block_of(piece) == sim.backend.block_of(memory)
    piece + 1
    sim.judge.read()
    assert [each.kind for each in sim.judge.violations] == [ViolationKind.WRITTEN_TWICE, ViolationKind.READ]
    side.synchronize()
    with side:
        piece * 2
    piece.record_stream(side)
    del memory, piece
    torch.zeros(8, dtype=torch.uint8, device="sim:0")
    sim.judge.read()
    assert sim.judge.violations[-1].kind is ViolationKind.FREED
