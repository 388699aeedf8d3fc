"""Sent values: all types in what rank 0 decides are known to the encoding."""

import dataclasses
from typing import Any, get_args, get_type_hints

from pipesched.pipeline.sent_values import learn_decided_types
from pipesched.planning.plan import Plan
from pipesched.simulation.costs import Costs


class Learning:
    """Collectives that only note the types."""

    def __init__(self):
        self.types = set()

    def learn_types(self, *types):
        self.types |= {*types}

    def learn_parts(self, kind, parts, of_parts):
        self.types.add(kind)


def records_in(hint: Any) -> set[type]:
    """Return all dataclasses that a type hint names, and those in their fields."""
    found = set()
    waiting = [hint]
    while waiting:
        own = waiting.pop()
        waiting += get_args(own)
        if dataclasses.is_dataclass(own) and own not in found:
            found.add(own)
            waiting += get_type_hints(own).values()
    return found


def test_every_record_in_a_plan_can_be_sent():
    known = Learning()
    learn_decided_types(known)

    assert len(records_in(Plan)) > 10
    assert records_in(Plan) <= known.types


def test_records_are_found_in_fields_of_fields():
    assert {one.__name__ for one in records_in(Costs)} >= {"Costs", "Links", "Link", "Overheads"}
