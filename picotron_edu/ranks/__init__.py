"""The ground floor: start ranks, name them, let them talk, write down what they did."""

from .collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    reduce_scatter,
)
from .errors import RankFailed, RanksError, RanksHung
from .handle import Handle
from .launch import Run, entrypoint, launch
from .link import Link, wire_bytes
from .mesh import Axis, Mesh, divided, world
from .pairs import copy_to, exchange, gather, reduce_from, scatter_sum, split
from .point_to_point import receive, send, send_recv
from .runtime import device, span
from .trace import Event, Trace

__all__ = [
    "Axis",
    "Event",
    "Handle",
    "Link",
    "Mesh",
    "RankFailed",
    "RanksError",
    "RanksHung",
    "Run",
    "Trace",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "copy_to",
    "device",
    "divided",
    "entrypoint",
    "exchange",
    "gather",
    "launch",
    "receive",
    "reduce_from",
    "reduce_scatter",
    "scatter_sum",
    "send",
    "send_recv",
    "span",
    "split",
    "wire_bytes",
    "world",
]


def load_ipython_extension(shell: object) -> None:
    """`%load_ext picotron_edu.ranks` brings the `%%ranks` cell magic."""
    from .magic import load_ipython_extension

    load_ipython_extension(shell)
