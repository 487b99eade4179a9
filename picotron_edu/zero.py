"""ZeRO: data parallelism without n copies of everything. Each rank keeps a shard, and asks for the
rest when it needs it.

After the all-reduce of data parallelism n ranks hold the same gradients, update the same optimizer
states, and get the same weights: n − 1 of the n copies are waste. One idea removes them, in three
stages. The weights of each *unit* (a block, the embedding, …) are one flat vector, cut into n
equal shards, and rank i *owns* shard i:

    unit of 10 weights on 4 ranks    │ w0 w1 w2 │ w3 w4 w5 │ w6 w7 w8 │ w9  ·  · │   padded to 12
                                        rank 0     rank 1     rank 2     rank 3

    stage 1   the owner alone has master weights and moments    gradients: reduce-scatter, once a
              of its shard, and updates it                      step; weights: all-gather, once
    stage 2   … and the sum of the gradients                    reduce-scatter in each backward
    stage 3   … and the weights: gathered for a unit's          and all-gather in each forward and
              forward and backward, freed after it              each backward

Bytes a parameter in mixed precision (bf16 weights, gradients of g bytes, 12 for AdamW in float32):

    stage 0: 2 + g + 12    1: 2 + g + 12/n    2: 2 + (g + 12)/n    3: (2 + g + 12)/n + one unit

Sent per rank for weights and gradients of Ψ bytes: all-reduce is reduce-scatter + all-gather, so
stages 0, 1 and 2 send 2Ψ·(n−1)/n (stage 2: one Ψ more for each further micro-batch), and stage 3
sends 3Ψ·(n−1)/n for each micro-batch. Activations are not sharded by any stage.

Source: Rajbhandari et al., "ZeRO", 1910.02054, sections 5 and 7; Zhao et al., "PyTorch FSDP",
2304.11277, section 3 (flat parameters, prefetching).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from picotron_edu.layout import layout_of
from picotron_edu.optim import Param, zero_grads
from picotron_edu.ranks import Axis, broadcast, reduce_scatter
from picotron_edu.shards import (
    Unit,
    explain,
    refuse_kept_tensors,
    refuse_state_dicts,
    tensors_in,
    units_of,
)
from picotron_edu.wrapping import check_dtype, check_trained, mark_finished, start_equal


class Zero:
    """`model = Zero(model, mesh.dp, stage=3)`, then `AdamW(model.named_parameters())`.

    Its parameters are this rank's pieces, flat, with a layout that says of what: any optimizer that
    treats elements alone works on them. `train.accumulate` calls no_sync() and finish() where they
    belong. grad_dtype: of the gradients that are kept and sent, None for float32. prefetch: whether
    stage 3 gathers a unit while the one before it computes. In stage 3 all ranks must run the same
    modules in the same order. `model.module.eval()` and `.train()` are the module's own.
    """

    def __init__(
        self,
        module: nn.Module,
        axis: Axis,
        stage: int,
        grad_dtype: torch.dtype | None = None,
        prefetch: bool = True,
    ) -> None:
        if type(stage) is not int or stage not in (1, 2, 3):
            raise ValueError(f"stage={stage!r}: must be 1, 2 or 3 (0 is DataParallel)")
        check_dtype("grad_dtype", grad_dtype)
        self.module, self.axis, self.stage = module, axis, stage
        start_equal(module, axis)
        self.needs = units_of(module, axis, stage, grad_dtype)  # of each module, while it runs
        self.units = list(dict.fromkeys(unit for units in self.needs.values() for unit in units))
        self.unit_of = {param: unit for unit in self.units for param in unit.params}
        trained = [unit for unit in self.units if unit.trained]
        self.pieces = {layout_of(piece).name: piece for unit in trained for piece in unit.pieces}
        self.backward_order = trained[::-1]
        self.sent, self.syncing, self.is_whole = 0, True, False
        self.prefetch = prefetch and stage == 3
        self.order: list[nn.Module] = []  # in which the modules ran first
        self.ran: set[nn.Module] = set()  # in this forward
        self.direction = 1  # −1 in backward
        self.going_back: set[Unit] = set()
        for owner in self.needs:
            owner.register_forward_pre_hook(self.before_forward)
            owner.register_forward_hook(self.after_forward)
        for unit in self.backward_order:
            for param in unit.params:
                param.register_post_accumulate_grad_hook(self.ready)
        refuse_state_dicts(module, lambda: self.is_whole)
        if stage == 3:
            for unit in self.units:
                unit.free()

    # forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.direction, self.ran = 1, set()
        for buffer in self.module.buffers():
            broadcast(buffer, self.axis)
        for unit in self.units if self.stage < 3 else ():
            unit.gather()  # they arrive while the first modules compute
        try:
            return self.module(*args, **kwargs)
        except RuntimeError as error:
            if self.stage == 3:
                explain(error, self.needs, self.ran)
            raise

    def before_forward(self, owner: nn.Module, _: Any) -> None:
        self.ran.add(owner)
        if owner not in self.order:
            self.order.append(owner)
        self.need(owner)

    def after_forward(self, owner: nn.Module, _: Any, out: Any) -> None:
        for unit in self.needs[owner]:
            if self.stage == 3 and unit not in self.going_back:
                unit.free()
        if self.stage == 3 and torch.is_grad_enabled():
            refuse_kept_tensors(self.needs[owner][0].name, owner)
        for tensor in tensors_in(self.needs[owner][0].name, out):
            if tensor.requires_grad:
                tensor.register_hook(partial(self.before_backward, owner))

    def need(self, owner: nn.Module) -> None:
        """Have a module's weights here, and with prefetch those of the next one on their way."""
        after = self.order.index(owner) + self.direction
        ahead = self.order[after : after + 1] if self.prefetch and after >= 0 else []
        for module in [owner, *ahead]:
            for unit in self.needs[module]:
                unit.gather()
        for unit in self.needs[owner]:
            unit.wait()

    # backward

    def before_backward(self, owner: nn.Module, _: Tensor) -> None:
        """The gradient of a module's output is there, so that its own backward comes next."""
        self.direction = -1
        self.going_back.update(self.needs[owner])
        self.need(owner)
        for unit in self.needs[owner]:
            if unit.trained:
                unit.prepare_grad()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For all backward passes of a step but the last: stage 1 only adds up in here.

        Stages 2 and 3 reduce in each one: nobody keeps a whole gradient from one to the next.
        """
        before, self.syncing = self.syncing, self.stage > 1
        try:
            yield
        finally:
            self.syncing = before
        if self.stage > 1:
            self.end_backward()

    def ready(self, param: Param) -> None:
        """Backward calls this once a parameter, when its gradient is complete."""
        if not self.syncing:
            return
        unit = self.unit_of[param]
        if param not in unit.waiting:
            raise RuntimeError(
                f"{layout_of(param).name} got a second gradient that would not be summed over "
                f"{self.axis.name}: call finish() after each step (after an interrupted one, too, "
                f"then zero the gradients), and each of the other backward passes in a no_sync()"
            )
        unit.waiting.remove(param)
        # in one order on all ranks: a unit leaves when it and all before it are complete
        while self.sent < len(self.backward_order) and not self.backward_order[self.sent].waiting:
            self.reduce(self.backward_order[self.sent])

    @torch.no_grad()
    def reduce(self, unit: Unit) -> None:
        """Start to sum a unit's gradients over the ranks, each shard to its owner."""
        whole = unit.prepare_grad()
        for param in unit.params:
            if param.main_grad is None:  # took no part on this rank
                param.grad_home.zero_()
        unit.reducing = reduce_scatter(whole, self.axis, async_op=True, label=unit.label)
        if self.stage > 1 and self.sent > 0:
            self.collect(self.backward_order[self.sent - 1])  # its memory is wanted back
        if self.stage == 3:
            unit.free()
            self.going_back.discard(unit)
        self.sent += 1

    @torch.no_grad()
    def collect(self, unit: Unit) -> None:
        """Add what the ranks have sent to the shard, and give up the whole gradient."""
        if unit.reducing is None or unit.grad is None:
            return
        summed, unit.reducing = unit.reducing.wait(), None
        summed = unit.grad[unit.own].copy_(summed) if self.stage == 1 else summed
        unit.grad, unit.waiting = None, set(unit.params)
        for param in unit.params:
            param.main_grad = param.grad_home = None
        unit.hand_out(summed)

    def end_backward(self) -> None:
        """What has not left yet leaves now: units of which a parameter took no part."""
        for unit in self.backward_order[self.sent :]:
            self.reduce(unit)
        for unit in self.backward_order:
            self.collect(unit)
        self.sent, self.direction = 0, 1
        self.going_back.clear()
        if self.stage == 3:
            for unit in self.units:
                unit.free()

    def finish(self) -> None:
        """Each piece has its complete gradient when this returns; the optimizer may step."""
        for param, unit in self.unit_of.items():
            check_trained(param, unit.trained)
        self.end_backward()
        mark_finished(self.parameters(), self.axis)
        for unit in self.backward_order:
            unit.expire()  # the owners are about to change their shards

    # what an optimizer and a trainer see: this rank's pieces of what is trained
    def parameters(self) -> Iterator[Param]:
        return iter(self.pieces.values())

    def named_parameters(self) -> Iterator[tuple[str, Param]]:
        return iter(self.pieces.items())

    def zero_grad(self, set_to_none: bool = True) -> None:
        zero_grads(self.parameters())

    @contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """The plain module with all its weights, to save or to look at; nothing may be changed."""
        for unit in self.units:
            unit.wait()
        self.is_whole = True
        try:
            yield self.module
        finally:
            self.is_whole = False
            for unit in self.units if self.stage == 3 else ():
                unit.free()
