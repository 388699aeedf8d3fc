"""Tables of layers: read, completed by defaults, written again, and refused with all of their problems."""

import math
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipesched
from pipesched.checks import LARGEST_SIZE
from pipesched.errors import ArgumentError, InputError, PipeschedError, ScheduleError
from pipesched.simulation.layer_costs import LayerCosts, messages
from pipesched.simulation.profile import Profile
from pipesched.simulation.table_cells import COLUMNS, REQUIRED
from pipesched.simulation.tensor_split import SPLIT_SHARES
from tests.support.random_programs import quick

HEAD = ",".join(REQUIRED)
fewer = settings(quick, max_examples=25)  # large examples
FIGURES = [name for name in LayerCosts().figures() if name != "offloads"]


def row(name="a", **cells):
    return {
        "name": name,
        "forward_ms": 1.5,
        "backward_ms": 3.0,
        "parameter_bytes": 400,
        "output_bytes": 100,
        "activation_bytes": 700,
    } | cells


def layers(*names, **cells):
    return [row(name, **cells) for name in names]


def read(table, **options):
    return Profile.from_table(table, **{"rows": 4} | options)


def costs_of_all_cuts(profile, rows):
    names = list(profile.layers)
    return [profile.costs([names[:cut], names[cut:]], rows) for cut in range(1, len(names))] + [
        profile.costs([[name] for name in names], rows)
    ]


def refusal(table, **options):
    with pytest.raises(ScheduleError) as caught:
        read(table, **options)
    text = str(caught.value)
    assert text.startswith("a table of layers must ")
    assert text.endswith(("correct the table (docs/howto/tables.md describes all columns)", "check the path"))
    return text


# ---- there and back -------------------------------------------------------------------------------------------------

NUMBERS = st.integers(0, 10**6)
SHARES = st.floats(0, 1)
OPTIONAL = [name for name in COLUMNS if name not in (*REQUIRED, "rows", "inputs", "tied_to")]


@st.composite
def tables(draw):
    """Tables of one or two micro-batch sizes, with skip connections, parts of outputs and any columns."""
    names = draw(st.lists(st.text("ab.=:- ,;'\"é", min_size=1, max_size=4).map(str.strip), min_size=1, max_size=6))
    names = [f"{at}{name}".strip() for at, name in enumerate(names)]
    columns = draw(st.sets(st.sampled_from(OPTIONAL)))
    shapes = [_shape(draw, names[:at]) for at in range(len(names))]
    parameters = [draw(st.integers(1, 10**6)) * 8 for _ in names]
    made = []
    for rows in draw(st.sampled_from([(1,), (2, 6)])):
        for name, shape, size in zip(names, shapes, parameters, strict=True):
            cells = {column: draw(SHARES if column in SPLIT_SHARES else NUMBERS) for column in columns}
            if "num_parameters" in columns:
                cells["num_parameters"] = size // 4
            cells |= {"backward_ms": 2 * 10**6, "forward_ms": draw(NUMBERS), "output_bytes": draw(NUMBERS)}
            cells |= {"activation_bytes": draw(NUMBERS), "parameter_bytes": size, "rows": rows}
            made.append(row(name) | cells | {key: value.replace("ROWS", str(rows)) for key, value in shape.items()})
    return made


def _shape(draw, earlier):
    """The inputs of a layer; the parts of outputs grow with ROWS."""
    taken = draw(st.lists(st.sampled_from(earlier), unique=True)) if earlier else []
    parts = [name + draw(st.sampled_from(["", "=1ROWS", "=0", ":x=2ROWS"])) for name in taken]
    return {"inputs": "|".join(parts) or "-"} if parts or draw(st.booleans()) else {}


