"""Files written before the first release load, and give the same texts, numbers and bits.

`write_files.py` has written them. They stay as they are: for a new format, write more files beside them.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pipesched import Costs, Distributed, Plan, Profile, Trace, load_program, lower, simulate, validate
from tests.compatibility.scaled_model import batch, pipeline, trained
from tests.support.places import Group, mesh_of
from tests.support.rank_processes import Ranks

FILES = Path(__file__).parent / "files"
PLANS = sorted(path.stem for path in (FILES / "plans").iterdir())
PROGRAMS = sorted(path.stem for path in (FILES / "programs").glob("*.txt") if ".lowered" not in path.name)


def values(path: str) -> Any:
    return json.loads((FILES / path).read_text(encoding="utf-8"))


def as_saved(found: Any) -> Any:
    """Return values as a JSON file holds them."""
    return json.loads(json.dumps(found))


def assert_same_bits(found: dict[str, Tensor], name: str) -> None:
    kept = load_file(FILES / "results" / f"{name}.safetensors")
    assert sorted(found) == sorted(kept)
    assert [key for key in kept if not torch.equal(found[key], kept[key])] == []


def plan(name: str) -> Plan:
    return Plan.load(FILES / "plans" / f"{name}.json")


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_keeps_all_values_of_its_file(name: str) -> None:
    """``predicted`` is for people who read the file; loading ignores it."""
    kept, loaded = values(f"plans/{name}.json"), as_saved(plan(name).to_dict())
    for key in kept.keys() - {"predicted"}:
        assert loaded[key] == kept[key], key


@pytest.mark.parametrize("name", ["1f1b", "searched", "layers"])
def test_a_plan_predicts_the_step_of_its_file(name: str) -> None:
    predicted = plan(name).predicted()
    assert predicted is not None
    kept = {"makespan_s": predicted.makespan_s, "bubble_ratio": predicted.bubble_ratio}
    assert kept == values(f"plans/{name}.json")["predicted"]


@pytest.mark.parametrize("name", [name for name in PLANS if "zero" not in name])
def test_a_pipeline_of_a_plan_gives_the_same_bits(name: str) -> None:
    with pipeline(devices=["cpu"] * 2, plan=plan(name)) as pipe:
        assert_same_bits(trained(pipe, range(2)), "two-steps")


def train_replicas(group: Group, name: str) -> dict[str, Tensor]:
    """Train two replicas with a plan, one of them with the rows of the batch in reverse."""
    mesh, found = mesh_of(2, 2), plan(name)
    assert found.replication is not None
    distributed = Distributed(zero=found.replication.zero, timeout=60)
    with pipeline(mesh=mesh, plan=found, distributed=distributed) as pipe:
        losses = []
        for x, y in map(batch, range(2)):
            rows = (x, y) if mesh.get_local_rank("dp") == 0 else (x.flip(0), y.flip(0))
            losses.append(pipe.step(rows[0], target=rows[1]))
        return {"losses": torch.stack(losses), **pipe.full_state_dict()}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [name for name in PLANS if "zero" in name])
def test_replicas_of_a_plan_give_the_same_bits(ranks: Ranks, name: str) -> None:
    for found in ranks.run(4, train_replicas, name):
        assert_same_bits(found, "two-replicas")


def test_a_profile_keeps_all_values_of_its_file_and_gives_the_same_costs() -> None:
    profile = Profile.load(FILES / "profile.json")
    assert as_saved(profile.to_dict()) == values("profile.json")
    costs = profile.costs([["0", "1", "2"], ["3", "4", "5"]], 3)  # 3 rows were not measured
    kept = values("results/numbers.json")["costs"]
    found = as_saved(costs.to_dict())
    assert {key: found[key] for key in kept} == kept


def test_a_trace_keeps_all_values_of_its_file(tmp_path: Path) -> None:
    trace = Trace.load(FILES / "trace.json")
    assert as_saved(trace.to_dict()) == values("trace.json")
    trace.to_chrome(tmp_path / "trace.json")
    events = [
        json.loads(path.read_text())["traceEvents"] for path in (tmp_path / "trace.json", FILES / "trace.chrome.json")
    ]
    assert events[0] == events[1]
    drawn = Trace.load(FILES / "trace.chrome.json")
    assert [span.action for span in drawn.spans] == [span.action for span in trace.spans]
    assert drawn.makespan_s == pytest.approx(trace.makespan_s, rel=1e-9)  # Chrome's format counts microseconds


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_keeps_its_text_its_lowered_text_and_its_step(name: str) -> None:
    plain, lowered = (FILES / "programs" / f"{name}{end}.txt" for end in ("", ".lowered"))
    for path in (plain, lowered):
        program = load_program(path)
        validate(program)
        assert str(program) == path.read_text(encoding="utf-8")
        costs = Costs.uniform(program.num_stages, forward_s=2, input_grad_s=3, weight_grad_s=2, transfer_s=1)
        assert simulate(program, costs).makespan_s == values("results/numbers.json")["makespans"][name]
    assert str(lower(load_program(plain))) == lowered.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["1f1b", "offloaded"])
def test_a_pipeline_of_a_program_gives_the_same_bits(name: str) -> None:
    program = load_program(FILES / "programs" / f"{name}.txt")
    with pipeline(devices=["cpu"] * 2, schedule=program, boundaries=[3]) as pipe:
        assert_same_bits(trained(pipe, range(2)), "two-steps")


@pytest.mark.parametrize(("num_ranks", "schedule"), [(2, "1f1b"), (1, "gpipe"), (3, "zb-h1")])
def test_a_run_goes_on_from_its_checkpoint_with_the_same_bits(num_ranks: int, schedule: str) -> None:
    boundaries = [6 * stage // num_ranks for stage in range(1, num_ranks)]
    places = {"devices": ["cpu"] * num_ranks, "boundaries": boundaries}
    with pipeline(**places, schedule=schedule, num_microbatches=4) as pipe:
        assert pipe.load(FILES / "checkpoint").step == 2
        kept = load_file(FILES / "results" / "two-steps.safetensors")
        loaded = pipe.training_state()["tensors"]
        assert [key for key in loaded if not torch.equal(loaded[key], kept[key])] == []
        assert_same_bits(trained(pipe, range(2, 4)), "four-steps")
