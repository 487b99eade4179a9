"""Two ways to do the same step, on the same ranks and in turn, so that a disturbance meets both."""

from __future__ import annotations

import resource
import statistics
import time
import warnings
from collections.abc import Callable

import torch

from picotron_edu.ranks import all_reduce, barrier, launch, world

Step = Callable[[], float]  # one training step; returns its loss


def in_turn(
    make_ours: Callable[[], Step], make_theirs: Callable[[], Step], repeats: int, warm_up: int
) -> tuple[list[float], list[float]]:
    """Seconds of the slowest rank, for each of `repeats` steps of both, after `warm_up` ones."""
    warnings.simplefilter("ignore")
    steps = [make_ours(), make_theirs()]
    first = [step() for step in steps]
    assert abs(first[0] - first[1]) < 1e-4, first  # it is the same work
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + warm_up):
        for which in (0, 1) if repeat % 2 else (1, 0):
            barrier(world())
            begin = time.perf_counter()
            steps[which]()
            took = torch.tensor(time.perf_counter() - begin)
            times[which].append(all_reduce(took, world(), "max").item())
    return times[0][warm_up:], times[1][warm_up:]


def peak_megabytes(make: Callable[[], Step]) -> float:
    """How far the resident set of a fresh process rises over two steps."""
    warnings.simplefilter("ignore")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = make()
    step(), step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3


def print_row(
    name: str,
    make_ours: Callable[[], Step],
    make_theirs: Callable[[], Step],
    goal: str,
    repeats: int,
    warm_up: int,
) -> None:
    """Two ranks: median times, the median of the ratios of neighbouring steps, both peaks."""
    settings = {"world_size": 2, "quiet": True, "trace": False, "timeout": 300}
    mine, other = launch(in_turn, make_ours, make_theirs, repeats, warm_up, **settings)[0]
    peaks = [launch(peak_megabytes, make, **settings)[0] for make in (make_ours, make_theirs)]
    ratio = statistics.median(a / b for a, b in zip(mine, other))
    times = f"{statistics.median(mine) * 1e3:4.0f} ms / {statistics.median(other) * 1e3:4.0f} ms"
    print(f"  {name:38} {times} = {ratio:.2f}   {goal}", end="")
    print(f"   peak memory + {peaks[0]:.0f} MB / + {peaks[1]:.0f} MB")