@fewer
@given(tables())
def test_a_table_becomes_a_profile_and_the_same_table_again(table):
    once = Profile.from_table(table)
    again = Profile.from_table(once.to_table())
    assert again.to_table() == once.to_table()
    for rows, graph in once.graphs.items():
        assert list(again.graph(rows).nodes(data=True)) == list(graph.nodes(data=True))
        assert again.graph(rows).graph["parameters"] == graph.graph["parameters"]
        for stages in ([[name] for name in graph], [list(graph)]):
            assert messages(again.graph(rows), stages) == messages(graph, stages)
    for cells in table:
        node = once.graph(cells["rows"]).nodes[cells["name"]]
        for column, value in cells.items():
            if column.endswith("_ms"):
                assert node[f"{column.removesuffix('_ms')}_s"] == value / 1000
            elif column.endswith("_bytes") or column in ("spread", "num_parameters"):
                assert node.get(column, 0) == value  # what concerns tensor groups is left out if it is all zero


@fewer
@given(tables())
def test_a_file_says_what_the_rows_say(table):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "layers.csv"
        rows = Profile.from_table(table).to_table(path)
        assert Profile.from_table(path).to_table() == rows
        assert path.read_text(encoding="utf-8").splitlines()[0] == ",".join(rows[0])


def test_a_table_in_the_form_that_is_written_comes_back_unchanged():
    table = [
        row("embed", rows=4, inputs="", tied_to="", weight_grad_ms=1.0, optimizer_bytes=7),
        row("block", rows=4, inputs="", tied_to="", weight_grad_ms=0.1, optimizer_bytes=8),
        row("side", rows=4, inputs="embed:1=30", tied_to="", weight_grad_ms=1.0, optimizer_bytes=8),
        row("head", rows=4, inputs="embed:1=30|block|side=9", tied_to="embed", weight_grad_ms=1.0, optimizer_bytes=0),
    ]
    assert Profile.from_table(table).to_table() == table


@st.composite
def measured(draw):
    """Profiles as measurements give them: times of any digits, several tensors on an edge, ties, own biases."""
    seconds = st.floats(1e-7, 10)
    count = draw(st.integers(2, 5))
    sizes = draw(st.sampled_from([(4,), (2, 4)]))
    ends = [(one, other) for other in range(count) for one in range(other) if draw(st.booleans()) or one == other - 1]
    shared, tied = draw(st.booleans()), draw(st.integers(1, count - 1))
    graphs = {}
    for rows in sizes:
        graph = nx.DiGraph(parameters={"w": (10, 40)})
        for at in range(count):
            own = (f"{at}.bias",) if draw(st.booleans()) or at == 0 else ()
            graph.graph["parameters"] |= dict.fromkeys(own, (2, 8))
            figures = {name: draw(seconds) if name.endswith("_s") else 10 + draw(NUMBERS) for name in FIGURES}
            figures |= {name: draw(st.integers(0, 10)) for name in FIGURES if re.search("kept|dear|left", name)}
            names = (("w",) if at == 0 or (shared and at == tied) else ()) + own
            figures["parameter_bytes"] = sum(graph.graph["parameters"][name][1] for name in names)
            graph.add_node(f"layer {at}", parameters=names, **figures)
        for number, (one, other) in enumerate(ends):
            tensors = {f"{one}.all": 50} | ({f"{one}.{number}": draw(NUMBERS)} if number % 2 else {})
            graph.add_edge(f"layer {one}", f"layer {other}", tensors=tensors, bytes=sum(tensors.values()))
        graphs[rows] = graph
    if len(sizes) > 1:  # parameters do not depend on the size
        for name in graphs[2]:
            graphs[4].nodes[name].update({key: graphs[2].nodes[name][key] for key in ("parameters", "parameter_bytes")})
        graphs[4].graph["parameters"] = graphs[2].graph["parameters"]
    return Profile(graphs)


@pytest.mark.parametrize("size", [0, 100])
def test_parts_that_are_as_large_as_the_output_stay_apart(size):
    table = layers("a", "b", "c", output_bytes=size)
    table[2]["inputs"] = f"a={size}"
    once = Profile.from_table(table, rows=4)
    again = Profile.from_table(once.to_table())
    assert again.to_table() == once.to_table()
    assert messages(again.graph(4), [["a"], ["b"], ["c"]]) == messages(once.graph(4), [["a"], ["b"], ["c"]])
    assert costs_of_all_cuts(again, 4) == costs_of_all_cuts(once, 4)


