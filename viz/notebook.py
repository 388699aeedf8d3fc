"""Notebook: traces as pictures for Jupyter."""

from pipesched.simulation.trace import Trace
from pipesched.viz.headline import headline
from pipesched.viz.image import image_html
from pipesched.viz.timeline import plot_timeline

__all__ = ["timeline_html"]


def timeline_html(trace: Trace) -> str:
    """Return the timeline of a trace as an HTML image."""
    return image_html(plot_timeline(trace).figure.figure, headline(trace))
