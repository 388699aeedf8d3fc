"""Page: key figures, findings, timelines and tables in one self-contained HTML file.

The page loads no other file and follows the light or dark mode of the system. It can be read and printed without
JavaScript; with JavaScript, a click on a column header sorts the table.
"""

from collections.abc import Iterator, Sequence
from html import escape

from pipesched.simulation.trace import Trace
from pipesched.viz.compare import plot_compare
from pipesched.viz.headline import headline
from pipesched.viz.image import image_html
from pipesched.viz.tables import Cell, KeyFigure, Table

__all__ = ["html_page"]

_MOST_BARS = 5_000  # timelines with more bars are embedded as a PNG, which stays small; other timelines as an SVG


def html_page(
    title: str,
    figures: Sequence[KeyFigure],
    lines: Sequence[str],
    tables: Sequence[Table],
    traces: "Sequence[tuple[str, Trace]]",
    last: Sequence[str] = (),
) -> str:
    """Return the page as HTML.

    Args:
        title: the heading.
        figures: the key figures, in large type at the top.
        lines: the findings as sentences, the most important first.
        tables: the tables at the end of the page.
        traces: (label, trace) pairs, drawn on a common time scale.
        last: the sentences at the end of the page.

    """
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>",
        f"<h1>{escape(title)}</h1>",
        *([_key_figures(figures)] if figures else []),
        *_findings(lines),
        *([_timelines(traces)] if traces else []),
        *(_table(table) for table in tables),
        *_findings(last),
        f"</main>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n",
    ]
    return "\n".join(parts)


def _key_figures(figures: Sequence[KeyFigure]) -> str:
    cards = "\n".join(
        f"<div><dt>{escape(own.label)}</dt><dd><strong>{escape(own.value)}</strong> {escape(own.note)}</dd></div>"
        for own in figures
    )
    return f'<dl class="figures">\n{cards}\n</dl>'


def _findings(lines: Sequence[str]) -> Iterator[str]:
    for at, line in enumerate(lines):
        yield f'<p class="{"first" if not at else "finding"}">{escape(line)}</p>'


def _timelines(traces: "Sequence[tuple[str, Trace]]") -> str:
    small = sum(len(row) for _, trace in traces for row in trace.by_rank) <= _MOST_BARS
    words = "; ".join(headline(trace, label) for label, trace in traces)
    image = image_html(plot_compare(traces), words, scalable=small)
    return f'<section>\n<h2>Timelines</h2>\n<div class="wide">{image}</div>\n</section>'


def _table(table: Table) -> str:
    most = {
        at: max((row[at].value or 0 for row in table.rows), default=0)
        for at, name in enumerate(table.columns)
        if name in table.bars
    }
    heads = "".join(
        f'<th scope="col"{_side(table, name)}><button type="button">{escape(name)}</button></th>'
        for name in table.columns
    )
    rows = "\n".join(
        f"<tr>{''.join(_cell(table, at, cell, most.get(at, 0)) for at, cell in enumerate(row))}</tr>"
        for row in table.rows
    )
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<section>\n<h2>{escape(table.title)}</h2>\n<div class="wide"><table>\n<thead><tr>{heads}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody></table></div>\n{note}</section>"
    )


def _cell(table: Table, at: int, cell: Cell, most: float) -> str:
    name = table.columns[at]
    classes = " ".join(filter(None, ["words" if name in table.words else "", cell.tone, "bar" if most else ""]))
    meant = f' class="{classes}"' if classes else ""
    style = f' style="--share:{100 * (cell.value or 0) / most:.1f}%"' if most else ""
    value = "" if cell.value is None else f' data-value="{cell.value:.9g}"'
    return f"<td{meant}{value}{style}>{escape(cell.text)}</td>"


def _side(table: Table, name: str) -> str:
    return ' class="words"' if name in table.words else ""


_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --text: #1a1a1a; --quiet: #666; --line: #d8d8d8;
  --good: #00704f; --bad: #b3261e; --bar: #d6ebf8; }
@media (prefers-color-scheme: dark) { :root { --ground: #16181b; --text: #e8e8e8; --quiet: #a0a0a0; --line: #3a3d42;
  --good: #4fd1a5; --bad: #ff8a80; --bar: #1e4258; } img { filter: invert(.92) hue-rotate(180deg); } }
body { margin: 0; background: var(--ground); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.35rem; margin: 0 0 .6rem; }
h2 { font-size: 1.1rem; margin: 1.8rem 0 .4rem; }
p { margin: .15rem 0; max-width: 75em; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(14rem, 1fr)); gap: .8rem; margin: 0 0 1rem; }
.figures div { border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .9rem; }
.figures dt { color: var(--quiet); font-size: .85rem; }
.figures dd { margin: 0; font-size: .85rem; }
.figures strong { display: block; font-size: 1.6rem; line-height: 1.3; }
.first { font-size: 1.15rem; font-weight: 600; }
.note, .quiet { color: var(--quiet); font-size: .85rem; }
.wide { overflow-x: auto; }
.wide img { min-width: 44rem; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .22rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { padding-left: .2rem; }
td.words, th.words { text-align: left; }
td.words { white-space: normal; min-width: 6em; }
th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible { outline: 2px solid currentColor; }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
.good { color: var(--good); }
.bad { color: var(--bad); font-weight: 600; }
.strong { font-weight: 600; }
.bar { background: linear-gradient(to right, var(--bar) var(--share), transparent var(--share)); }
img { max-width: 100%; }
@media print { main { max-width: none; padding: 0; } }
"""

_SCRIPT = """
for (const head of document.querySelectorAll("th")) head.addEventListener("click", () => {
  const table = head.closest("table"), body = table.tBodies[0], at = head.cellIndex;
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const key = row => row.cells[at].dataset.value;
  const order = (a, b) => {
    const [one, other] = [key(a), key(b)];
    if (one === undefined && other === undefined)
      return a.cells[at].textContent.localeCompare(b.cells[at].textContent) * (down ? -1 : 1);
    if (one === undefined || other === undefined) return one === undefined ? 1 : -1;
    return (one - other) * (down ? -1 : 1);
  };
  body.append(...[...body.rows].sort(order));
});
"""