@fewer
@given(measured())
def test_a_measured_profile_has_the_same_costs_after_the_way_through_a_table(profile):
    again = Profile.from_table(profile.to_table())
    for rows in profile.graphs:
        assert costs_of_all_cuts(again, rows) == costs_of_all_cuts(profile, rows)


def test_times_that_milliseconds_would_round_are_written_in_seconds():
    graph = Profile.from_table(layers("a", "b"), rows=1).graphs[1]
    graph.nodes["a"]["forward_s"] = seconds = 1.551340217671618
    assert all(float(f"{seconds * 1e3:.{digits}g}") / 1e3 != seconds for digits in (15, 16, 17))
    table = Profile({1: graph}).to_table()
    assert table[0]["forward_s"] == seconds
    assert table[1]["backward_s"] == 0.003
    assert not any(column.endswith("_ms") for column in table[0])


def test_a_prediction_from_a_table_is_that_of_a_measured_profile_with_the_same_numbers():
    """The measured profile is a graph with all figures written out, and with other names for tensors and parameters."""
    names = [f"block{at}" for at in range(8)]
    table = [row(name, forward_ms=7 + at / 3, backward_ms=15.7, output_mb=3) for at, name in enumerate(names)]
    for cells in table:
        del cells["output_bytes"]
    graph = nx.DiGraph(parameters={f"{name}.weight": (100, 400) for name in names}, classes={})
    for at, name in enumerate(names):
        given_bytes = 3_000_000 if at else 0
        passing = given_bytes + 3_000_000
        graph.add_node(
            name,
            parameters=(f"{name}.weight",),
            forward_s=(7 + at / 3) / 1000,
            backward_s=0.0157,
            input_grad_s=0.0157 / 2,
            weight_grad_s=0.0157 / 2,
            parameter_bytes=400,
            num_parameters=100,
            gradient_bytes=400,
            deferred_gradient_bytes=400,
            optimizer_bytes=800,
            input_bytes=given_bytes,
            output_bytes=3_000_000,
            activation_bytes=700,
            weight_grad_bytes=700,
            forward_transient_bytes=passing,
            backward_transient_bytes=passing,
            first_backward_transient_bytes=passing + 400,
            input_grad_transient_bytes=passing + 700,
        )
        if at:
            graph.add_edge(names[at - 1], name, tensors={"out": 3_000_000}, bytes=3_000_000)
    links = pipesched.Links(inside=pipesched.Link(latency_s=1e-5, bytes_per_s=1e9))
    plans = [
        pipesched.tune_profile(profile, num_ranks=4, batch_size=64, links=links, schedule="zb-h1", effort=10_000)
        for profile in (read(table), Profile({4: graph}))
    ]
    assert plans[0].predicted().makespan_s == plans[1].predicted().makespan_s > 0
    assert plans[0].memory() == plans[1].memory()
    assert plans[0].stages == plans[1].stages


# ---- defaults -------------------------------------------------------------------------------------------------------


def test_six_columns_describe_a_training_step():
    profile = read(layers("a", "b"))
    node = profile.graph(4).nodes["b"]
    assert {name: node[name] for name in ("input_bytes", "gradient_bytes", "optimizer_bytes")} == {
        "input_bytes": 100,
        "gradient_bytes": 400,
        "optimizer_bytes": 800,
    }
    assert (node["input_grad_s"], node["weight_grad_s"], node["weight_grad_bytes"]) == (0.0015, 0.0015, 700)
    assert profile.graph(4).edges["a", "b"] == {"tensors": {"a": 100}, "bytes": 100}


def test_the_notes_say_what_was_assumed():
    assert read(layers("a", "b")).notes == (
        "assumed, as the table does not say: gradients take 4 B for each parameter",
        "assumed, as the table does not say: the optimizer keeps 8 B for each parameter (adam)",
        "assumed, as the table does not say: weight gradients take half of a backward",
    )
    assert "2 B" in read(layers("a"), bytes_per_parameter=2).notes[0]
    assert (
        read(layers("a"), bytes_per_parameter=2)
        .notes[1]
        .endswith("the optimizer keeps 12 B for each parameter (adam, with a float32 copy of each parameter)")
    )
    whole = {"gradient_bytes": 1, "optimizer_bytes": 2, "weight_grad_ms": 1}
    assert read(layers("a", **whole)).notes == ()
    assert len(read([row("a", **whole), row("b")]).notes) == 3  # one row lacks all three


