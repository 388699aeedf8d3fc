"""The walk of a step: which code of the package one later step of a plain model runs.

What does nothing for this model is not called: tied weights, weight copies, norms of mini-batches, trades between
processes, late updates, offloading, recomputation, versions of weights.
"""

import sys
import threading
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import pipesched
from pipesched import Pipeline
from pipesched.devices.selection import have_accelerator

ROOT = Path(pipesched.__file__).parent
#: The files that a reader who follows the step opens, by package.
FILES = {
    "capture": {"stage_body"},
    "devices": {"selection"},
    "model": {"module_tree", "stale_weights"},
    "pipeline": {"assembly", "call_builder", "pipeline", "step_runner", "uneven_orders"},
    "planning": {"program_factory"},
    "program": {"near_equal_parts"},
    "runtime": {"collectives", "microbatches", "rank_host", "step_call", "targets"},
    "runtime/executors": {"device_streams", "interpreter", "threads"},
    "runtime/stage": {"input_copies", "layer_runner", "run_stages", "stage"},
    "tensors": {
        "caller_context",
        "function_mode",
        "graph_edges",
        "keyed_random",
        "loss_factors",
        "payload",
        "row_count",
        "row_split",
        "rows",
        "sample_layout",
        "torch_insides",
    },
}
#: The functions that a step also runs if torch was built for an accelerator.
OF_STREAMS = {
    ("runtime/microbatches.py", "ready"),
    ("devices/streams.py", "events_of_caller"),
    ("devices/streams.py", "streams_here"),
    ("devices/streams.py", "is_accelerator"),
    ("tensors/payload.py", "opened"),
    ("tensors/payload.py", "open_one"),
    ("tensors/payload.py", "is_record"),
}
#: How many functions they run. Five of them look for modes and hooks of the caller.
MOST_FUNCTIONS = 102


def test_a_step_of_a_plain_model_runs_few_functions_of_few_files():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    x, y = torch.randn(2, 8, 8)
    seen: set[tuple[str, str]] = set()
    looking = threading.Event()

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and looking.is_set() and not code.co_name.startswith("<"):
            seen.add((code.co_filename, code.co_name))

    threading.setprofile(note)  # of threads that start from now on: the ranks'
    try:
        pipe = Pipeline(
            model, x[:2], devices=["cpu"] * 2, schedule="1f1b", num_microbatches=4, loss_fn=functional.mse_loss
        )
    finally:
        threading.setprofile(None)
    with pipe:
        for _ in range(2):
            pipe.step(x, target=y)
        sys.setprofile(note)
        looking.set()
        try:
            pipe.step(x, target=y)
        finally:
            looking.clear()
            sys.setprofile(None)
    own = {(Path(file).relative_to(ROOT), name) for file, name in seen if Path(file).is_relative_to(ROOT)}
    if have_accelerator():  # a build of torch for GPUs: the step looks for streams of the caller
        own = {(file, name) for file, name in own if (str(file), name) not in OF_STREAMS}
    known = {ROOT / package / f"{name}.py" for package, names in FILES.items() for name in names}
    assert {ROOT / file for file, _ in own} <= known
    assert len(own) <= MOST_FUNCTIONS, sorted(map(str, own))
