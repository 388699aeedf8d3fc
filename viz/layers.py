"""Layers: pictures of a model's layer graph, with one band for each stage."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipesched.checks import as_list, shown
from pipesched.errors import ArgumentError, PartitionError
from pipesched.simulation.tied_weight_costs import tied_groups
from pipesched.units import quote_bytes, quote_time
from pipesched.viz.colours import GREY, INK, stage_colour, towards_white
from pipesched.viz.routes import ARCH, HEIGHT, WIDTH, Layout, Point
from pipesched.viz.timeline import check_axes

if TYPE_CHECKING:
    import networkx as nx
    from matplotlib.axes import Axes

__all__ = ["plot_layers"]

_HEAD = 1.05  # inches, width of the space for stage names
_EDGE = 0.15  # inches, width of the margin around the picture
_LONGEST = 15  # maximum number of characters per line in a box
_LIGHT = 0.62  # fraction of white in the boxes' colour
_LIGHTEST = 0.86  # fraction of white in the bands' colour


def plot_layers(graph: "nx.DiGraph[str]", stages: Sequence[Sequence[str]], ax: "Axes | None" = None) -> "Axes":
    """Draw a model's layers in one band for each stage, with lines for the tensors that layers pass to each other.

    Each box shows its layer's share of the total layer time, as a number and as a bar. A line between two stages is
    labelled with the bytes sent for one micro-batch. Dashed lines connect layers that share parameters.

        graph = pipesched.graph_of(model, sample)
        pipesched.viz.plot_layers(graph, pipe.plan.stages).figure.savefig("layers.png")

    Args:
        graph: the layer graph, from `pipesched.graph_of`.
        stages: the layers of each stage, in the order in which they run.
        ax: the matplotlib Axes to draw on. Default: a new Figure.

    Returns:
        The Axes. To save the picture, call ``savefig`` on its ``figure``.

    Raises:
        ArgumentError: if ``graph`` or ``ax`` has the wrong type.
        PartitionError: if the stages do not contain each layer of the graph exactly once.

    """
    check_axes(ax)
    rule = "stages must be a list of lists of layer names"
    remedy = "pass the stages of a partition of this graph"
    if not all(hasattr(graph, part) for part in ("nodes", "edges")):
        raise ArgumentError(
            f"graph must be a networkx graph of layers; got {shown(graph)}; pass the result of graph_of"
        )
    named = [name for layers in as_list(stages, rule, remedy) for name in as_list(layers, rule, remedy)]
    if sorted(map(str, named)) != sorted(graph) or not all(stages):
        raise PartitionError(
            f"stages must contain each layer of the graph exactly once; {_differences(named, graph)}; {remedy}"
        )
    layout = Layout(stages)
    ties = tied_groups(graph)
    layout.reserve(list(graph.edges))
    for users in ties:
        layout.reserve_tie(users, users)
    layout.place()
    picture = _Picture(graph, layout, _axes(layout) if ax is None else ax)
    picture.bands()
    for before, behind, edge in graph.edges(data=True):
        picture.line(before, behind, edge.get("bytes", 0))
    for users, names in ties.items():
        picture.tie(users, names)
    for name in named:
        picture.box(name)
    return picture.ax


def _differences(named: Sequence[str], layers: Iterable[str]) -> str:
    """Describe how the names listed in the stages differ from the layers' names, for an error message."""
    names = [str(name) for name in named]
    known = set(layers)
    kinds = {
        "missing": known - {*names},
        "unknown": {*names} - known,
        "repeated": {name for name in names if names.count(name) > 1},
    }
    found = [f"{kind}: {', '.join(sorted(of_kind))}" for kind, of_kind in kinds.items() if of_kind]
    return ", ".join(found) or "some stages are empty"


def _axes(layout: Layout) -> "Axes":
    from matplotlib.figure import Figure

    width = layout.lanes("left") + layout.right + layout.lanes("right") + _HEAD + 3 * _EDGE
    figure = Figure(figsize=(width, layout.bottom + 2 * _EDGE), dpi=150)
    return figure.add_axes((0, 0, 1, 1))


