"""An emulated network link: lets a laptop feel a slow network.

On one machine a message between two ranks costs next to nothing, so nothing that this course
teaches about hiding communication could be seen. `Link(latency_us=50, gbps=10)` makes each message
take as long as it would on such a network: the real message is sent at once, and whoever waits for
it sleeps (does not burn CPU) until it would have arrived.

    last rank enters      the modelled time is over
          v                        v
    ------|========================|------>   the rank may compute during this time,
            alpha·steps + bytes/beta          so communication can be *overlapped*

The model is the classic alpha-beta one: every step of an algorithm costs the latency alpha, every
byte 1/beta. Messages of one rank on one link queue behind each other, in each direction.

Source: Hockney, "The communication challenge for MPP", 1994; Thakur, Rabenseifner, Gropp,
"Optimization of Collective Communication Operations in MPICH", 2005, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np


def wire_bytes(operation: str, payload_bytes: int, n: int) -> float:
    """Bytes one of `n` ranks sends in the ring algorithm for `payload_bytes`, the N below.

    N is the tensor for all-reduce and broadcast, the gathered result for all-gather, the input for
    reduce-scatter and all-to-all, the sum of what this rank sends for point-to-point messages.
    For broadcast it is the mean over the ranks: all but the last pass N on.

    >>> wire_bytes("all_reduce", payload_bytes=1000, n=4)
    1500.0
    """
    share = payload_bytes * (n - 1) / n
    if operation == "all_reduce":
        return 2 * share  # a reduce-scatter, then an all-gather
    if operation in ("all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        return share
    if operation in ("send", "send_recv"):
        return float(payload_bytes)
    if operation in ("receive", "barrier"):
        return 0.0
    raise ValueError(f"operation={operation!r}: no message of this name")


def link_bytes(operation: str, payload_bytes: int, n: int) -> float:
    """Bytes that pass the busiest link one way, which is what takes time."""
    if operation in ("broadcast", "receive"):
        return float(payload_bytes)
    return wire_bytes(operation, payload_bytes, n)


def ring_steps(operation: str, n: int) -> int:
    """How often a message must hop before `operation` on `n` ranks is complete."""
    steps = {
        "all_reduce": 2 * (n - 1),
        "all_gather": n - 1,
        "reduce_scatter": n - 1,
        "all_to_all": n - 1,
        "broadcast": n - 1,
        "barrier": 2 * max(1, math.ceil(math.log2(n))),  # up a tree and down again
    }
    return steps.get(operation, 1)


@dataclass(frozen=True)
class Link:
    """A network with `latency_us` microseconds a hop and `gbps` gigabits per second.

    >>> Link(latency_us=50, gbps=10).seconds("send", payload_bytes=1_250_000, n=2)
    0.00105
    """

    latency_us: float
    gbps: float

    def __post_init__(self) -> None:
        for name, value in (("latency_us", self.latency_us), ("gbps", self.gbps)):
            if not isinstance(value, Real) or isinstance(value, bool):
                raise ValueError(f"{name}={value!r}: must be a number")
        if not 0 <= self.latency_us < math.inf:
            raise ValueError(
                f"latency_us={self.latency_us}: must be 0 or more microseconds, and finite"
            )
        if not self.gbps > 0:
            raise ValueError(f"gbps={self.gbps}: must be more than 0 gigabits per second")

    def seconds(self, operation: str, payload_bytes: int, n: int) -> float:
        """Time of `operation` among `n` ranks: steps·alpha + bytes/beta."""
        return self.delay(operation, link_bytes(operation, payload_bytes, n), n)

    def delay(self, operation: str, size: float, n: int) -> float:
        """The same where it is known how many bytes, `size`, pass the busiest link."""
        return ring_steps(operation, n) * self.latency_us * 1e-6 + size * 8 / (self.gbps * 1e9)


@dataclass
class LinkQueue:
    """One rank's messages on one link that have not arrived, in the order in which they began."""

    waiting: list[Any] = field(default_factory=list)  # Handles
    free_at: float = 0.0

    def arrival(self, message: Any, link: Link) -> float:
        """When `message` is through: it begins after the earlier ones, with all its ranks there."""
        if message not in self.waiting:  # worked out already, when a later one was waited for
            return message.arrival
        for earlier in self.waiting[: self.waiting.index(message) + 1]:
            entered = earlier.entered()
            if entered is None and earlier is message:  # it needed nothing from who is late
                entered = message.began
            if entered is not None:  # else it has not begun, and keeps nobody waiting
                size, n = earlier.link_bytes, earlier.axis.size
                begin = max(entered, self.free_at)
                earlier.arrival = self.free_at = begin + link.delay(earlier.operation, size, n)
                self.waiting.remove(earlier)
        return message.arrival


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
