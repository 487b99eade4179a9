"""From a drawing to a picture in the notebook: one style, one caption, shown exactly once.

Every function of `show` ends with `return finish(figure, caption)`:

    in a notebook     the picture appears at once, wherever in the cell the call stands; the
                      returned Picture draws nothing of its own, so that a call on the last line
                      does not show it twice
    anywhere else     nothing is shown; `show.mesh(grid).save("mesh.png")` writes a file

The figures are plain `matplotlib.figure.Figure` objects, made without pyplot: there is no list of
open figures to close, no backend to choose, and `%matplotlib inline` makes no difference. The
text that goes with the image (for screen readers, and for strict notebook checks, which compare
text and skip images) is the caption: the same in every run as long as the caption holds no
measured time.
"""

import logging
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image  # comes with matplotlib

from picotron_edu.show.palette import FRAME, PAPER, TEXT

WIDTH = 9.0  # inches: the width of a notebook cell at 96 pixels an inch
PIXELS_PER_INCH = 96
DOTS_PER_INCH = 144  # of the image: sharp on a screen that shows it smaller

# The first picture on a new machine builds matplotlib's font cache, with a warning on stderr.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same on every machine
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 11,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": FRAME,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "grid.color": "#DDDDDD",
    "hatch.linewidth": 0.6,
    "lines.linewidth": 2.0,
    "figure.constrained_layout.w_pad": 0.1,  # inches
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
}


@contextmanager
def style() -> Iterator[None]:
    """The course's look for everything drawn inside the `with` block, and only there."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def new_figure(height: float, width: float = WIDTH) -> Figure:
    """An empty figure, sizes in inches; its parts are laid out so that no label is cut off."""
    return Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained")


class Picture:
    """A finished picture: `.figure` (matplotlib), `.caption`, `.save(path)`."""

    def __init__(self, figure: Figure, caption: str) -> None:
        self.figure = figure
        self.caption = caption

    def png(self) -> bytes:
        """The image in 64 colours: it looks the same, in a third of the bytes."""
        canvas = FigureCanvasAgg(self.figure)
        with style():
            canvas.draw()
        image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
        buffer = BytesIO()
        few = image.quantize(64, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
        few.save(buffer, format="png")
        return buffer.getvalue()

    def save(self, path: str | Path) -> None:
        """Write the picture to `path`; the ending (.png, .svg, .pdf) chooses the format."""
        with style():
            self.figure.savefig(path, dpi=DOTS_PER_INCH)

    def _ipython_display_(self) -> None:
        """Nothing: `finish` has shown it already."""


def finish(figure: Figure, caption: str) -> Picture:
    """Write `caption` under the figure, show it once if this is a notebook, return the Picture."""
    characters = int(figure.get_size_inches()[0] * 12.7)  # wide letters, too
    figure.supxlabel(
        textwrap.fill(caption, characters),
        x=0.01,
        horizontalalignment="left",
        fontsize=10.5,
        fontstyle="italic",
        color="#444444",
    )
    picture = Picture(figure, caption)
    if in_notebook():
        pixels = [int(inches * PIXELS_PER_INCH) for inches in figure.get_size_inches()]
        size = {"width": pixels[0], "height": pixels[1]}
        emit({"image/png": picture.png(), "text/plain": caption}, {"image/png": size})
    return picture


def in_notebook() -> bool:
    """Whether this process is a Jupyter kernel (an IPython terminal and plain Python are not)."""
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return getattr(shell, "kernel", None) is not None


def emit(bundle: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
    """Send one output to the notebook, as a dictionary from MIME type to content."""
    from IPython.display import display

    display(bundle, raw=True, metadata=metadata or {})
