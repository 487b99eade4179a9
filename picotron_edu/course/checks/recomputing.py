"""Checks of a learner's checkpoint: its numbers, its bytes, how often it calls, its dropout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from picotron_edu import recompute
from picotron_edu.course.checks.small_models import one_thread
from picotron_edu.course.comparing import assert_close, brief, fail
from picotron_edu.layout import describe
from picotron_edu.memory import measured_activation_bytes
from picotron_edu.memory_watch import MemoryWatch
from picotron_edu.model import Attention, Llama, LlamaConfig, token_loss_sum
from picotron_edu.optim import AdamW

Checkpoint = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
B, S, L = 2, 16, 3
SHAPE = LlamaConfig(
    vocab_size=11,
    hidden_size=32,
    intermediate_size=96,
    num_hidden_layers=L,
    num_attention_heads=4,
    num_key_value_heads=2,
)


class Part(nn.Module):
    """What is recomputed: large inside, and it counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(100, 800, bias=False)
        self.outer = nn.Linear(800, 100, bias=False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.outer(self.inner(x).sin().sin()).sin()


def run(checkpoint: Checkpoint, x: Tensor) -> tuple[Part, Tensor, MemoryWatch]:
    """The part, on float64 so that no rounding hides anything; its result; what was watched."""
    torch.manual_seed(0)
    part = Part().double()
    describe(part)
    with MemoryWatch(part, AdamW(part.named_parameters())) as watch:
        y = checkpoint(part, x)
    if not isinstance(y, Tensor):
        fail(f"expected the tensor fn(x), got {brief(y)}", "return what fn(x) returns")
    if not y.requires_grad:
        fail(
            "expected a result with a gradient to compute, got one without",
            "fn has weights: inside your own Function nothing is recorded, and the function needs "
            "an input that requires a gradient",
        )
    return part, y, watch


@one_thread()
def a_checkpoint(checkpoint: Checkpoint) -> str:
    x, plain_x = (torch.linspace(-1, 1, 3000).double().view(30, 100) for _ in range(2))
    x.requires_grad_()
    plain_x.requires_grad_()
    part, y, watch = run(checkpoint, x)
    plain, plain_y, _ = run(lambda fn, x: fn(x), plain_x)
    assert_close(plain_y, y, what="result", hint="in forward it is fn(x)")
    if part.calls != 1:
        fail(
            f"expected 1 call of fn in forward, got {part.calls}", "call it again in backward only"
        )
    kept = watch.look().total - sum(weight.nbytes for weight in part.parameters()) - y.nbytes
    if kept > x.nbytes + 8000:  # some room for a state of random numbers
        fail(
            f"expected x alone to be kept after forward, {x.nbytes:,} bytes, got {kept:,}",
            "what fn makes must not wait for backward: drop it in a hook, or make no graph",
        )
    (y * y.detach()).sum().backward()
    (plain_y * plain_y.detach()).sum().backward()
    if part.calls != 2:
        fail(f"expected 2 calls of fn, one in backward, got {part.calls}", "make all of it at once")
    pairs = {"x": (plain_x, x), "the inner weight": (plain.inner.weight, part.inner.weight)}
    pairs["the outer weight"] = (plain.outer.weight, part.outer.weight)
    for name, (right, got) in pairs.items():
        if got.grad is None:
            fail(f"expected a gradient of {name}, got None", "the second call needs a graph to x")
        assert_close(
            right.grad,
            got.grad,
            what=f"gradient of {name}",
            hints={2: "backward ran through both calls: cut the second one off with x.detach()"},
            hint="the gradient of the result comes from above: hand it on",
            rtol=1e-12,
            atol=0,
        )
    part, y, _ = run(checkpoint, x.detach())
    y.sum().backward()
    if part.inner.weight.grad is None:
        fail(
            "x without a gradient: expected a gradient of the weights, got None",
            "a Function of which no input requires a gradient is left out of the graph",
        )
    same_dropout(checkpoint)
    return "one input waits, one more call, all bits equal, dropout included"


def same_dropout(checkpoint: Checkpoint) -> None:
    """Case 57 of the course's list: a fresh mask in the second call."""

    def drop_half(x: Tensor) -> Tensor:
        return torch.dropout(x, 0.5, train=True) * x

    def draws(checkpoint: Checkpoint) -> list[Tensor]:
        torch.manual_seed(1)
        x = torch.ones(1000, requires_grad=True)
        y = checkpoint(drop_half, x)
        after_forward = torch.rand(4)
        y.sum().backward()
        grad = torch.zeros(1000) if x.grad is None else x.grad
        return [y.detach(), grad, after_forward, torch.rand(4)]

    with torch.random.fork_rng(devices=[]):
        right = draws(lambda fn, x: fn(x))
        y, grad, after_forward, after_backward = draws(checkpoint)
    if not torch.equal(y, right[0]):
        fail(
            "expected dropout's mask of forward to be the one that is drawn without checkpoint, "
            "got another",
            "leave the random numbers of forward alone: no seed, no state set before fn(x)",
        )
    violated = int(((y == 0) != (grad == 0)).sum())
    if violated:
        fail(
            f"dropout: expected gradient 0 where the output is 0 and only there, got {violated} "
            "of 1000 places otherwise",
            "the second call must draw the mask of the first: the state of torch's random numbers "
            "as it was *before* fn ran in forward",
        )
    assert_close(right[1], grad, what="gradient through dropout", rtol=1e-12)
    for when, number, got in (("forward", 2, after_forward), ("backward", 3, after_backward)):
        if not torch.equal(right[number], got):
            fail(
                f"after {when}: expected the next random numbers {brief(right[number])}, "
                f"got {brief(got)}",
                "put the state back that it had before the second call",
            )


def fresh_mask(Again: Any) -> str:
    if not hasattr(Again, "apply"):
        fail(
            f"expected the autograd.Function, got {brief(Again)}",
            "give the class, not a call of it",
        )
    same_dropout(lambda fn, x: Again.apply(fn, x))
    return "0 of 1000 places with a foreign gradient, and the next draw as if nothing had been"


def waiting(config: LlamaConfig, policy: recompute.Policy, scores: bool = False) -> int:
    model, tokens_BS = Llama(config), torch.zeros(B, S, dtype=torch.int64)
    for part in model.modules():
        if scores and isinstance(part, Attention):
            part.attend = recompute.scores_attention
    recompute.apply(model, policy)
    forward = lambda: token_loss_sum(model(tokens_BS), tokens_BS.clone())[0]  # noqa: E731
    return measured_activation_bytes(model, forward)


@one_thread()
def bytes_that_wait(*predicted: float) -> str:
    deeper = replace(SHAPE, num_hidden_layers=2 * L)
    wider = replace(SHAPE, intermediate_size=2 * SHAPE.intermediate_size)
    measured = {
        "inputs_bytes": waiting(deeper, "full") - waiting(SHAPE, "full"),
        "scores_bytes": waiting(SHAPE, "none", True) - waiting(SHAPE, "selective", True),
        "feed_forward_bytes": (waiting(wider, "none") - waiting(SHAPE, "none")) // L,
    }
    common = {
        1 / 4: "bytes, not numbers: a float32 has 4",
        1 / 2: "a float32 has 4 bytes; and there are two sequences",
        2: "count each tensor once",
    }
    more = (
        {
            1 / L: "there are three blocks, and each has an input",
            4: "an input is B x S x D: no heads",
        },
        {
            1 / L: "there are three blocks, and each has a table",
            1 / S: "one number for each *pair* of tokens",
            1 / 2: "each of the 4 query heads has its scores, and each of the 2 sequences",
        },
        {
            L: "one block at a time is at work, however many there are",
            3 / 4: "gate, silu(gate), up and their product: four tensors",
            1 / 4: "four tensors; and a float32 has 4 bytes",
        },
    )
    for (name, count), said, hints in zip(measured.items(), predicted, more, strict=True):
        hint = "write down the tensor's shape, multiply, and times 4 bytes"
        assert_close(count, said, what=name, hints=common | hints, hint=hint, rtol=0)
    return "12,288 + 24,576 + 49,152 bytes: as you said, and as counted in the model"
