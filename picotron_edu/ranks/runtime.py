"""What a rank carries with it: its notice board, its event recorder, its emulated link.

The start of a rank (`worker.py`, or `entrypoint` under torchrun) fills one `Runtime`; `Mesh` and
`world()` hand it to their axes, and a collective finds it there. A context variable, not a global:
another thread or another test does not see it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import numpy as np
import torch

from .board import Board
from .link import Link, LinkQueue
from .trace import Recorder


@dataclass
class Runtime:
    """`link` is one link for all axes, or one by axis name (an axis not named has none)."""

    board: Board | None = None
    recorder: Recorder | None = None
    link: Link | Mapping[str, Link] | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    queues: dict[str, LinkQueue] = field(default_factory=dict)  # by axis and direction

    def link_of(self, axis: str) -> Link | None:
        return self.link.get(axis) if isinstance(self.link, Mapping) else self.link


CURRENT: ContextVar[Runtime] = ContextVar("current", default=Runtime())  # noqa: B039


def current() -> Runtime:
    """The runtime of this rank; an empty one outside any rank."""
    return CURRENT.get()


def take_device(backend: str, local_rank: int) -> torch.device:
    """Under nccl this rank's own GPU, on which torch makes tensors from now on; else the CPU."""
    if backend != "nccl":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    torch.set_default_device(device)
    return device


def seed_rank(seed: int, rank: int) -> None:
    """Ranks draw different numbers: nothing may work only because all of them drew the same."""
    random.seed(seed + rank)
    np.random.seed(seed + rank)
    torch.manual_seed(seed + rank)


def device() -> torch.device:
    """Where this rank's tensors live: its own GPU, or the CPU."""
    return current().device


@contextmanager
def span(name: str) -> Iterator[None]:
    """Record the enclosed block as a compute event: `with span("forward"): ...`."""
    recorder = current().recorder
    if recorder is None:
        yield
    else:
        with recorder.span(name):
            yield
