"""Tensors on their way: every use waits, once, and finds a plain tensor."""

import copy
import io
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import distributed

from pipesched.tensors.pending_tensor import pending

USES = {
    "float": float,
    "int": int,
    "bool": bool,
    "item": lambda x: x.item(),
    "format": lambda x: f"{x:.3f}",
    "str": str,
    "repr": repr,
    "shape": lambda x: x.shape,
    "dtype": lambda x: x.dtype,
    "device": lambda x: x.device,
    "requires_grad": lambda x: x.requires_grad,
    "grad_fn": lambda x: x.grad_fn,
    "dim": lambda x: x.dim(),
    "less": lambda x: x < 3,
    "equal": lambda x: x == 2.5,
    "add": lambda x: 1 + x,
    "stack": lambda x: torch.stack([x, x]),
    "sum": lambda x: sum([x, x]),
    "isnan": torch.isnan,
    "allclose": lambda x: torch.allclose(x, torch.tensor(2.5, dtype=torch.float64)),
    "numpy": lambda x: x.numpy(),
    "asarray": np.asarray,
    "tolist": lambda x: x.tolist(),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "save": lambda x: torch.save(x, io.BytesIO()),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "data": lambda x: x.data,
    "detach": lambda x: x.detach(),
    "to": lambda x: x.to(torch.float16),
    "dlpack": torch.from_dlpack,
}


def came(counted):
    counted.append(None)
    return torch.tensor(2.5, dtype=torch.float64)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_each_use_of_a_pending_tensor_waits_once_and_gives_the_plain_result(use, inference):
    waits = []
    tensor = pending(lambda: came(waits))
    assert isinstance(tensor, torch.Tensor)
    assert not waits
    with torch.inference_mode(inference):
        used, due = use(tensor), use(came([]))
    assert len(waits) == 1
    assert type(tensor) is torch.Tensor
    assert not vars(tensor)
    assert type(used) is type(due)
    assert torch.equal(torch.as_tensor(used), torch.as_tensor(due)) if isinstance(due, torch.Tensor) else used == due
    assert (float(tensor), len(waits)) == (2.5, 1)


def test_operations_in_place_change_the_tensor_itself():
    tensor = pending(lambda: came([]))
    tensor /= 2
    tensor.add_(1)
    assert float(tensor) == 2.25


def test_a_collective_waits_for_a_pending_tensor(tmp_path):
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for collective in (distributed.all_reduce, lambda x: distributed.broadcast(x, 0)):
            collective(tensor := pending(lambda: came([])))
            assert type(tensor) is torch.Tensor
    finally:
        distributed.destroy_process_group()


def test_an_exception_of_the_wait_is_raised_at_every_use():
    tensor = pending(lambda: torch.tensor(1 / 0))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            float(tensor)


def test_a_pending_tensor_in_a_container_does_not_wait():
    waits = []
    tensors = {"loss": pending(lambda: came(waits))}
    assert [tensors["loss"]] in [[tensors["loss"]]]
    assert not waits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.tensor(tensors["loss"]).isnan()  # the one thing that asks no subclass
