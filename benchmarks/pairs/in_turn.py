"""Two ways to do the same step, on the same ranks and in turn, so that a disturbance meets both."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch

from picotron_edu.ranks import all_reduce, barrier, world

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
