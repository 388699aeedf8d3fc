"""GPU memory: predicted beside allocated memory, the time of checkpoint modes, and copies of offloaded activations.

    python benchmarks/gpu_memory.py [--device cuda] [--steps 9] [--seconds 180] [--tiny]

Two ranks share the device. "predicted / allocated" compares pipe.predicted_memory, summed over the ranks, with the most
that the allocator has given out during a step, the batch included (on CPUs pipesched.testing.MemoryMeter counts).

For "offload", all transformer blocks but the last offload their activations. "copies" is the time of a step in which a
copy runs, and "hidden" the share of this time in which a kernel also runs, both according to torch.profiler. Gradients
are compared with those of the mode "never".
"""

import argparse
import gc
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
from block_models import Shape, gradient_error, gradients_of, pipeline
from device_traces import traced
from measure import machine
from on_device import Budget, Figures, add_options, begun, settle, timed_s
from torch import Tensor

from pipesched.devices.memory import allocated_bytes
from pipesched.devices.streams import is_accelerator
from pipesched.testing import MemoryMeter

RANKS = 2
SHAPES = [Shape(16, 1024, 1024, 4, 8, "bfloat16"), Shape(16, 2048, 1024, 4, 8, "bfloat16")]
SMALL = [Shape(4, 32, 4, 1, 4)]
CASES = [
    ("1f1b", "never"),
    ("1f1b", "except_last"),
    ("1f1b", "always"),
    ("1f1b", "recompute"),
    ("1f1b", "recompute-cheap"),
    ("1f1b", "offload"),
    ("gpipe", "never"),
    ("zb-h1", "never"),
    ("interleaved-1f1b", "never"),
]
MIB = 2**20


def checkpoint(shape: Shape, mode: str) -> str | Mapping[str, str]:
    """Return the checkpoint setting of a mode: for the modes of single layers, one for each layer but the last."""
    if mode in ("recompute", "recompute-cheap", "offload"):
        return {str(layer): mode for layer in range(shape.blocks - 1)}
    return mode


def measured(shape: Shape, name: str, mode: str, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one case, and the gradients of a step under "gradients"."""
    x, y = shape.batch(device)
    gc.collect()  # what earlier cases left does not count
    before = allocated_bytes(device) if is_accelerator(device) else 0
    setting = checkpoint(shape, mode)
    with pipeline(shape, shape.model(device), name, x, RANKS, devices=[device] * RANKS, checkpoint=setting) as pipe:

        def step() -> None:
            pipe.model.zero_grad()
            pipe.step(x, target=y)

        ranks = pipe.predicted_memory
        predicted = sum(rank.total_bytes for rank in ranks)
        gc.collect()  # nor does what the measurement of the layers left
        with MemoryMeter(pipe) as meter:
            for _ in range(3):
                pipe.model.zero_grad()
                meter.mark()
                step()
                settle([device])
            peaks = meter.peak_bytes.values()
        own = (max if is_accelerator(device) else sum)(peaks) - before  # an allocator counts both ranks together
        allocated = own + sum(rank.batch for rank in ranks)
        seconds = median(timed_s(step, [device]) for _ in range(args.steps))
        trace = traced(step, device)
        gradients = {key: grad.cpu() for key, grad in gradients_of(pipe).items()}
    return {
        "gradients": gradients,
        "ms": seconds * 1e3,
        "predicted_mib": predicted / MIB,
        "allocated_mib": allocated / MIB,
        "ratio": predicted / allocated,
        "copies_ms": trace and trace.copy_us / 1e3,
        "hidden": trace and trace.hidden_share,
    }


def show(shape: Shape, device: torch.device, budget: Budget, args: argparse.Namespace) -> None:
    """Print the cases of one shape."""
    print(f"\ntwo ranks on {device}: {shape}")
    columns = "".join(f"{name:>11}" for name in ("ms", "pred. MiB", "alloc. MiB", "pred./al.", "copies ms", "hidden"))
    print(f"{'schedule':<18}{'mode':<16}{columns}  error", flush=True)
    due: dict[str, Tensor] = {}
    for name, mode in CASES:
        if budget.share_s() <= 0:
            print(f"{name:<18}{mode:<16}  not run: the time is used up", flush=True)
            continue
        try:
            row = measured(shape, name, mode, device, args)
        except torch.OutOfMemoryError as error:
            print(f"{name:<18}{mode:<16}  out of memory: {str(error).splitlines()[0]}", flush=True)
            continue
        own = row.pop("gradients")
        due = due or own
        row["error"] = gradient_error(own, due)
        cells = f"{row['ms']:>11.1f}{row['predicted_mib']:>11.1f}{row['allocated_mib']:>11.1f}{row['ratio']:>11.3f}"
        copies = f"{'-':>11}" if row["copies_ms"] is None else f"{row['copies_ms']:>11.1f}"
        hidden = f"{'-':>11}" if row["hidden"] is None else f"{row['hidden']:>11.1%}"
        print(f"{name:<18}{mode:<16}{cells}{copies}{hidden}  {row['error']:.1e}", flush=True)
        Figures(args.figures).add("memory", **shape._asdict(), schedule=name, mode=mode, **row)


def main() -> None:
    """Print the cases of each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=9, help="timed steps of a case (default: 9)")
    add_options(parser, seconds=180)
    args = parser.parse_args()
    device = begun(args.device)
    print(machine())
    shapes = SMALL if args.tiny else SHAPES
    budget = Budget(args.seconds, len(shapes) * len(CASES))
    for shape in shapes:
        show(shape, device, budget, args)


if __name__ == "__main__":
    main()
