"""Pictures of programs and traces: timelines and memory with matplotlib, timelines in plain text for terminals; and of
a model's layers with its cuts.

Nothing here imports matplotlib until a picture is drawn, and no global state of matplotlib is read or changed: a
picture is a Figure of its own, or goes on the Axes that is given. For Perfetto see ``Trace.to_chrome``.
"""

from pipesched.viz.compare import plot_compare
from pipesched.viz.layers import plot_layers
from pipesched.viz.memory import plot_memory
from pipesched.viz.text import text_timeline
from pipesched.viz.timeline import plot_timeline

__all__ = ["plot_compare", "plot_layers", "plot_memory", "plot_timeline", "text_timeline"]