@pytest.mark.parametrize(
    ("optimizer", "size"), [("sgd", 0), ("momentum", 400), ("adam", 800), ("adamw", 800), (12, 1200), (0.5, 50)]
)
def test_an_optimizer_is_a_name_or_bytes_for_each_parameter(optimizer, size):
    for profile in (
        read(layers("a"), optimizer=optimizer),
        read(layers("a", optimizer_bytes=5), optimizer=optimizer),  # the caller knows better than the table
        read(layers("a")).with_optimizer(optimizer),
    ):
        assert profile.graph(4).nodes["a"]["optimizer_bytes"] == size
        assert not any("optimizer" in note for note in profile.notes)
    assert read(layers("a", optimizer_bytes=5)).graph(4).nodes["a"]["optimizer_bytes"] == 5


def test_layers_without_gradients_have_no_optimizer_state():
    frozen = [row("a", gradient_bytes=0), row("b", gradient_bytes=100), row("c")]
    for profile in (read(frozen), read(frozen).with_optimizer("adam"), read(frozen, optimizer="adam")):
        assert [size for _, size in profile.graph(4).nodes(data="optimizer_bytes")] == [0, 200, 800]


def test_a_tied_parameter_has_one_optimizer_state_and_counts_once_in_a_stage():
    profile = read([row("embed"), row("head", tied_to="embed=400", parameter_bytes=480), row("end", tied_to="embed")])
    assert [size for _, size in profile.graph(4).nodes(data="optimizer_bytes")] == [800, 160, 0]
    assert profile.costs([["embed", "head", "end"]], 4).weight_bytes == (480,)
    assert profile.costs([["embed"], ["head", "end"]], 4).weight_bytes == (400, 480)
    assert profile.with_optimizer("adam").to_table() == profile.to_table()


# ---- edges ----------------------------------------------------------------------------------------------------------


def test_a_skip_connection_carries_the_output_once_from_each_user_to_the_next():
    table = [row("a"), row("b"), row("c", inputs="a | b"), row("d", inputs=["a", "c"])]
    graph = read(table).graph(4)
    assert [sorted(graph.pred[name]) for name in "abcd"] == [[], ["a"], ["a", "b"], ["a", "c"]]
    assert messages(graph, [["a"], ["b"], ["c"], ["d"]]) == {(0, 1): 100, (1, 2): 200, (2, 3): 200}
    assert [size for _, size in graph.nodes(data="input_bytes")] == [0, 100, 200, 200]


def test_parts_of_an_output_are_one_tensor_where_they_have_one_name():
    own = [row("a"), row("b", inputs="a=10"), row("c", inputs="a=10|b")]
    assert messages(read(own).graph(4), [["a"], ["b"], ["c"]]) == {(0, 1): 10, (0, 2): 10, (1, 2): 100}
    shared = [row("a"), row("b", inputs="a:x=10"), row("c", inputs="a:x=10|b")]
    assert messages(read(shared).graph(4), [["a"], ["b"], ["c"]]) == {(0, 1): 10, (1, 2): 110}


@pytest.mark.parametrize("attributes", [{}, {"bytes": 100}, {"tensors": {"a": 100}, "bytes": 100}])
def test_an_edge_without_tensors_carries_the_output_of_its_producer(attributes):
    """As `partition` says, so that the search and the prediction agree."""
    graph = read(layers("a", "b", "c")).graph(4)
    bare = nx.DiGraph(**graph.graph)
    bare.add_nodes_from(graph.nodes(data=True))
    bare.add_edges_from((one, other, dict(attributes)) for one, other in graph.edges)
    links = pipesched.Links(inside=pipesched.Link(bytes_per_s=1e3))
    options = {"num_ranks": 3, "batch_size": 8, "schedule": "1f1b", "all_ranks": True, "links": links}
    steps = [pipesched.tune_profile(Profile({4: own}), **options).predicted().makespan_s for own in (graph, bare)]
    assert steps[0] == steps[1] > 0.4