class _Picture:
    def __init__(self, graph: "nx.DiGraph[str]", layout: Layout, ax: "Axes") -> None:
        self.ax = ax
        self._graph = graph
        self._layout = layout
        self._stage_of = {name: stage for stage, names in enumerate(layout.stages) for name in names}
        times = {name: node.get("forward_s", 0) + node.get("backward_s", 0) for name, node in graph.nodes(data=True)}
        self._times: Mapping[str, float] = times
        self._total = sum(times.values())
        self._longest = max(times.values())
        of_stages = [sum(times[name] for name in names) for names in layout.stages]
        self._slowest = of_stages.index(max(of_stages)) if self._total and len(of_stages) > 1 else -1
        self._labels = _short(list(graph), graph.graph.get("classes", {}))
        self._left = -layout.lanes("left") - _HEAD - 2 * _EDGE
        self._right = layout.right + layout.lanes("right") + _EDGE
        ax.set_xlim(self._left, self._right)
        ax.set_ylim(layout.bottom + _EDGE, -_EDGE)
        ax.set_aspect("equal")
        ax.axis("off")

    def bands(self) -> None:
        """Draw a band for each stage, with the stage's name, its time and its share of the total time."""
        from matplotlib.patches import FancyBboxPatch

        lines = self._layout.lines
        tops = [*self._layout.tops, self._layout.bottom]
        for stage, names in enumerate(self._layout.stages):
            of_stage = [line for line, (at, _) in enumerate(lines) if at == stage]
            top = tops[of_stage[0]] - 0.09 - self._layout.arch(of_stage[0])
            bottom = tops[of_stage[-1]] + HEIGHT + 0.09
            band = towards_white(stage_colour(stage), _LIGHTEST)
            width = self._right - self._left - 0.1
            shape = FancyBboxPatch(
                (self._left + 0.05, top), width, bottom - top, "round,pad=0,rounding_size=0.06", fc=band, ec="none"
            )
            self.ax.add_patch(shape)
            text = f"stage {stage}"
            if self._total:
                time_s = sum(self._times[name] for name in names)
                text += f"\n{quote_time(time_s)}, {time_s / self._total:.0%}"
            slowest = stage == self._slowest
            if slowest:
                text += "\nthe slowest"
            weight = "bold" if slowest else "normal"
            self.ax.text(
                self._left + 0.15, (top + bottom) / 2, text, va="center", fontsize=8, color=INK, fontweight=weight
            )

    def box(self, name: str) -> None:
        """Draw the box of a layer, with the label and the layer's share of the total time."""
        from matplotlib.patches import FancyBboxPatch, Rectangle

        x, y = self._layout.corner(name)
        colour = stage_colour(self._stage_of[name])
        shape = "round,pad=0,rounding_size=0.05"
        light = towards_white(colour, _LIGHT)
        self.ax.add_patch(FancyBboxPatch((x, y), WIDTH, HEIGHT, shape, fc=light, ec=colour, lw=1, zorder=5))
        if not self._total:
            self.ax.text(x + WIDTH / 2, y + HEIGHT / 2, self._labels[name], **_CENTRED)
            return
        label = self._labels[name]
        small = {**_CENTRED, "fontsize": 6, "linespacing": 1.15}
        self.ax.text(x + WIDTH / 2, y + 0.15, label, **(small if "\n" in label else _CENTRED))
        share = self._times[name] / self._total
        inside = WIDTH - 0.12
        self.ax.text(
            x + WIDTH / 2, y + (0.33 if "\n" in label else 0.31), _percent(share), **{**_CENTRED, "fontsize": 6.5}
        )
        length = inside * self._times[name] / self._longest
        self.ax.add_patch(Rectangle((x + 0.06, y + HEIGHT - 0.09), inside, 0.045, fc="white", ec="none", zorder=6))
        self.ax.add_patch(Rectangle((x + 0.06, y + HEIGHT - 0.09), length, 0.045, fc=colour, ec="none", zorder=6))

    def line(self, before: str, behind: str, size: int) -> None:
        """Draw a line for the tensors that one layer passes to another: ``size`` bytes per micro-batch."""
        crosses = self._stage_of[before] != self._stage_of[behind]
        colour = stage_colour(self._stage_of[before]) if crosses else GREY
        way = self._layout.way(before, behind)
        if len(way) == 2 and self._between(before, behind):
            self._arc(way, colour)
            return
        self._path(way, colour, arrow=True, lw=1.3 if crosses else 0.9)
        if crosses:
            x, y = way[-1]
            count = self._layout.num_entries(behind)
            number = self._layout.entry(before, behind)[1]
            left = count > 1 and number == 0
            y -= 0.1 + 0.1 * (number if count > 2 and not left else 0)
            place: dict[str, Any] = {"ha": "right" if left else "left", "va": "center"}
            x += -0.05 if left else 0.05
            self.ax.text(x, y, quote_bytes(size, 4), fontsize=6, color=INK, zorder=7, **place, **_HALO)

    def _between(self, before: str, behind: str) -> bool:
        line = self._layout.lines[self._layout.line_of(before)][1]
        return line.index(behind) > line.index(before) + 1

    def _arc(self, way: list[Point], colour: str) -> None:
        """Draw an arrow between two boxes in the same row, passing above the boxes between them."""
        from matplotlib.patches import FancyArrowPatch

        (x, y), (to_x, _) = way
        ends = (x - 0.4 * WIDTH, y - HEIGHT / 2), (to_x + 0.4 * WIDTH, y - HEIGHT / 2)
        style = f"arc3,rad={-1.7 * ARCH / (ends[1][0] - ends[0][0])}"  # the arc's height is half of this
        self.ax.add_patch(
            FancyArrowPatch(*ends, connectionstyle=style, arrowstyle="-|>", mutation_scale=6, color=colour, lw=0.9)
        )

    def tie(self, users: Sequence[str], names: Sequence[str]) -> None:
        """Draw dashed lines between layers that share parameters, labelled with the name and size of the parameters."""
        lane, ways = self._layout.tie(users, users)
        for way in ways:
            self._path(way, INK, arrow=False, lw=0.9, dashed=True)
        self._path(lane, INK, arrow=False, lw=0.9, dashed=True)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        sizes = self._graph.graph.get("parameters", {})
        size = f", {quote_bytes(sum(sizes[name][1] for name in names), 4)}" if sizes else ""
        (x, top), (_, bottom) = lane
        text = f"{names[0]}{more}{size}"
        self.ax.text(
            x, (top + bottom) / 2, text, fontsize=6, color=INK, rotation=90, ha="center", va="center", zorder=7, **_HALO
        )

    def _path(self, way: list[Point], colour: str, *, arrow: bool, lw: float, dashed: bool = False) -> None:
        from matplotlib.patches import FancyArrowPatch
        from matplotlib.path import Path

        self.ax.add_patch(
            FancyArrowPatch(
                path=Path(way),
                arrowstyle="-|>" if arrow else "-",
                mutation_scale=6,
                color=colour,
                lw=lw,
                ls="--" if dashed else "-",
                joinstyle="round",
                shrinkA=0,
                shrinkB=0,
                zorder=3,
            )
        )


