"""docs/decisions has one short page for each decision, and its index names them all."""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "decisions"
INDEX = (FOLDER / "README.md").read_text(encoding="utf-8")
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_decision_takes_at_most_200_words_and_states_its_price(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.split()) <= 200
    for part in ("**Choice.**", "**Why.**", "**Price.**", "**Another choice**"):
        assert text.count(part) == 1, part


def test_the_index_names_every_decision_by_its_title() -> None:
    titles = {page.name: page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for page in PAGES}
    assert {name: title for title, name in re.findall(r"^\| \[(.+?)\]\((.+?)\)", INDEX, re.MULTILINE)} == titles