# ---- files and units ------------------------------------------------------------------------------------------------


def test_a_file_can_have_comments_other_separators_and_heads_as_people_write_them(tmp_path):
    text = "# a model\n\nLayer, Forward (ms),backward-us,Parameters,parameter_MB,output_kib,activation_bytes,\n"
    text += '"a, 1",1.5,3000,100,0.0004,.5,2 KiB,\n# between\n"b",1,1e3,1e2,4e-4,1,7,\n,,,,,,,\n'
    path = tmp_path / "layers.csv"
    for separator, encoding in ((",", "utf-8"), (",", "utf-8-sig"), (";", "utf-8"), ("\t", "utf-8")):
        path.write_bytes(re.sub(r',(?! 1")', separator, text).replace("\n", "\r\n").encode(encoding))
        profile = read(path)
        assert profile.layers == ("a, 1", "b")
        node = profile.graph(4).nodes["a, 1"]
        assert (node["forward_s"], node["backward_s"], node["num_parameters"]) == (0.0015, 0.003, 100)
        assert (node["parameter_bytes"], node["output_bytes"], node["activation_bytes"]) == (400, 512, 2048)


class DataFrame:
    """As much of a DataFrame of pandas (``to_dict``) or polars (``to_dicts``) as a table needs."""

    columns = ("name",)

    def __init__(self, method):
        setattr(self, method, lambda orient="records": {"records": layers("a", "b", tied_to=math.nan)}[orient])


@pytest.mark.parametrize("method", ["to_dict", "to_dicts"])
def test_a_table_can_be_a_data_frame_with_nan_in_empty_cells(method):
    assert read(DataFrame(method)).layers == ("a", "b")


def test_a_table_has_several_sizes_and_the_others_are_interpolated():
    profile = Profile.from_table([*layers("a", "b", rows=2), *layers("a", "b", rows=4, forward_ms=2.5)])
    assert sorted(profile.graphs) == [2, 4]
    assert profile.graph(3).nodes["a"]["forward_s"] == pytest.approx(2e-3)


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_all_problems_of_a_table_are_in_one_message():
    table = [
        row("a", forward_ms="fast", colour=3),
        row("b", output_bytes=-1, weight_grad_ms=9),
        row("b", inputs="c"),
        {"name": "d", "forward_ms": 1, "parameter_bytes": None},
        row("e", tied_to="nobody", parameter_byte=3),
    ]
    said = refusal(table, rows=None)
    for problem in (
        "row 1 ('a') has the forward_ms 'fast', which is not a finite number of at least 0",
        "the unknown column 'colour'",
        "row 2 ('b') has the output_bytes -1, which is not a size of at least 0 and less than 2**48 bytes",
        "the unknown column 'parameter_byte' (did you mean parameter_bytes?)",
        "no column rows (a column, or the argument rows=: the number of rows of the micro-batch)",
        "row 4 ('d') has no backward_ms, parameter_bytes, output_bytes, activation_bytes",
        "row 3 ('b') has the input 'c', which is neither an earlier row nor a part of its output, such as 'row=1MB'",
        "row 3 ('b') has the name of an earlier row",
        "and 1 more",
    ):
        assert problem in said
    assert "no column forward_ms" not in said


def test_all_missing_columns_are_in_one_message():
    assert "no column forward_ms, backward_ms, parameter_bytes, output_bytes, activation_bytes; " in refusal(
        [{"name": "a"}]
    )
    assert "no column name, output_bytes, rows (a column" in refusal(
        [{"forward_ms": 1, "backward_ms": 2, "parameter_bytes": 4, "activation_bytes": 5}], rows=None
    )


@pytest.mark.parametrize(
    "cell", ["x", "1,5", -1, math.inf, -math.inf, "nan", True, [1], 1e300, "1e400", b"1", object()]
)
@pytest.mark.parametrize("column", ["forward_ms", "parameter_bytes", "output_gb", "num_parameters", "rows", "spread"])
def test_cells_that_are_no_numbers_are_refused(column, cell):
    if (column, cell) == ("spread", 1e300):
        return
    table = layers("a", **{column: cell})
    if column == "output_gb":
        del table[0]["output_bytes"]
    assert f"row 1 ('a') has the {column} " in refusal(table, rows=None if column == "rows" else 4)


