"""Small models and batches that the checks of training chapters share, and ways to look at them.

The numbers of counted tokens are chosen by the check and never equal, so that no mean of means and
no constant factor can hide. Models are float64 unless precision is the point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from picotron_edu.data import Batch
from picotron_edu.model import Llama, LlamaConfig, token_loss_sum
from picotron_edu.optim import zero_grads

SMALL = LlamaConfig(
    vocab_size=13,
    hidden_size=24,
    intermediate_size=20,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=4,
)


@contextmanager
def one_thread() -> Iterator[None]:
    """On models this small, several threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_batch(counted: int, seed: int, rows: int = 2, sequence: int = 6) -> Batch:
    """Random tokens; `counted` of the labels are counted, the others are −100."""
    draw = torch.Generator().manual_seed(seed)
    inputs_BS, tokens_BS = torch.randint(0, SMALL.vocab_size, (2, rows, sequence), generator=draw)
    place_BS = torch.randperm(rows * sequence, generator=draw).view(rows, sequence)
    return Batch(inputs_BS, tokens_BS.where(place_BS < counted, -100))


def make_batches(counts: Sequence[int], seed: int = 0) -> list[Batch]:
    """One micro-batch for each count of counted tokens."""
    return [make_batch(counted, seed=100 * seed + i) for i, counted in enumerate(counts)]


def make_model(dtype: torch.dtype = torch.float64) -> Llama:
    """Always the same weights, far enough from 0 that gradients are not all alike."""
    shape = replace(SMALL, hidden_size=8, num_hidden_layers=1, initializer_range=0.5)
    return Llama(shape, dtype=dtype)


def in_one_row(model: nn.Module, of: Callable[[Any], Tensor | None]) -> Tensor:
    """`of(param)` for all parameters, one after the other; 0 where there is none."""
    some = ((of(param), param) for param in model.parameters())
    row = [(torch.zeros_like(param) if x is None else x.detach()).flatten() for x, param in some]
    return torch.cat(row)


def grad_in_one_row(model: nn.Module) -> Tensor:
    return in_one_row(model, lambda param: param.grad)


def set_grads(model: nn.Module, row: Tensor) -> None:
    """The inverse of `grad_in_one_row`."""
    params = list(model.parameters())
    for param, piece in zip(params, row.split([param.numel() for param in params])):
        param.grad = piece.view_as(param).clone()


def each_alone(
    batches: Sequence[Batch], dtype: torch.dtype = torch.float64, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """For each batch alone: `scale` times the sum of its token losses; its gradient, one row."""
    losses, grads = [], []
    for batch in batches:
        model = make_model(dtype)
        loss, _ = token_loss_sum(model(batch.inputs_BS), batch.labels_BS)
        (loss * scale).backward()
        losses.append(loss.detach() * scale)
        grads.append(grad_in_one_row(model))
    return torch.stack(losses), torch.stack(grads)


def most_bytes_kept(model: nn.Module, fn: Callable[[], Any]) -> int:
    """Run `fn`; the most bytes of activations that waited for a backward pass at one time."""
    weights = {param.data_ptr() for param in model.parameters()}
    now = most = 0

    class Kept:
        """Lives as long as autograd keeps the tensor."""

        def __init__(self, tensor: Tensor) -> None:
            nonlocal now, most
            self.tensor = tensor
            self.nbytes = 0 if tensor.data_ptr() in weights else tensor.nbytes
            now += self.nbytes
            most = max(most, now)

        def __del__(self) -> None:
            nonlocal now
            now -= self.nbytes

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        fn()
    return most


class Recorder:
    """In an optimizer's place: writes down the gradients at each step, and leaves the weights."""

    def __init__(self, model: nn.Module, grad_of: Callable[[Any], Tensor | None]) -> None:
        self.model, self.grad_of = model, grad_of
        self.seen: list[Tensor] = []

    def step(self) -> None:
        self.seen.append(in_one_row(self.model, self.grad_of))

    def zero_grad(self, set_to_none: bool = True) -> None:
        zero_grads(self.model.parameters())
