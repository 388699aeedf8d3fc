"""Record the plan and the measured step behind the report in docs/howto/reports.md: the demo's model on two ranks.

    python docs/record.py

The script profiles the model, searches for a plan and trains some steps. It saves the plan, with the costs of the
profile, as docs/report/plan.json, and the step with the median time as docs/report/trace.json. `make gallery` draws
both.
"""

import random
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median_low

import torch

import pipesched
from pipesched.planning.pins import Pins
from pipesched.planning.search_request import Search
from pipesched.planning.tuner import find_plan

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "examples"))

import train_gpt  # noqa: E402

ROWS, CONTEXT, RANKS, STEPS = 32, 64, 2, 25


def main() -> None:
    """Measure, search, train, and save the plan and the trace."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    draw, text = random.Random(0), train_gpt.standard_library()
    x, y = train_gpt.batch(text, ROWS, CONTEXT, draw)
    model = train_gpt.gpt(width=256, context=CONTEXT)
    profile = pipesched.profile(model, x[:4], loss_fn=train_gpt.next_byte_loss, target=y[:4], rows=(2, 4, 8))
    overheads = pipesched.probe_overheads(devices=["cpu"] * RANKS)
    profile = replace(profile, machine=replace(profile.machine, threads=overheads))
    search = Search(
        profile=profile,
        pins=Pins(list(profile.layers)),
        num_ranks=RANKS,
        batch_size=ROWS,
        num_microbatches=(4, 8, 16),
    )
    plan = find_plan(search)
    sample, ranks = x[: ROWS // plan.program.num_microbatches], ["cpu"] * RANKS
    with pipesched.Pipeline(model, sample, loss_fn=train_gpt.next_byte_loss, devices=ranks, plan=plan) as pipe:
        optimizer, traces = torch.optim.AdamW(pipe.parameters(), lr=1e-3), []
        for _ in range(STEPS):
            pipe.step(x, target=y)
            optimizer.step()
            optimizer.zero_grad()
            traces.append(pipe.trace)
            x, y = train_gpt.batch(text, ROWS, CONTEXT, draw)
    spans = [trace.makespan_s for trace in traces[5:]]
    report = pipesched.Report(plan, traces[5 + spans.index(median_low(spans))])
    print(report)
    (DOCS / "report").mkdir(exist_ok=True)
    plan.save(DOCS / "report" / "plan.json")
    report.measured.to_chrome(DOCS / "report" / "trace.json")


if __name__ == "__main__":
    main()