@pytest.mark.parametrize("cells", [{"name": "#1"}, {"name": "a|b"}, {"name": "-"}, {"name": "a\nb"}, {"name": ["a"]}])
def test_names_that_a_file_or_another_row_could_not_tell_apart_are_refused(cells):
    assert "which is not a printable name that does not begin with # or contain |" in refusal([row(**cells)])


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"inputs": "b"}, "has the input 'b', which is neither"),
        ({"inputs": "c"}, "has the input 'c', which is neither"),  # a later row: a cycle
        ({"inputs": "a="}, "has the input 'a=', which is neither"),
        ({"inputs": "a=x"}, "has the input 'a=x', which is neither"),
        ({"inputs": "a=999TB"}, "has the input 'a=999TB', which is neither"),
        ({"inputs": "a:=1"}, "has the input 'a:=1', which is neither"),
        ({"inputs": "a||"}, "has the input '', which is neither"),
        ({"inputs": "-|a"}, "has the input '-', which is neither"),
        ({"inputs": "a|a"}, "has the input 'a' twice"),
        ({"inputs": "a:x=1|a:x=2"}, "has the input 'a:x=2' twice, or with another size than before"),
        ({"tied_to": "b"}, "is tied to 'b', which is not an earlier row with at least as many parameters"),
        ({"tied_to": "a=900"}, "is tied to 'a=900'"),
        ({"tied_to": "a=0"}, "is tied to 'a=0'"),
        ({"tied_to": "a=1e400"}, "is tied to 'a=1e400'"),
        ({"tied_to": "a", "parameter_bytes": 440}, "is tied to 'a'"),
        ({"weight_grad_ms": 3.5}, "has a weight_grad that takes longer than its backward"),
        ({"num_parameters": 0}, "has 0 parameters in 400 bytes"),
        ({"forward_us": 7}, "two columns for forward_s"),
    ],
)
def test_rows_that_contradict_themselves_or_others_are_refused(cells, said):
    assert said in refusal([row("a"), row("b", **cells), row("c")])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no rows of layers"),
        ("# nothing\n\n", "no rows of layers"),
        (HEAD, "no rows of layers"),
        (f"{HEAD}\na,1,2,4,1\n", "line 2 has 5 cells, and the first line has 6"),
        (f"{HEAD}\n#\na,1,2,4,1,1,1\n", "line 3 has 7 cells, and the first line has 6"),
        (f'{HEAD}\n"a,1,2,4,1,1\n', "line 2 has 1 cells"),
        (f'{HEAD}\n"{"a" * 200_000}",1,2,4,1,1\n', "line 2 is not CSV"),
        (f"{HEAD},forward_ms\na,1,2,4,1,1,1\n", "two columns for forward_s"),
        (f"{HEAD}\na,1,2,4,1,\n", "no column activation_bytes"),
        (f"{HEAD}\na,1,2,4,1,5\nb,1,2,4,,5\n", "line 3 ('b') has no output_bytes"),
        (f",{HEAD}\n0,a,1,2,4,1,5\n", "the unknown column ''"),
        ("a model\n", "no rows of layers"),
        (b"\xff\xfea\x00", "it is not UTF-8 text"),
    ],
)
def test_files_that_are_no_tables_are_refused_by_name(tmp_path, text, said):
    path = tmp_path / "layers.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    refused = refusal(path)
    assert said in refused
    assert "layers.csv" in refused


@pytest.mark.parametrize("path", [".", "no/such/table.csv", "x" * 5000])
def test_paths_without_a_file_are_refused(path):
    assert "cannot be read" in refusal(path)


@pytest.mark.parametrize("table", [None, 5, b"name", object(), [None], ["a"], row("a")])
def test_values_that_are_no_tables_are_refused(table):
    with pytest.raises(
        (ArgumentError, ScheduleError), match=r"a table of layers must be a list of rows.*; pass a list"
    ):
        read(table)


