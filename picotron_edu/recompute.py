"""Activation recomputation: forget what the forward pass made, and make it again when backward
comes to need it.

    none        forward  ■ ■ ■ ■          ■ what a block made for its gradient waits for backward
                backward        ■ ■ ■ ■

    full        forward  □ □ □ □          □ only the block's input waits
                backward        □■ □■ □■ □■
                                 └ the block runs once more, then backward uses what it made

    selective   as none, but the inside of attention is made again: one number for each pair of
                tokens, which is many bytes and few operations

Memory for B sequences of S tokens, L blocks of hidden size D and w bytes a number: with "full",
L·B·S·D·w bytes wait between the passes; on top comes one block's inside, while backward is in it.
Price: the blocks' forward pass once more, at most a third of a step's arithmetic (forward 1,
backward 2, again 1). Bytes between ranks: none, unless a block sends messages. It then sends them
again. The formulas are in `memory.py`, line by line.

How it works. Whatever an operation keeps for its gradient goes through a pair of hooks. `drop` puts
a number in the tensor's place, and `get` has to find the tensor of that number. The first `get`
calls the function again and collects what it keeps, in the same order; with the last tensor it
stops, for nobody needs the rest. Backward itself is the one backward of the first call: each
parameter gets its gradient as always, once, and its hooks fire once.

The second call must be the first one again, *to the last bit*. So what a function reads besides its
arguments is put back: the state of the random numbers (else dropout draws a new mask, and the
gradient is that of another function than the loss), autocast, and the rank's context variables (on
a GPU, backward runs in a thread that does not know them).

Sources: Chen et al. 2016, *Training deep nets with sublinear memory cost* (arXiv 1604.06174,
section 4); selective: Korthikanti et al. 2022 (arXiv 2205.05198, section 5). PyTorch's own, which
gives the same bits, is torch.utils.checkpoint.checkpoint(fn, *args, use_reentrant=False).
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from contextvars import copy_context
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from picotron_edu.model import Block
from picotron_edu.presets import check_choice
from picotron_edu.ranks import span

Policy = Literal["none", "selective", "full"]
T = TypeVar("T")
CPU = torch.device("cpu")


def checkpoint(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)`, of which only the tensors among `args` are kept for the backward pass.

    `fn` must do the same when it is called again with the same arguments: what it reads must not
    change before backward. Where that can be seen, backward raises RuntimeError. `fn` may draw
    torch's random numbers (not those of a Generator of its own, or of Python's `random`), and may
    itself call `checkpoint`. What it writes, it writes twice: the running means of BatchNorm, say.
    """
    if not torch.is_grad_enabled():
        return fn(*args)
    call = Call(fn, args)
    with saved_tensors_hooks(call.drop, call.get):
        return fn(*args)


