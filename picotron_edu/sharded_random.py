"""Dropout on many ranks: equal masks where ranks hold the same, different ones where they do not.

    x whole on every rank (residual stream)   one mask, or the ranks drift apart: the common stream
    x cut over the ranks (heads, channels)    n masks, or the ranks' channels fall in step, always
                                              the same ones: inside `with sharded_random(axis):`

                     common state   s0 ──one number k──▶ s1 ───────────────────────▶ goes on from s1
    rank 0, inside                  seed (k, 0) ─ draws, draws ─ forgotten
    rank 1, inside                  seed (k, 1) ─ draws, draws ─ forgotten

The stream inside is a function of the common state alone, so there is no second state to be saved,
or to be forgotten: who puts torch's default generator back (`recompute.checkpoint` does, and a
training checkpoint) has put back everything. The common stream moves on by one number, however many
are drawn inside, and so it is the same on all ranks after it.

Ranks start with different seeds here. Those that share a model must be given the same:
`torch.manual_seed(seed + mesh.dp.index)`. Bytes: none. Source: Shoeybi et al., "Megatron-LM",
1909.08053, appendix B.2 (there: a second generator, whose state is tracked).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from picotron_edu.ranks import Axis


@contextmanager
def sharded_random(axis: Axis) -> Iterator[None]:
    """Inside, each rank of `axis` draws its own numbers; after it, all go on in common.

    All ranks of the axis must enter with the same state of torch's default generator.
    """
    device = axis.runtime.device
    common = int(torch.randint(2**31, (), device="cpu"))  # also on GPUs: this costs no waiting
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(common * axis.size + axis.index)
        yield
