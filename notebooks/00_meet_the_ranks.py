"""Chapter 00 from a shell: what does a message cost on *your* machine or cluster?

    python notebooks/00_meet_the_ranks.py --nproc 4
    torchrun --standalone --nproc-per-node 4 notebooks/00_meet_the_ranks.py --max-bytes 16777216

Times all_reduce, the chapter's ring and one message between neighbours over a range of sizes, fits
seconds(N) = alpha + beta·N to each, and checks that the ring's sums are those of all_reduce.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from picotron_edu.flags import flag
from picotron_edu.ranks import all_reduce, barrier, device, entrypoint, send_recv, wire_bytes, world
from picotron_edu.ranks.link import fit_alpha_beta
from picotron_edu.ranks.ring import ring_all_reduce

SMALLEST, LARGEST = 64, 2**30


@dataclass(frozen=True)
class Config:
    max_bytes: int = flag(4 * 2**20, "largest message; sizes go from 64 bytes to it, times 4 each")
    repeats: int = flag(10, "calls of each size; the fastest counts")

    def __post_init__(self) -> None:
        if not 4 * SMALLEST <= self.max_bytes <= LARGEST:
            raise ValueError(
                f"max_bytes={self.max_bytes}: must be from {4 * SMALLEST} to {LARGEST}"
            )
        if self.repeats < 1:
            raise ValueError(f"repeats={self.repeats}: must be 1 or more")


def main(config: Config) -> None:
    """Measure what messages cost between the ranks of this run."""
    axis = world()
    right, left = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
    sizes = [SMALLEST * 4**i for i in range(16) if SMALLEST * 4**i <= config.max_bytes]
    times: dict[str, list[float]] = {"all_reduce": [], "ring": [], "send_recv": []}
    difference = 0.0
    torch.manual_seed(axis.index)  # other numbers on each rank, also under torchrun
    for size in sizes:
        x = torch.randn(size // 4, device=device())
        buffer = torch.empty_like(x)
        difference = max(difference, ring_error(x))
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda x=x: all_reduce(x, axis),
            "ring": lambda x=x: ring_all_reduce(x, axis),
            "send_recv": lambda x=x, b=buffer: send_recv(axis, [(x, right)], [(b, left)]),
        }
        if axis.size > 1:
            for name, call in calls.items():
                times[name].append(seconds(call, config.repeats))
    if axis.index == 0:
        report(axis.size, sizes, times, difference)


def ring_error(x: torch.Tensor) -> float:
    """How far the ring's sum of `x` is from all_reduce's, at most; raises if that is too far."""
    expected, ours = all_reduce(x.clone(), world()), ring_all_reduce(x.clone(), world())
    difference = (ours - expected).abs().max().item()
    if not difference <= 1e-5 * expected.abs().max().item():  # also NaN is not
        raise AssertionError(f"the ring's sum of {x.numel()} numbers is {difference} off")
    return difference


def seconds(call: Callable[[], object], repeats: int) -> float:
    """The fastest of `repeats` calls, on the slowest rank."""
    best = float("inf")
    for _ in range(repeats):
        barrier(world())
        begin = time.perf_counter()
        call()
        if device().type == "cuda":
            torch.cuda.synchronize()  # a GPU call returns before its work is done
        best = min(best, time.perf_counter() - begin)
    return all_reduce(torch.tensor([best], device=device()), world(), op="max").item()


def report(n: int, sizes: list[int], times: dict[str, list[float]], difference: float) -> None:
    """The table, printed by rank 0."""
    print(f"{n} rank{'s' * (n > 1)} on {device().type}")
    print(f"the ring sums like all_reduce, up to {difference:.1e}, at all {len(sizes)} sizes")
    if n == 1:
        print("one rank has nobody to talk to: start with --nproc 2, or with torchrun")
        return
    print(f"\n{'N bytes':>10} {'sent by ring':>13}" + "".join(f"{name:>13}" for name in times))
    for i, size in enumerate(sizes):
        sent = wire_bytes("all_reduce", size, n)
        cells = "".join(f"{1e6 * column[i]:>10,.0f} µs" for column in times.values())
        print(f"{size:>10,} {sent:>13,.0f}{cells}")
    print()
    for name, column in times.items():
        alpha, beta = fit_alpha_beta(sizes, column)
        speed = f"{1e-9 / beta:.2f} GB/s" if beta else "too fast to tell"
        print(f"{name:>10}: alpha {1e6 * alpha:,.0f} µs, 1/beta {speed}")


if __name__ == "__main__":
    entrypoint(main, Config)
