"""The loop of the page about Accelerate prints the same losses with and without a pipeline."""

from pathlib import Path

from accelerate.state import AcceleratorState, PartialState

from tests.support.pages import blocks, side

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "accelerate.md"


def test_both_sides_of_the_diff_print_the_same_losses(capsys):
    (setup,) = (text for kind, text in blocks(PAGE) if kind == "python")
    (diff,) = (text for kind, text in blocks(PAGE) if kind == "diff")
    printed = []
    for sign in "-+":
        AcceleratorState._reset_state()
        PartialState._reset_state()
        exec(compile(setup + side(diff, sign), str(PAGE), "exec"), {})
        printed.append(capsys.readouterr().out.split())
    assert printed[0] == printed[1]
    assert len(printed[0]) == 2 + 4
