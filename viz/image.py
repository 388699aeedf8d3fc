"""Images: figures as HTML, for pages and notebooks."""

import base64
import io
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["image_html"]


def image_html(figure: "Figure", description: str, *, scalable: bool = False) -> str:
    """Return an HTML ``<img>`` element that contains the picture. A picture wider than the page is scaled down.

    Args:
        figure: the figure to show.
        description: alternative text for readers who cannot see the picture.
        scalable: whether to embed an SVG. Default: False, a PNG.

    """
    file = io.BytesIO()
    figure.savefig(file, format="svg" if scalable else "png")
    data = base64.b64encode(file.getvalue()).decode()
    source = f"data:image/{'svg+xml' if scalable else 'png'};base64,{data}"
    return f'<img alt="{escape(description)}" style="max-width: 100%" src="{source}">'
