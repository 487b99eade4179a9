"""Data parallelism: every rank has the whole model and a part of the batch; gradients are summed.

    rank 0   rows 0, 1   forward   backward ─ grad ─┐
                                                    ├─ all-reduce ─▶ equal gradients, equal steps
    rank 1   rows 2, 3   forward   backward ─ grad ─┘

The ranks start equal, add the same gradient, and stay equal: n ranks train like one, on an n times
larger batch or in an n-th of the time. Three ways to do the same sums, each a few lines apart:

    naive      after backward, one message a parameter: the ranks compute, *then* they talk
    overlap    a gradient leaves as soon as it is complete, while backward goes on below it
    bucketed   neighbours share a message: as much overlap, and a hundredth of the latencies

    backward   │ layer 3 │ layer 2 │ layer 1 │ layer 0 │
    naive                                              │ 3 │ 2 │ 1 │ 0 │
    overlap              │ 3 │     │ 2 │     │ 1 │     │ 0 │             only the last is exposed

Sent by each rank and step, however many micro-batches: 2(n−1)/n times the bytes of the gradients,
which are float32 here (4 bytes a parameter). Memory: nothing is divided, each rank holds it all.
The buckets *are* the main gradients, so that nothing is copied to be sent; but they stay from step
to step, where one rank has room for more activations until backward begins.

*Summed*, not averaged: each rank divides its loss by the number of counted tokens of the global
batch (`train.accumulate`). A mean over ranks of means over their tokens would weigh the tokens of
short rows more.

Source: Li et al., "PyTorch Distributed", 2006.15704, section 3.2 (buckets, hooks, no_sync).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from picotron_edu.layout import layout_of
from picotron_edu.optim import Param, grad_of, main_dtype, zero_grads
from picotron_edu.presets import check_choice, check_number
from picotron_edu.ranks import Axis, Handle, all_reduce, broadcast
from picotron_edu.summed import refuse_summed
from picotron_edu.wrapping import (
    check_dtype,
    check_trained,
    hand_out,
    make_partial,
    mark_finished,
    start_equal,
)

Mode = Literal["naive", "overlap", "bucketed"]


@dataclass
class Bucket:
    """Gradients that travel in one message: neighbours in one vector, `flat`."""

    params: list[Param]
    flat: Tensor
    waiting: set[Param]  # whose gradient is not complete
    handle: Handle | None = None  # its message, once it is under way


def fill_buckets(params: Sequence[Param], max_bytes: float) -> list[Bucket]:
    """Parameters of one type, in this order, together while they fit; each has its place there."""
    groups: list[list[Param]] = []
    kind, filled = None, 0
    for param in params:
        size = param.numel() * main_dtype(param).itemsize
        if kind != (main_dtype(param), param.device) or filled + size > max_bytes:
            kind, filled = (main_dtype(param), param.device), 0
            groups.append([])
        groups[-1].append(param)
        filled += size
    buckets = []
    for group in groups:
        sizes = [p.numel() for p in group]
        flat = torch.zeros(sum(sizes), dtype=main_dtype(group[0]), device=group[0].device)
        for param, piece in zip(group, flat.split(sizes)):
            param.grad_home = piece.view_as(param)
        buckets.append(Bucket(group, flat, set(group)))
    return buckets


class DataParallel(nn.Module):
    """`model = DataParallel(model, mesh.dp)`; after the last backward of a step, `model.finish()`.

    bucket_mb: size of a message, in 10⁶ bytes. reduce_dtype: what the sums travel in; None for the
    main gradients' own float32. `train.accumulate` calls no_sync() and finish() where they belong.
    The sums then lie in `.grad` of float32 weights, in `.main_grad` of narrower ones; zero_grad()
    also drops what a step that was given up has left.
    """

    def __init__(
        self,
        module: nn.Module,
        axis: Axis,
        mode: Mode = "bucketed",
        bucket_mb: float = 25,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice("mode", mode, get_args(Mode))
        check_number("bucket_mb", bucket_mb)
        check_dtype("reduce_dtype", reduce_dtype)
        self.module, self.axis, self.mode, self.reduce_dtype = module, axis, mode, reduce_dtype
        self.max_bytes = 1e6 * bucket_mb if mode == "bucketed" else 0  # 0: a message each
        start_equal(module, axis)
        params = [param for param in module.parameters() if param.requires_grad]
        for param in params:
            make_partial(param, axis)
            param.register_hook(partial(self.before_gradient, param))
            param.register_post_accumulate_grad_hook(self.ready)
        self.syncing = True
        self.seen: list[Param] | None = []  # in the order in which they became ready
        self.put_in_order(params[::-1])  # a guess: what is used last has its gradient first

    def put_in_order(self, params: list[Param]) -> None:
        self.params, self.better_order = params, list[Param]()
        self.buckets, self.bucket_of = [], {}
        for param in params:
            param.grad_home = None  # old buckets go, then new come
        self.buckets = fill_buckets(params, self.max_bytes)
        self.bucket_of = {param: bucket for bucket in self.buckets for param in bucket.params}
        self.sent = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.better_order and all(grad_of(p) is None for p in self.params):
            self.put_in_order(self.better_order)
        for buffer in self.module.buffers():
            broadcast(buffer, self.axis)
        return self.module(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        zero_grads(self.module.parameters())  # the main gradients, too

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here only add up; the last one of a step belongs outside."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    def before_gradient(self, param: Param, _: Tensor) -> None:
        refuse_summed(param, grad_of(param))

    def ready(self, param: Param) -> None:
        """Backward calls this once a parameter, when its gradient is complete."""
        bucket = self.bucket_of[param]
        if param not in bucket.waiting:
            raise RuntimeError(
                f"{layout_of(param).name} got a gradient after its sum over {self.axis.name} had "
                f"begun: call finish() after each step (after an interrupted one, too, then zero "
                f"the gradients), and run all backward passes of a step but the last in no_sync()"
            )
        if not self.syncing:
            return
        bucket.waiting.remove(param)
        if self.seen is not None:
            self.seen.append(param)
        if self.mode == "naive":
            return
        # in one order on all ranks: a bucket leaves when it and all before it are complete
        while self.sent < len(self.buckets) and not self.buckets[self.sent].waiting:
            self.send(self.buckets[self.sent])

    def send(self, bucket: Bucket) -> None:
        for param in bucket.params:
            if param.main_grad is None:  # took no part on this rank
                refuse_summed(param, grad_of(param))
                param.main_grad = param.grad_home.zero_()
        message = bucket.flat if self.reduce_dtype is None else bucket.flat.to(self.reduce_dtype)
        bucket.handle = all_reduce(message, self.axis, async_op=True)
        self.sent += 1

    def finish(self) -> None:
        """Gradients are complete, equal on all ranks, and where an optimizer looks after this.

        Also those that have not left yet: of parameters that took no part (their gradient is zero,
        since another rank may have used them), and of a step whose last backward was not known to
        be the last.
        """
        for param in self.module.parameters():
            check_trained(param, param in self.bucket_of)
        for bucket in self.buckets[self.sent :]:
            self.send(bucket)
        for bucket in self.buckets:
            assert bucket.handle is not None
            summed = bucket.handle.wait()
            if summed is not bucket.flat:
                bucket.flat.copy_(summed)
            bucket.handle, bucket.waiting = None, set(bucket.params)
            for param in bucket.params:
                param.main_grad = None
                hand_out(param, param.grad_home.view_as(param))
            mark_finished(bucket.params, self.axis)
        self.sent = 0
        if self.seen is not None:
            self.learn_order(self.seen)

    def learn_order(self, seen: list[Param]) -> None:
        """From the next step on buckets leave in the order in which gradients really come."""
        place_of = {param: place for place, param in enumerate(self.params)}
        took_part = set(seen)
        order = [*seen, *(param for param in self.params if param not in took_part)]
        places = torch.tensor([place_of[param] for param in order])
        broadcast(places, self.axis)
        self.better_order, self.seen = [self.params[i] for i in places], None
