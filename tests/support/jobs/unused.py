"""Jobs of test_small_models: pipelines over a mesh whose plans use only some of its ranks."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from pipesched import Distributed, Pipeline, Profile, Search, graph_of
from pipesched.simulation.overheads import Machine
from pipesched.testing import reference_step

X, Y = torch.randn(18, 8, generator=torch.Generator().manual_seed(1)), torch.arange(18) % 4


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.BatchNorm1d(8), nn.Linear(8, 4))


def tiny() -> Profile:
    """Return a profile in which each layer takes 8 us, so that the plan does not depend on measured times."""
    graph = graph_of(model(), X[:5])
    for _, node in graph.nodes(data=True):
        node.update(dict.fromkeys(("forward_s", "input_grad_s", "weight_grad_s"), 8e-06), backward_s=16e-6)
    return Profile({5: graph}, machine=Machine(on_host=True))


def small(group: Any, own: nn.Module, **options: Any) -> Pipeline:
    choices = {"seed": 5, "loss_fn": functional.cross_entropy, **options}
    if "plan" not in options:
        choices |= {"num_microbatches": 4, "search": Search(profile=tiny())}
    return Pipeline(own, X[:5], mesh=DeviceMesh.from_group(group, "cpu"), **choices)


def trains(group: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Check steps, evaluations and states against a plain loop, also on ranks without stages.

    Returns the number of ranks of the plan, this rank's numbers of parameters and of state entries, and the texts of
    the pipeline and its report.
    """
    own, whole = model(), model()
    if options.pop("cut", False):
        with Pipeline(
            model(), X[:5], loss_fn=functional.cross_entropy, devices=["cpu"] * 2, boundaries=[2], num_microbatches=4
        ) as pipe:
            options = {"plan": pipe.plan}
    told = group.rank() == 0 or options.get("distributed", Distributed()).inputs != "first"
    with small(group, own, **options) as pipe:
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (pipe, whole)]
        for step in range(3):
            given = {"loss_fn": functional.cross_entropy, "num_microbatches": 4, "seed": 5, "step": step}
            loss = pipe.step(X, target=Y) if told else pipe.step()
            assert torch.equal(loss, reference_step(whole, X, target=Y, **given))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        state = pipe.full_state_dict()
        assert state.keys() == whole.state_dict().keys()
        assert all(torch.equal(value, state[name]) for name, value in whole.state_dict().items())
        pipe.load_state_dict(state)
        pipe.eval()
        whole.eval()
        evaluated, output = (
            pipe.evaluate(X, target=Y, return_outputs=True, gather=True)
            if told
            else pipe.evaluate(return_outputs=True, gather=True)
        )
        torch.testing.assert_close(evaluated, functional.cross_entropy(output, Y))
        with torch.no_grad():
            assert torch.equal(pipe(X, gather=True) if told else pipe(gather=True), output)
        trace = pipe.gather_trace()
        assert trace is not None
        assert {span.rank for span in trace.spans} == set(range(pipe.plan.program.num_ranks))
        assert trace.num_ranks == pipe.plan.program.num_ranks
        return {
            "ranks": pipe.plan.program.num_ranks,
            "parameters": len(list(pipe.named_parameters())),
            "state": len(pipe.state_dict()),
            "says": f"{pipe.report()}\n{pipe!r}",
        }
