"""All-reduce by hand: what a library does inside, from nothing but messages between neighbours.

Sum a tensor of K bytes over n ranks. If rank 0 collected everything, (n−1)·K bytes would squeeze
through its one link while all other links idle. The ring keeps every link busy all the time: cut
the tensor into n pieces; in each step every rank passes one piece to the right and takes one from
the left.

    rank 0  a0 a1 a2        round 1, reduce-scatter: a piece collects one rank's share at
    rank 1  b0 b1 b2        each hop; after n−1 hops it is complete, piece i on rank i.
    rank 2  c0 c1 c2        round 2, all-gather: complete pieces travel round once more,
         └──> ring ──┘      each rank keeps a copy.

Bytes: a rank sends n−1 pieces of K/n bytes in each round, 2(n−1)/n·K together: less than 2K,
however many ranks there are. No way for ranks to add up among themselves sends less. Steps: 2(n−1),
each with the latency of one message; that is why libraries use trees for small tensors. Memory: one
extra piece, K/n.

Every rank ends with the same bits, since each sum is made once and then copied. Another order of
adding may differ from it in the last bit of a float.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
2009, sections 3 and 4; made popular for training by Gibiansky, "Bringing HPC techniques to deep
learning", 2017.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .checks import dim_to_cut
from .mesh import Axis
from .point_to_point import send_recv


def once_round(
    pieces: Sequence[Tensor],
    axis: Axis,
    first: int,
    combine: Callable[[Tensor, Tensor], object],
) -> None:
    """n−1 steps round the ring: pass one piece to the right, combine what comes from the left.

    A rank begins by sending piece `first`; in each next step it sends what it has just combined.
    combine(mine, arrived) changes `mine` in place: Tensor.add_ sums, Tensor.copy_ replaces.
    """
    n, right, left = axis.size, axis.index + 1, axis.index - 1
    for step in range(n - 1):
        leaving, mine = pieces[(first - step) % n], pieces[(first - step - 1) % n]
        arrived = torch.empty_like(mine)
        send_recv(axis, sends=[(leaving, right % n)], receives=[(arrived, left % n)])
        combine(mine, arrived)


def ring_all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum `x` over the ranks of `axis`, in place; returns `x`. Any shape, any number of ranks."""
    flat = x.detach().reshape(-1)  # the memory of x itself, or a copy if x is strided
    pieces = flat.tensor_split(axis.size)  # equal, or one element apart
    once_round(pieces, axis, axis.index - 1, Tensor.add_)  # now piece i is complete on rank i
    once_round(pieces, axis, axis.index, Tensor.copy_)
    x.detach().copy_(flat.view(x.shape))  # does nothing where flat is the memory of x
    return x


def ring_reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """The first round alone: rank i gets the i-th of n equal pieces of the sum, along dim 0."""
    dim_to_cut("ring_reduce_scatter", x, 0, axis)
    pieces = x.detach().clone().tensor_split(axis.size)
    once_round(pieces, axis, axis.index - 1, Tensor.add_)
    return pieces[axis.index].clone()


def ring_all_gather(x: Tensor, axis: Axis) -> Tensor:
    """The second round alone: all ranks' `x`, equal shapes, concatenated along dim 0."""
    pieces = [torch.empty_like(x) for _ in range(axis.size)]
    pieces[axis.index].copy_(x.detach())
    once_round(pieces, axis, axis.index, Tensor.copy_)
    return torch.cat(pieces)
