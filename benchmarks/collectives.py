"""What our wrappers cost: each collective beside torch's own call, on the same ranks, interleaved.

Ours checks that all ranks agree, notes who waits for whom and records an event; torch's does not.
Both make the tensor they return. That costs about 0.1 ms of Python a call, whatever the size: it
shows on a kilobyte and is lost in a megabyte. Goal: 1.0 within the noise of the machine (see the
spread) for messages as large as training sends them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from picotron_edu.ranks import all_gather, all_reduce, all_to_all, launch, reduce_scatter, world

RANKS, REPEATS = 2, 60
SIZES = [1 << 10, 1 << 18, 1 << 22]  # bytes


def pairs(numbers: int) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Name → (ours, torch's), on `numbers` float32."""
    axis, n = world(), dist.get_world_size()
    x = torch.ones(numbers)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return {
        "all_reduce": (lambda: all_reduce(x, axis), lambda: dist.all_reduce(x)),
        "all_gather": (lambda: all_gather(x, axis), lambda: gather(torch.empty(numbers * n), x)),
        "reduce_scatter": (
            lambda: reduce_scatter(x, axis),
            lambda: scatter(torch.empty(numbers // n), x),
        ),
        "all_to_all": (
            lambda: all_to_all(x, axis),
            lambda: dist.all_to_all_single(torch.empty(numbers), x),
        ),
    }


def compare(numbers: int) -> dict[str, tuple[float, float, float]]:
    """Medians of ours and torch's, in seconds, and torch's quartile spread."""
    result = {}
    for name, both in pairs(numbers).items():
        times: tuple[list[float], list[float]] = ([], [])
        for repeat in range(REPEATS + 5):
            for which in (0, 1) if repeat % 2 else (1, 0):
                dist.barrier()
                begin = time.perf_counter()
                both[which]()
                if repeat >= 5:
                    times[which].append(time.perf_counter() - begin)
        quartiles = statistics.quantiles(times[1], n=4)
        spread = (quartiles[2] - quartiles[0]) / statistics.median(times[1])
        result[name] = (statistics.median(times[0]), statistics.median(times[1]), spread)
    return result


def main() -> None:
    print(f"{RANKS} ranks, gloo; ours / torch's own, medians of {REPEATS}, recording on")
    for size in SIZES:
        for name, (ours, theirs, spread) in launch(
            compare, size // 4, world_size=RANKS, quiet=True
        )[0].items():
            print(
                f"  {name:15} {size:>9,} bytes  {ours * 1e6:8.0f} us / {theirs * 1e6:8.0f} us"
                f"  = {ours / theirs:4.2f}   (torch's quartiles ± {spread / 2:.0%})"
            )


if __name__ == "__main__":
    main()
