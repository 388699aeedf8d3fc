"""Entries of a manifest: each change of plan reads one for every tensor that any rank holds."""

from pathlib import Path

from pipesched.saving.manifest import TensorEntry
from tests.support.call_count import calls


def test_the_types_of_fields_are_not_looked_up_for_each_entry() -> None:
    entry = TensorEntry(kind="parameter", name="0.weight", file="", shape=(4, 4), dtype="float32")
    assert TensorEntry.from_dict(entry.to_dict()) == entry
    seen = calls(lambda: TensorEntry.from_dict(entry.to_dict()))
    assert "get_type_hints" not in {name for file, name in seen if Path(file).name == "typing.py"}