class KeepInputs(torch.autograd.Function):
    """Keeps tensors as an operation does, and not as an attribute of ours would: so the hooks of
    an enclosing `checkpoint` see them, and drop them in their turn."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return start.clone()


class Enough(BaseException):
    """All that backward needs is there. Not an Exception: no `except` in a function stops it."""


class Call:
    """A call of a function that keeps nothing but its inputs, and can be made again."""

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any]) -> None:
        tensors = {i: arg for i, arg in enumerate(args) if isinstance(arg, Tensor)}
        self.fn, self.places = fn, list(tensors)
        self.args = [None if i in tensors else arg for i, arg in enumerate(args)]
        # If no input needs a gradient, an operation keeps nothing: hence one that does.
        self.inputs = KeepInputs.apply(torch.empty(0, requires_grad=True), *tensors.values())
        self.surroundings = Surroundings({tensor.device for tensor in tensors.values()})
        self.dropped: list[Look] = []
        self.again: dict[int, Tensor] = {}  # made again, and not fetched yet

    def drop(self, tensor: Tensor) -> int:
        self.dropped.append(look(tensor))
        return len(self.dropped) - 1

    def get(self, number: int) -> Tensor:
        """The tensor, forgotten as it is handed out; asked for twice, it is made a third time."""
        if number not in self.again:
            self.again = dict(enumerate(self.surroundings.run(self.call_again)))
        tensor, before = self.again.pop(number), self.dropped[number]
        now = look(tensor)
        if (now.dtype, now.shape) != (before.dtype, before.shape):
            self.differs(f"{before} for backward, and {now} when called again")
        if now.version != before.version:
            self.differs(f"{before} for backward, which was changed in place since")
        return tensor

    def call_again(self) -> list[Tensor]:
        """What the function keeps, up to the last tensor."""
        found: list[Tensor] = []

        def collect(tensor: Tensor) -> None:
            found.append(tensor.detach())
            if len(found) == len(self.dropped):
                raise Enough

        # Cut off from what made them, for only the first call has a backward.
        args, kept = list(self.args), self.inputs.grad_fn.saved_tensors
        for place, tensor in zip(self.places, kept):
            args[place] = tensor.detach().requires_grad_(tensor.requires_grad)
        hooks = saved_tensors_hooks(collect, lambda kept: kept)
        with span("recompute"), torch.enable_grad(), suppress(Enough), hooks:
            self.fn(*args)
        if len(found) < len(self.dropped):
            self.differs(
                f"{len(self.dropped)} tensors for backward, and {len(found)} when called again"
            )
        return found

    def differs(self, how: str) -> NoReturn:
        raise RuntimeError(
            f"checkpoint: {getattr(self.fn, '__qualname__', self.fn)} kept {how}. With the same "
            "arguments it must do the same, and what it reads must not change before backward"
        )


class Look(NamedTuple):
    """What the two calls must agree in; autograd itself looks at the version, too."""

    dtype: torch.dtype
    shape: torch.Size
    version: int

    def __str__(self) -> str:
        return f"{self.dtype} of shape {tuple(self.shape)}"


def look(tensor: Tensor) -> Look:
    return Look(tensor.dtype, tensor.shape, tensor._version)


class Surroundings:
    """What a function reads besides its arguments: noted when made, put back in `run`."""

    def __init__(self, devices: set[torch.device]) -> None:
        self.devices = [CPU, *(d for d in devices if d.type in ("cuda", "mps"))]
        self.random_states = [random_state(device) for device in self.devices]
        self.autocast: list[dict[str, Any]] = [
            {
                "device_type": kind,
                "dtype": torch.get_autocast_dtype(kind),
                "enabled": torch.is_autocast_enabled(kind),
                "cache_enabled": torch.is_autocast_cache_enabled(),
            }
            for kind in {device.type for device in self.devices}
        ]
        self.context = copy_context()

    def run(self, fn: Callable[[], T]) -> T:
        """`fn()` as it would have been then; the next random number is as if it had not been."""
        now = [random_state(device) for device in self.devices]
        try:
            set_random_states(self.devices, self.random_states)
            with ExitStack() as stack:
                for settings in self.autocast:
                    stack.enter_context(torch.autocast(**settings))
                # A copy: what `fn` sets in it is gone afterwards, should it be called a third time.
                return self.context.copy().run(fn)
        finally:
            set_random_states(self.devices, now)


def random_state(device: torch.device) -> Tensor:
    """The state of torch's default generator."""
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.mps.get_rng_state() if device.type == "mps" else torch.get_rng_state()


def set_random_states(devices: Sequence[torch.device], states: Sequence[Tensor]) -> None:
    for device, state in zip(devices, states):
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        elif device.type == "mps":
            torch.mps.set_rng_state(state)
        else:
            torch.set_rng_state(state)


def apply(model: nn.Module, policy: Policy, layers: Sequence[int] | None = None) -> None:
    """Choose what the blocks of a Llama keep for backward; replaces what was chosen before.

    "full": a block keeps its input. "selective": attention keeps q, k and v. "none": everything.
    `layers` are the numbers of the blocks meant (default: all); the others keep everything.
    Raises ValueError for an unknown policy or number, or if there is no block.
    """
    check_choice("policy", policy, get_args(Policy))
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    if not blocks:
        raise ValueError(f"model must hold blocks of a Llama, got {type(model).__name__} without")
    chosen = list(range(len(blocks)) if layers is None else layers)
    for layer in chosen:
        if layer not in range(len(blocks)):
            raise ValueError(f"layers must be from 0 to {len(blocks) - 1}, got {layer!r}")
    for i, block in enumerate(blocks):
        wrap(block, "forward", policy == "full" and i in chosen)
        wrap(block.self_attn, "attend", policy == "selective" and i in chosen)


def wrap(owner: nn.Module, name: str, dropped: bool) -> None:
    """Put `checkpoint` around a function of a module, or take it off. Parameters keep names."""
    fn = getattr(owner, name)
    wrapped = isinstance(fn, partial) and fn.func is checkpoint
    if dropped and not wrapped:
        setattr(owner, name, partial(checkpoint, fn))
    elif wrapped and not dropped:
        setattr(owner, name, fn.args[0])


def scores_attention(q_BHSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor) -> Tensor:
    """Causal attention that keeps its S×S table, for comparison: softmax(q·kᵀ/√d)·v.

    `block.self_attn.attend = scores_attention` shows the S² that "selective" was invented for. (The
    model's own attention is fused: it stores no table and makes the scores again in its kernel.)
    """
    (B, H, S, d), K = q_BHSd.shape, k_BKSd.shape[1]
    R = H // K * S  # rows: the queries of all heads that share a key, so that keys need no copies
    scores_BHSS = (q_BHSd.reshape(B, K, R, d) @ k_BKSd.transpose(2, 3)).view(B, H, S, S)
    future_SS = torch.full_like(scores_BHSS[0, 0], -math.inf).triu(1)
    weights_BHSS = (scores_BHSS / math.sqrt(d) + future_SS).softmax(dim=-1)
    return (weights_BHSS.view(B, K, R, S) @ v_BKSd).view(B, H, S, d)
