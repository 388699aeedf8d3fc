"""Pictures of traces (timelines and memory over time), timelines as text, pictures of layer graphs, of fleets and of
divided layers.

matplotlib is imported when the first picture is drawn, and its global state is neither read nor changed: a picture is
drawn on a new Figure or on the Axes that the caller passes. For Perfetto, see `Trace.to_chrome`.
"""

from pipesched.viz.compare import plot_compare
from pipesched.viz.fleet import plot_fleet
from pipesched.viz.layers import plot_layers
from pipesched.viz.memory import plot_memory
from pipesched.viz.tensor_blocks import plot_tensor_blocks
from pipesched.viz.text import text_timeline
from pipesched.viz.timeline import plot_timeline

__all__ = [
    "plot_compare",
    "plot_fleet",
    "plot_layers",
    "plot_memory",
    "plot_tensor_blocks",
    "plot_timeline",
    "text_timeline",
]
