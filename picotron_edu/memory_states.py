"""What one rank holds of weights, gradients and optimizer states, by ZeRO stage: the formula, and
the tensors themselves, counted.

Ψ parameters on n ranks, w bytes a weight, g a gradient, k for the optimizer (AdamW in float32: 12
beside bfloat16 weights, 8 beside float32 ones, which are their own masters):

                          held by a rank                  sent by a rank, m micro-batches a step
    stage 0  replicas     w·Ψ   + g·Ψ   + k·Ψ             (n−1)/n · 2g·Ψ
    stage 1  optimizer    w·Ψ   + g·Ψ   + k·Ψ/n           (n−1)/n · (w + g)·Ψ
    stage 2  + gradients  w·Ψ   + g·Ψ/n + k·Ψ/n           (n−1)/n · (w + m·g)·Ψ
    stage 3  + weights    w·Ψ/n + g·Ψ/n + k·Ψ/n           (n−1)/n · m·(2w + g)·Ψ

The table is exact up to the padding: a unit of u parameters is cut into shards of ⌈u/n⌉, so that
Ψ/n is the sum of those, and Ψ in stages 1 to 3 is n times as much. Optimizers keep nothing for the
padding. On top of it come, for a moment: in stages 2 and 3 the whole gradients of the unit that
backward is in and of the one that is being sent, in stage 3 the whole weights of the unit that
runs, and of the next one with prefetch. A weight that two modules use (tied embeddings) is gathered
once more in stage 3.

Source: Rajbhandari et al., "ZeRO", 1910.02054, figure 1, table 1 and section 7.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from picotron_edu.memory import STATES, StateBytes
from picotron_edu.memory_watch import EachOperation, piece_of
from picotron_edu.ranks import world
from picotron_edu.ranks.runtime import CURRENT, current
from picotron_edu.ranks.trace import Recorder

MIXED = STATES["bfloat16, float32 gradients"]


@dataclass(frozen=True)
class RankBytes:
    """Bytes on one rank."""

    parameters: int
    gradients: int
    optimizer_states: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer_states


def held(
    units: Sequence[int], ranks: int, stage: int, states: StateBytes = MIXED, index: int = 0
) -> RankBytes:
    """What rank `index` holds of units of so many parameters each, when it is about to step."""
    check_stage(stage)
    lengths = [-(-unit // ranks) for unit in units]
    shards, padded = sum(lengths), ranks * sum(lengths)
    mine = [min(max(unit - index * length, 0), length) for unit, length in zip(units, lengths)]
    optimizer = states.master + states.moments
    if stage == 0:
        return RankBytes(*(sum(units) * x for x in (states.weights, states.gradients, optimizer)))
    return RankBytes(
        (shards if stage == 3 else padded) * states.weights,
        (shards if stage >= 2 else padded) * states.gradients,
        sum(mine) * optimizer,
    )


def sent(
    units: Sequence[int],
    ranks: int,
    stage: int,
    micro_batches: int = 1,
    states: StateBytes = MIXED,
) -> float:
    """Bytes that a rank puts on the wire in a step, other than the first; no unit is used twice."""
    check_stage(stage)
    w, g, m = states.weights, states.gradients, micro_batches
    each = (2 * g, w + g, w + m * g, m * (2 * w + g))[stage]
    padded = sum(units) if stage == 0 else sum(ranks * -(-unit // ranks) for unit in units)
    return (ranks - 1) / ranks * each * padded


def check_stage(stage: int) -> None:
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage!r}: must be 0 (replicas), 1, 2 or 3")


def storage_bytes(tensors: Iterable[Tensor | None], without: dict[int, int]) -> dict[int, int]:
    """Address → bytes of each piece of memory, once, however many tensors look at it."""
    return {
        address: nbytes
        for address, nbytes in (piece_of(tensor) for tensor in tensors if tensor is not None)
        if address not in without
    }


def measured(model: Any, optimizer: Any = None) -> RankBytes:
    """What is there now, of a plain model, DataParallel or Zero, and of our optimizer or torch's.

    Weights are whole vectors and shards. Step counters are not counted.
    """
    params = [*getattr(model, "module", model).parameters(), *model.parameters()]
    units = getattr(model, "units", [])
    weights = storage_bytes([*params, *(unit.shard for unit in units)], without={})
    names = ("grad", "main_grad", "grad_home")
    grads = [getattr(param, name, None) for param in params for name in names]
    states: list[Tensor] = []
    if isinstance(optimizer, torch.optim.Optimizer):
        kept = [value for state in optimizer.state.values() for value in state.values()]
        states = [value for value in kept if isinstance(value, Tensor) and value.dim() > 0]
    elif optimizer is not None:
        states = [*optimizer.masters.values()]
        states += [tensor for pair in optimizer.moments.values() for tensor in pair]
    return RankBytes(
        sum(weights.values()),
        sum(storage_bytes(grads, without={}).values()),
        sum(storage_bytes(states, without=weights).values()),  # a master may be the weight itself
    )


class HighWater(EachOperation):
    """`with HighWater(model, optimizer) as water: …` and then `water.most`: the most bytes of each
    category after any operation, not all of them at the same moment.
    """

    def __init__(self, model: Any, optimizer: Any = None) -> None:
        super().__init__()
        self.model, self.optimizer = model, optimizer
        self.most = RankBytes(0, 0, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        now = measured(self.model, self.optimizer)
        self.most = RankBytes(*map(max, zip(astuple(now), astuple(self.most))))
        return result


@contextmanager
def recording() -> Iterator[Recorder]:
    """Write messages down where no launch does it (under torchrun); an Axis made inside does so."""
    recorder = Recorder(world().index)
    before = CURRENT.set(replace(current(), recorder=recorder))
    try:
        yield recorder
    finally:
        CURRENT.reset(before)
