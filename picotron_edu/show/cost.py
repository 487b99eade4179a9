"""What a message costs: alpha seconds to get going, beta seconds a byte.

    seconds(N) = alpha + beta · N          alpha: latency,  1 / beta: bandwidth

Small messages cost alpha, whatever their size; large ones cost beta · N. The two meet at N =
alpha / beta: below it a link is waiting most of the time, and two messages in one are nearly
twice as fast. (Hockney's model, 1994; the ring algorithms multiply alpha by their number of
steps.)
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.ticker import FuncFormatter

from picotron_edu.ranks.link import fit_alpha_beta
from picotron_edu.show.figure import Picture, finish, new_figure, style
from picotron_edu.show.ledger import duration, size
from picotron_edu.show.palette import RANK_COLOURS

MARKERS = "osD^vPX*"


def alpha_beta(
    sizes_bytes: Sequence[float],
    seconds_by_operation: Mapping[str, Sequence[float]],
    fit: Mapping[str, tuple[float, float]] | None = None,
    caption: str = "Dots are measured, lines are α + β·N: flat while latency rules, rising once "
    "bandwidth does.",
) -> Picture:
    """Time and achieved bandwidth against message size, both axes logarithmic.

    fit   (alpha, beta) per operation; fitted here where it is not given

        show.alpha_beta([1e3, 1e6], {"all_reduce": [5e-5, 2e-3]})
    """
    sizes = np.asarray(sizes_bytes, float)
    fits = dict(fit or {})
    for name, seconds in seconds_by_operation.items():
        fits.setdefault(name, fit_alpha_beta(sizes_bytes, seconds))
    line = np.geomspace(sizes.min(), sizes.max(), 200)
    with style():
        figure = new_figure(height=4.6)
        left, right = figure.subplots(1, 2)
        for i, (name, seconds) in enumerate(seconds_by_operation.items()):
            alpha, beta = fits[name]
            colour, marker = RANK_COLOURS[i % 7], MARKERS[i % len(MARKERS)]
            measured, modelled = np.asarray(seconds, float), alpha + beta * line
            speed = f"{size(1 / beta)}/s" if beta > 0 else "no limit seen"
            label = f"{name}: α {duration(alpha)}, 1/β {speed}"
            dots = {"color": colour, "marker": marker, "ls": "none", "ms": 6}
            left.plot(sizes, measured, label=label, **dots)
            left.plot(line, modelled, color=colour, lw=1.6)
            right.plot(sizes, sizes / measured, **dots)
            right.plot(line, line / modelled, color=colour, lw=1.6)
        for ax, title in ((left, "time of one call"), (right, "achieved bandwidth")):
            ax.set(xscale="log", yscale="log", title=title, xlabel="message size N")
            ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: size(x)))
            ax.grid(True, which="major")
            ax.minorticks_off()
        left.yaxis.set_major_formatter(FuncFormatter(lambda y, _: duration(y)))
        right.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{size(y)}/s"))
        columns = 2 if len(seconds_by_operation) > 1 else 1
        figure.legend(loc="outside upper left", ncols=columns)
        return finish(figure, caption)
