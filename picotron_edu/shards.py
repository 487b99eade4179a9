"""Weights as one flat vector, cut into equal shards: what ZeRO gathers, reduces and frees.

A unit is the parameters of one module (a block, the embedding, …), one behind the other:

    full   │ q_proj ‥‥‥‥ │ k_proj ‥‥ │ … │ norm │ · │      padded to n equal shards
           │ rank 0        │ rank 1        │ rank 2 │       whichever parameter a border falls into
    pieces on rank 1:  the end of q_proj, k_proj, …         what its optimizer sees

The parameters of the module are views of `full`, so that gathering is one message into place and
no copy. `free` gives the memory of `full` back to the machine and leaves the views in place: when
it is filled again, also what autograd has kept for backward (a view of a weight) is there again.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from picotron_edu.layout import FlatCut, attach, layout_of
from picotron_edu.optim import Param, grad_of, main_dtype
from picotron_edu.ranks import Axis, Handle, all_gather
from picotron_edu.summed import refuse_summed
from picotron_edu.wrapping import hand_out, make_partial

PLAIN = (bool, int, float, str, NoneType)  # what a module may return beside tensors


class Unit:
    """Parameters that are gathered and reduced together: one vector `full`, this rank's `shard`."""

    def __init__(
        self, name: str, params: list[Param], axis: Axis, stage: int, grad_dtype: Any
    ) -> None:
        self.name, self.params, self.axis = name, params, axis
        self.trained = params[0].requires_grad  # as all others of the unit
        for param in params:
            make_partial(param, axis)
        self.ends = torch.tensor([p.numel() for p in params]).cumsum(0).tolist()
        self.length = -(-self.ends[-1] // axis.size)  # of a shard: rounded up
        self.own = slice(axis.index * self.length, (axis.index + 1) * self.length)
        self.full = params[0].new_zeros(axis.size * self.length)
        for param, view in zip(params, self.views(self.full)):
            view.copy_(param.detach())
            param.data = view
        self.shard = self.full[self.own].clone() if stage == 3 else self.full[self.own]
        self.present = True  # `full` holds the newest weights of all ranks
        self.gathering: Handle | None = None

        self.grad_dtype = grad_dtype or main_dtype(params[0])
        self.grad: Tensor | None = None  # of the whole vector, from this rank's rows
        self.reducing: Handle | None = None
        self.waiting = set(params)  # whose gradient is not complete
        self.pieces = [self.piece(*at) for at in zip(params, [0, *self.ends], self.ends)]

    def views(self, vector: Tensor) -> list[Tensor]:
        starts = [0, *self.ends]
        return [
            vector[start:end].view(layout_of(p).local_shape)
            for p, start, end in zip(self.params, starts, self.ends)
        ]

    def piece(self, param: Param, start: int, end: int) -> Param:
        """What the owner's optimizer sees: the part of `param` in this rank's shard, maybe none."""
        first, last = (min(max(at, start), end) for at in (self.own.start, self.own.stop))
        mine = self.shard[first - self.own.start : last - self.own.start] if first < last else None
        piece: Param = nn.Parameter(self.shard[:0] if mine is None else mine, param.requires_grad)
        piece.main_grad = None
        layout, cut = layout_of(param), FlatCut(self.axis, first - start, last - start)
        return attach(piece, replace(layout, flat=cut))

    def gather(self) -> None:
        """Start to bring the weights together, if they are not here and not on their way.

        Where the shard is a part of `full`, it is in its place already.
        """
        if not self.present and self.gathering is None:
            self.full.untyped_storage().resize_(self.full.numel() * self.full.itemsize)
            self.gathering = all_gather(
                self.shard, self.axis, out=self.full, async_op=True, label=self.label
            )

    def wait(self) -> None:
        self.gather()
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering, self.present = None, True
            for param, view in zip(self.params, self.views(self.full)):
                param.data = view

    def expire(self) -> None:
        """What is in `full` is out of date, or will be soon; also what is still on its way."""
        if self.gathering is not None:
            self.wait()
        self.present = False

    def free(self) -> None:
        """Give the memory of the full weights back; what autograd has kept of them is refilled."""
        self.expire()
        for param in self.params:
            param.data = self.full[:0]  # an empty tensor: whoever reads it now sees that
        self.full.untyped_storage().resize_(0)

    def prepare_grad(self) -> Tensor:
        """The place for the gradients of the coming backward."""
        if self.grad is None:
            self.grad = self.full.new_empty(self.axis.size * self.length, dtype=self.grad_dtype)
            for param, view in zip(self.params, self.views(self.grad)):
                param.grad_home = view
                if param.main_grad is not None:
                    raise RuntimeError(
                        f"{layout_of(param).name} was used although {self.name} was not called: "
                        f"ZeRO gathers the weights of a module when it is called"
                    )
        return self.grad

    def hand_out(self, summed: Tensor) -> None:
        """To each piece its part of the shard's gradient; zeroing the pieces' frees the memory."""
        sizes = [piece.numel() for piece in self.pieces]
        parts = summed.split_with_sizes([*sizes, self.length - sum(sizes)])
        for piece, part in zip(self.pieces, parts):
            refuse_summed(piece, grad_of(piece))
            hand_out(piece, part)

    @property
    def label(self) -> str:
        return f" of {self.name}"


def units_of(module: nn.Module, axis: Axis, stage: int, grad_dtype: Any) -> dict[nn.Module, list]:
    """The units that each module needs while it runs: a block's own, the embedding's, …

    A block is a member of a ModuleList. Outside blocks, a module that has parameters of its own has
    those of the modules in it, too: it may use them without a call (nn.MultiheadAttention does).
    Parameters of one unit share a type, and train or are frozen together. A parameter used by two
    modules (tied weights) is in the unit of the first, and both need that unit.
    """
    units: dict[nn.Parameter, Unit] = {}
    needs: dict[nn.Module, list[Unit]] = {}
    for name, owner, params in owners_of(module):
        kinds: dict[Any, list[Param]] = {}
        for param in params:
            if param not in units:
                kinds.setdefault((param.dtype, param.requires_grad), []).append(param)
        for kind in kinds.values():
            unit = Unit(name or type(owner).__name__, kind, axis, stage, grad_dtype)
            units |= dict.fromkeys(kind, unit)
        needs[owner] = list(dict.fromkeys(units[param] for param in params))
    return needs


def owners_of(module: nn.Module) -> list[tuple[str, nn.Module, list[Param]]]:
    """The modules whose call gathers weights, in order: name, module, its parameters."""
    names = {m: name for name, m in module.named_modules()}
    lists = [m for m in names if isinstance(m, nn.ModuleList)]
    inside = {m for group in lists for block in group for m in block.modules() if m is not block}
    blocks = {m for group in lists for m in group} - inside
    owners, done = list[tuple[str, nn.Module, list[Param]]](), set(inside)
    for m, name in names.items():
        params: list[Param] = []
        if m in blocks:
            params = list(m.parameters())
        elif m not in done and has_parameters_of_its_own(m):
            below = [x for x in m.modules() if x not in blocks and x not in inside]
            params = list(dict.fromkeys(p for x in below for p in x.parameters(recurse=False)))
            done.update(below)
        if params:
            owners.append((name, m, params))
    return owners


def has_parameters_of_its_own(module: nn.Module) -> bool:
    """A ParameterList is not called: its parameters are those of the module it belongs to."""
    lists = nn.ParameterList, nn.ParameterDict
    holders = [module, *(child for child in module.children() if isinstance(child, lists))]
    return not isinstance(module, lists) and any(
        True for holder in holders for _ in holder.parameters(recurse=False)
    )


def tensors_in(name: str, out: Any) -> list[Tensor]:
    """What a module has returned, however nested. Raises TypeError where tensors may hide."""
    leaves = tree_leaves(out)
    for leaf in leaves:
        if torch.is_grad_enabled() and not isinstance(leaf, (Tensor, *PLAIN)):
            raise TypeError(
                f"{name} returned a {type(leaf).__name__}, in which ZeRO finds no tensors: "
                f"return tensors, or tuples, lists or dicts of them"
            )
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def refuse_state_dicts(module: nn.Module, is_whole: Callable[[], bool]) -> None:
    """In place of weights that are out of date, or not here at all; and of loading into them."""

    def of_state_dict(*_: Any) -> None:
        if not is_whole():
            raise RuntimeError(
                "this rank does not have all weights of a model in ZeRO. All ranks together: "
                "`with model.whole() as module: module.state_dict()`"
            )

    def of_loading(*_: Any) -> None:
        raise RuntimeError("load weights into the plain model, before Zero(model, …) cuts them")

    module.register_state_dict_pre_hook(of_state_dict)
    module.register_load_state_dict_pre_hook(of_loading)


def explain(error: RuntimeError, needs: dict[nn.Module, list[Unit]], ran: set[nn.Module]) -> None:
    """Raise a clearer error if weights that are not here may be the reason: they have size 0."""
    if re.search("size|shape|dimension|2-D", str(error)):
        idle = [units[0].name for module, units in needs.items() if module not in ran]
        raise RuntimeError(
            f"{error}. In stage 3 a module's weights are here only while it runs, else they have "
            f"size 0: has another module used them? Not called so far: {', '.join(idle[:4])}"
        ) from error


def refuse_kept_tensors(name: str, owner: nn.Module) -> None:
    """Backward through a tensor that a module keeps may come before its weights are there."""
    for module in owner.modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.requires_grad:
                raise TypeError(
                    f"{name} keeps a tensor of its graph as an attribute, {key!r}: in stage 3 a "
                    f"module must return what the loss uses (an auxiliary loss, say)"
                )
