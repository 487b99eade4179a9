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

from picotron_edu.show.figure import Picture, finish, new_figure, style
from picotron_edu.show.ledger import duration, size
from picotron_edu.show.palette import RANK_COLOURS

MARKERS = "osD^vPX*"


def fit_alpha_beta(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """alpha (seconds) and beta (seconds per byte) that fit measured times best, neither below zero.

    The *relative* errors are made small (least squares of predicted / measured − 1). Absolute
    errors would fit the largest message alone: its time is thousands of alphas.

        alpha, beta = fit_alpha_beta([1e3, 1e6, 1e9], [1.1e-5, 1.1e-4, 0.1])
    """
    n, t = np.asarray(sizes, float), np.asarray(seconds, float)
    if len(n) != len(t) or len(set(n.tolist())) < 2:
        raise ValueError(
            f"a line needs one time per size and at least two different sizes, "
            f"got {len(n)} sizes ({len(set(n.tolist()))} different) and {len(t)} times"
        )
    if (t <= 0).any():
        raise ValueError(f"seconds must all be above 0, got {t.min()}")
    columns = np.stack([1 / t, n / t], axis=1)
    alpha, beta = np.linalg.lstsq(columns, np.ones_like(t), rcond=None)[0]
    if alpha < 0:  # noise: the best line through the origin
        alpha, beta = 0.0, _one_factor(columns[:, 1])
    elif beta < 0:  # noise: the best constant
        alpha, beta = _one_factor(columns[:, 0]), 0.0
    return float(alpha), float(beta)


def _one_factor(column: np.ndarray) -> float:
    """The factor f for which f · column is nearest to ones."""
    return float(column.sum() / (column**2).sum())


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