@pytest.mark.parametrize(
    ("table", "rows", "said"),
    [
        (layers("a"), 0, "rows=0 is not a whole number"),
        (layers("a"), 2.5, "rows=2.5 is not a whole number"),
        (layers("a", rows=2), 4, "row 1 ('a') has the rows 2, but rows=4 was passed"),
        ([row("a", rows=2), row("b")], None, "row 2 ('b') has no rows"),
        ([*layers("a", "b", rows=2), *layers("b", "a", rows=4)], None, "for micro-batches of 2 and of 4 rows differ"),
        ([*layers("a", rows=2), *layers("a", rows=4, parameter_bytes=8)], None, "of 2 and of 4 rows differ"),
    ],
)
def test_sizes_of_micro_batches_that_contradict_each_other_are_refused(table, rows, said):
    assert said in refusal(table, rows=rows)


@pytest.mark.parametrize(
    "given",
    [
        {"optimizer": "adamax"},
        {"optimizer": -1},
        {"bytes_per_parameter": 0},
        {"bytes_per_parameter": "2"},
        {"machine": "a100"},
    ],
)
def test_other_arguments_are_refused_with_a_remedy(given):
    with pytest.raises((InputError, ArgumentError), match=r"; got .*; for example, pass"):
        read(layers("a"), **given)
    if "optimizer" in given:
        with pytest.raises(InputError, match="sgd, momentum, adam, adamw, or the number of bytes"):
            read(layers("a")).with_optimizer(**given)


def test_a_profile_that_no_table_can_hold_is_refused():
    graph = nx.DiGraph(parameters={"w": (1, 4), "v": (1, 4)})
    for name, own in (("a", ("w",)), ("b", ("v",)), ("c", ("w", "v"))):
        graph.add_node(name, parameters=own, **(dict.fromkeys(FIGURES, 0) | {"parameter_bytes": 4 * len(own)}))
    with pytest.raises(ScheduleError, match=r"does not fit into a table.*Profile\.save"):
        Profile({1: graph}).to_table()
    with pytest.raises(ScheduleError, match=r"printable name.*Profile\.save"):
        Profile({1: nx.relabel_nodes(graph.subgraph(["a"]), {"a": "#a"})}).to_table()


# ---- the notes of a profile -----------------------------------------------------------------------------------------


def test_notes_are_saved_with_a_profile(tmp_path):
    profile = read(layers("a", "b"))
    profile.save(tmp_path / "profile.json")
    loaded = Profile.load(tmp_path / "profile.json")
    assert loaded.notes == profile.notes != ()
    assert loaded.to_table() == profile.to_table()


@pytest.mark.parametrize("notes", ["text", [1], None, {"a": 1}])
def test_notes_are_sentences(notes):
    graphs = read(layers("a")).graphs
    with pytest.raises(ScheduleError, match="the notes of a profile must be a list of strings"):
        Profile(graphs, notes=notes)
    with pytest.raises(ScheduleError, match="the notes of a profile must be a list of strings"):
        Profile.from_dict(Profile(graphs).to_dict() | {"notes": notes})


# ---- graphs made by hand --------------------------------------------------------------------------------------------


def test_all_missing_and_wrong_costs_of_a_graph_are_in_one_message():
    graph = nx.DiGraph(parameters={})
    graph.add_node("a", forward_s=1, backward_s=math.nan, parameters=())
    graph.add_node("b", forward_s="fast", output_bytes=2.5, input_bytes=LARGEST_SIZE)
    graph.add_edge("a", "b", bytes=-1)
    with pytest.raises(PipeschedError) as caught:
        Profile({4: graph})
    for problem in (
        "input_grad_s of layer 'a' and 1 more is missing",
        "backward_s of layer 'b' is missing",
        "parameters of layer 'b' is missing",
        "backward_s of layer 'a' for 4 rows is nan",
        "and 2 more",
    ):
        assert problem in str(caught.value)
    assert str(caught.value).endswith("or make the profile with Profile.from_table, which has default values")