_CENTRED: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7.5, "color": INK, "zorder": 7}
_HALO: dict[str, Any] = {"bbox": {"fc": "white", "ec": "none", "alpha": 0.8, "pad": 0.6}}


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.0995 else f"{share:.0%}"


def _short(names: Sequence[str], classes: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of the boxes, keyed by layer.

    A label is the layer's name without the prefix that all names share, then the layer's class if it is known.
    Long labels take two lines. If a line is still too long, its middle is left out.
    """
    parts = [name.split(".") for name in names]
    common = 0
    while all(len(path) > common + 1 for path in parts) and len({path[common] for path in parts}) == 1:
        common += 1
    labels = {}
    for name, path in zip(names, parts, strict=True):
        label = ".".join(path[common:])
        if name in classes:
            label += f" {classes[name]}"
        if len(label) > _LONGEST:
            dots = [at for at, letter in enumerate(label) if letter in ". "]
            at = min(dots, key=lambda at: max(at, len(label) - at), default=len(label))
            label = "\n".join(map(_cut, filter(None, (label[:at], label[at:].lstrip()))))
        labels[name] = label
    return labels


def _cut(line: str) -> str:
    return line if len(line) <= _LONGEST + 2 else f"{line[: _LONGEST // 2]}…{line[-(_LONGEST // 2) :]}"
