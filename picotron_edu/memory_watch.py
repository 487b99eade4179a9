"""Watch a training step: which bytes are alive at every moment, and what they are.

    with MemoryWatch(model, optimizer) as watch:
        train_step(model, batch, optimizer, micro_batch_size=8, lr=1e-3)
    watch.peak                 most bytes at any moment
    show.memory_steps(watch)   the picture

    bytes │            ▄▄                      other: made by an operation, soon gone
          │        ▄▄▄████▄▄                   activations: what autograd keeps for backward
          │    ▄▄████████████▄▄  ▄▄▄▄▄▄▄▄▄     gradients
          │  ▄▄████████████████▄▄██████████    optimizer states: appear in the first step
          │  ██████████████████████████████    parameters
          └──forward────┴─backward──┴optimizer

What a `recompute` span makes (chapter 02) is an activation from the start, for as long as it lives.

Two hooks of PyTorch see everything. A dispatch mode is called at each operation: a new piece of
memory (a storage) is noted with a weak reference, which tells when it is freed. Hooks on saved
tensors are called when autograd puts something by: those storages are the activations. Which phase
it is, is read from the open `span`, the same that the timeline draws. A piece of memory counts
once, however many tensors share it, and as a whole, even if a tensor uses only a part of it.

This counts bytes that tensors asked for. The allocator of a GPU adds its rounding and its
fragmentation, the CUDA context 1-2 GB: compare with `torch.cuda.max_memory_reserved`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, overload
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from picotron_edu.optim import AdamW, grad_of
from picotron_edu.ranks.runtime import CURRENT, current
from picotron_edu.ranks.trace import Recorder


@dataclass(frozen=True)
class Moment:
    """Bytes alive after an operation. `event` is the open span, or the last one that was."""

    step: int
    event: str
    parameters: int
    optimizer_states: int
    gradients: int
    activations: int
    other: int

    @property
    def total(self) -> int:
        states = self.parameters + self.optimizer_states + self.gradients
        return states + self.activations + self.other


class Kept:
    """What autograd holds in place of a saved tensor; dropped once backward has used it."""

    def __init__(self, tensor: Tensor, watch: "MemoryWatch") -> None:
        self.tensor, self.watch = tensor, watch
        self.address, self.nbytes = piece_of(tensor)

    def __del__(self) -> None:
        self.watch.drop(self)


def piece_of(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes of the storage that a tensor looks at."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


class Phases(Recorder):
    """Tells the watch which span begins, and goes on writing the trace."""

    watch: "MemoryWatch"

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        with self.watch.phase(name), super().span(name):
            yield


class EachOperation(TorchDispatchMode):
    """Inside, `__torch_dispatch__` sees each operation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operation imports torch's compiler, which takes a second


class MemoryWatch(EachOperation, Sequence[Moment]):
    """A sequence of moments, one per new piece of memory.

    A step begins with the first forward after an optimizer span.
    """

    def __init__(self, model: nn.Module, optimizer: AdamW) -> None:
        super().__init__()
        self.params, self.optimizer = list(model.parameters()), optimizer
        self.weights = dict(map(piece_of, self.params))
        self.moments: list[Moment] = []
        self.step, self.event = 0, ""
        self.alive: dict[int, tuple[ref[torch.UntypedStorage], int]] = {}  # by address: its bytes
        self.alive_bytes = 0
        self.kept: Counter[int] = Counter()  # by address: how many saved tensors look at it
        self.kept_bytes = 0
        self.recomputing = False
        self.made_again: dict[int, int] = {}  # by address: bytes made by a recompute, and alive
        self.states_bytes, self.known_moments = 0, -1
        for param in self.params:
            self.note(param)

    def __enter__(self) -> "MemoryWatch":
        outer = current().recorder
        phases = Phases(outer.rank, outer.events) if outer else Phases(rank=0)
        phases.watch = self
        self.before = CURRENT.set(replace(current(), recorder=phases))
        self.saving = torch.autograd.graph.saved_tensors_hooks(self.keep, lambda kept: kept.tensor)
        self.saving.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.saving.__exit__(*error)
        CURRENT.reset(self.before)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A span begins; a recompute is a part of the backward phase in which it happens."""
        outer = self.recomputing
        self.recomputing = outer or name == "recompute"
        if not self.recomputing:
            self.step += name == "forward" and self.event == "optimizer"
            self.event = name
        try:
            yield
        finally:
            self.recomputing = outer

    def note(self, tensor: Tensor) -> bool:
        """Whether this memory is new; from now on it counts as alive until it is freed."""
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        known = self.alive.get(address)
        if nbytes == 0 or (known and known[0]() is storage):
            return False
        self.alive_bytes += nbytes - (known[1] if known else 0)
        self.alive[address] = ref(storage, lambda gone: self.forget(address, gone)), nbytes
        if self.recomputing:
            self.made_again[address] = nbytes
        return True

    def forget(self, address: int, gone: "ref[torch.UntypedStorage]") -> None:
        known = self.alive.get(address)
        if known and known[0] is gone:  # else the address belongs to somebody else by now
            self.alive_bytes -= self.alive.pop(address)[1]
            self.made_again.pop(address, None)

    def keep(self, tensor: Tensor) -> Kept:
        self.note(tensor)
        kept = Kept(tensor, self)
        self.kept[kept.address] += 1
        if self.kept[kept.address] == 1 and kept.address not in self.weights:
            self.kept_bytes += kept.nbytes
        return kept

    def drop(self, kept: Kept) -> None:
        self.kept[kept.address] -= 1
        if self.kept[kept.address] == 0 and kept.address not in self.weights:
            self.kept_bytes -= kept.nbytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        new = [self.note(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        begins = not self.moments or self.moments[-1].event != self.event
        if self.event and (any(new) or begins):  # before the first span there is no phase
            self.moments.append(self.look())
        return result

    def look(self) -> Moment:
        """What is alive now; what nobody names is "other"."""
        if len(self.optimizer.moments) != self.known_moments:  # it has made more
            self.known_moments = len(self.optimizer.moments)
            pairs = [*self.optimizer.moments.values()]
            tensors = [*self.optimizer.masters.values(), *(x for pair in pairs for x in pair)]
            self.states_bytes = sum((dict(map(piece_of, tensors)) | self.weights).values())
            self.states_bytes -= sum(self.weights.values())  # a master may be the weight itself
            for tensor in tensors:
                self.note(tensor)
        grads = [g for p in self.params for g in (p.grad, grad_of(p)) if g is not None]
        named = {
            "parameters": sum(self.weights.values()),
            "optimizer_states": self.states_bytes,
            "gradients": sum(dict(map(piece_of, grads)).values()),
            "activations": self.kept_bytes + sum(self.made_again.values()),
        }
        return Moment(self.step, self.event, **named, other=self.alive_bytes - sum(named.values()))

    @property
    def peak(self) -> int:
        return max(moment.total for moment in self.moments)

    def last(self, step: int, event: str) -> Moment:
        """The end of a phase, e.g. `watch.last(0, "forward")`: all activations are there."""
        found = [m for m in self.moments if (m.step, m.event) == (step, event)]
        if not found:
            seen = sorted({(m.step, m.event) for m in self.moments})
            raise ValueError(f"step {step} has no phase {event!r}; there are {seen}")
        return found[-1]

    def __len__(self) -> int:
        return len(self.moments)

    @overload
    def __getitem__(self, index: int) -> Moment: ...
    @overload
    def __getitem__(self, index: slice) -> list[Moment]: ...
    def __getitem__(self, index: int | slice) -> Moment | list[Moment]:
        return self.moments[index]
