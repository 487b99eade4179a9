"""Context parallelism: zig-zag beside contiguous order, and a ring of two beside one rank.

Causal attention alone, forward and backward, in float32, one thread a rank. Both sides are run in
turn; a ratio is the median of the ratios of neighbours.

*Order*, 4 ranks. In contiguous order the last rank has 7/4 of the work of a zig-zag rank, and all
wait for it: 4/7 = 0.57 is the best ratio there is. A machine with fewer than 4 free cores cannot
show that: who waits lends its core to who is busy, and all work together is the same in both
orders. So each ring is run twice. First for real; each rank notes the CPU time of each of its
steps, which does not grow while others have its core. Then again with all its messages, over an
emulated link, and in each step the rank *sleeps* for the CPU time it has noted: what four machines
with a core each would take. Beside it stands the plain ratio of the real runs, on these cores.

*Speed-up*, 2 ranks, in plain seconds: the ring in zig-zag order beside half of what one rank needs
for the whole sequence with torch's fused attention. 1.0 is ideal. While the one rank's time is
taken, the other rank does the same: caches, memory and clock are as busy as in the ring.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F
from pairs.in_turn import in_turn
from torch import Tensor

from picotron_edu import ring_attention
from picotron_edu.context_parallel import positions_of
from picotron_edu.ranks import Link, all_reduce, barrier, launch, world
from picotron_edu.ring_attention import Order, around

H, K, S, d = 8, 2, 4096, 128  # heads, key heads, tokens of all ranks together, size of a head
LINK = Link(latency_us=50, gbps=10)
ORDERS: tuple[Order, Order] = ("zigzag", "contiguous")
REPEATS = 8
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def make_step(attend: Attend, here_S: Tensor) -> Callable[[], float]:
    """Forward and backward of the mean square of all outputs; this rank has the tokens here_S."""
    draw = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, heads, S, d, generator=draw) for heads in (H, K, K)]
    q, k, v = (x[:, :, here_S].requires_grad_() for x in whole)

    def step() -> float:
        q.grad = k.grad = v.grad = None
        loss = attend(q, k, v).square().sum() / (H * S * d)
        loss.backward()
        return loss.item()

    return step


def ring(order: Order) -> Callable[[], float]:
    axis = world()
    here_S = positions_of(axis.index, axis.size, order, S)
    return make_step(partial(ring_attention.ring_attention, axis, order, True), here_S)


# ---- the order, on four ranks ----


def noting(seconds: list[float], *arguments: object) -> Iterator:
    """`around`, with the CPU time of what is done in each step."""
    for here in around(*arguments):  # type: ignore[arg-type]
        begin = time.thread_time()
        yield here
        seconds.append(time.thread_time() - begin)


def sleeping(seconds: Iterator[float], *arguments: object) -> Iterator:
    """`around`, without a block to compute: asleep for as long as computing has taken."""
    for _, kv in around(*arguments):  # type: ignore[arg-type]
        time.sleep(next(seconds))
        yield [], kv


def timed(step: Callable[[], float], instead: Callable[..., Iterator]) -> float:
    """Seconds of the slowest rank, with `instead` in the place of `around`."""
    barrier(world())
    begin = time.perf_counter()
    with patch.object(ring_attention, "around", instead):
        step()
    return all_reduce(torch.tensor(time.perf_counter() - begin), world(), "max").item()


def in_both_orders(repeats: int) -> dict[str, list[tuple[float, float]]]:
    """For each order and repeat: seconds of the real run, and on a core for each rank."""
    steps = {order: ring(order) for order in ORDERS}
    found: dict[str, list[tuple[float, float]]] = {order: [] for order in ORDERS}
    for repeat in range(repeats + 1):
        for order in ORDERS[:: 1 if repeat % 2 else -1]:
            noted: list[float] = []
            real = timed(steps[order], partial(noting, noted))
            replayed = timed(steps[order], partial(sleeping, iter(noted)))
            found[order].append((real, replayed))
    return {order: times[1:] for order, times in found.items()}  # the first one warms up


# ---- the speed-up, on two ranks ----


def summed(step: Callable[[], float]) -> Callable[[], float]:
    """A ring has a part of the loss on each rank."""
    return lambda: all_reduce(torch.tensor(step()), world()).item()


def one_rank() -> Callable[[], float]:
    fused = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    return make_step(fused, torch.arange(S))


def line(what: str, ours: list[float], other: list[float], goal: str) -> None:
    ratio = statistics.median(a / b for a, b in zip(ours, other))
    times = " / ".join(f"{1e3 * statistics.median(x):4.0f} ms" for x in (ours, other))
    print(f"  {what:50} {times} = {ratio:.2f}{goal}")


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else REPEATS
    settings = {"quiet": True, "trace": False, "timeout": 500, "threads": 1, "backend": "gloo"}
    print(f"causal attention, {H} heads of {d}, {K} key heads, {S} tokens, forward + backward")
    times = launch(in_both_orders, repeats, world_size=4, link=LINK, **settings)[0]
    real, replayed = ([[pair[i] for pair in times[order]] for order in ORDERS] for i in (0, 1))
    line("zig-zag / contiguous, 4 ranks, a core each", *replayed, "   ideal 0.57, goal 0.75")
    line(f"the same, {os.cpu_count()} cores for all four", *real, "")
    ours, alone = launch(
        in_turn, lambda: summed(ring("zigzag")), one_rank, repeats, 2, world_size=2, **settings
    )[0]
    line("ring on 2 ranks / half of one", ours, [x / 2 for x in alone], "   ideal 1.0, goal 1.3")


if __name__ == "__main__":
    main()
