"""The oracle: a technique trains exactly like one rank, or it is wrong.

    def technique(model: Llama) -> Rank: ...        # what it makes of a plain model, on one rank
    assert_same_training(technique, world_size=2)

The reference is one process, the whole batch at once, torch's own mean loss and autograd: it shares
no code with what is tested but the model. Then every rank trains three steps with the technique,
from the same full weights, on its part of the same global batches. Token counts differ from row to
row, and labels are masked. Equal on every rank must be: the loss, each gradient gathered to its
full shape, the global gradient norm, and the weights after each step. The optimizer is plain SGD:
Adam would divide a wrong constant factor out.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from picotron_edu.data import Batch
from picotron_edu.layout import describe, layout_of, piece_of, place
from picotron_edu.model import Llama, LlamaConfig
from picotron_edu.optim import global_norm, grad_of, keep_main_grads, zero_grads
from picotron_edu.ranks import all_reduce, launch
from picotron_edu.train import accumulate, alone

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
LEARNING_RATE = 0.5
CONFIG = LlamaConfig(
    vocab_size=12,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.3,  # large, so that no gradient is too small to be compared
)


@dataclass
class Rank:
    """One rank's part of a technique.

    It trains on rows `index` of `count` of the global batch. `total` sums a tensor over the ranks
    that share the batch; `finish` completes the gradients after the last backward; `cut` takes a
    rank's part of the sequence.
    """

    model: nn.Module
    index: int = 0
    count: int = 1
    total: Callable[[Tensor], Tensor] = alone
    finish: Callable[[], None] = lambda: None
    cut: Callable[[Batch], Batch] = lambda batch: batch


@dataclass
class Training:
    """What happened, step by step; tensors by the parameter's full name, in full shape."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)


def make_batches(config: LlamaConfig, rows: int, sequence: int = 12, steps: int = 3) -> list[Batch]:
    """The rows have ever fewer counted labels, from nearly all to none."""
    draw = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(steps):
        tokens = torch.randint(config.vocab_size, (rows, sequence + 1), generator=draw)
        labels_BS = tokens[:, 1:].clone()
        share = torch.linspace(0.05, 1.01, rows)[:, None]
        labels_BS[torch.rand(rows, sequence, generator=draw) < share] = -100
        batches.append(Batch(tokens[:, :-1].contiguous(), labels_BS))
    return batches


def train_alone(config: LlamaConfig, batches: list[Batch], dtype: torch.dtype) -> Training:
    """The reference: one process, one backward for the whole batch, torch's mean loss."""
    model = Llama(config, seed=1, dtype=dtype)
    done = Training()
    for batch in batches:
        logits_TV, labels_T = model(batch.inputs_BS).flatten(0, 1), batch.labels_BS.flatten()
        loss = F.cross_entropy(logits_TV, labels_T, ignore_index=-100)
        model.zero_grad()
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            for param in model.parameters():
                param -= LEARNING_RATE * param.grad
        done.losses.append(loss.item())
        done.norms.append(torch.cat([g.flatten() for g in gradients.values()]).norm().item())
        done.gradients.append(gradients)
        done.weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return done


def train_rank(
    technique: Callable[[Llama], Rank],
    config: LlamaConfig,
    batches: list[Batch],
    micro_batch_size: int,
    dtype: torch.dtype,
) -> Training:
    """The same training by the technique, seen from one rank."""
    model = Llama(config, seed=1, dtype=dtype)
    describe(model)
    keep_main_grads(model)
    rank = technique(model)
    params = list(rank.model.parameters())
    done = Training()
    for batch in batches:
        rows = piece_of(len(batch), rank.count, rank.index)
        mine = rank.cut(batch.rows(rows).padded(-(-len(batch) // rank.count)))
        loss = accumulate(rank.model, mine, micro_batch_size, rank.total)
        rank.finish()
        norm = global_norm(params, all_reduce)
        gradients = {layout_of(p).name: gathered(p, grad_of(p)) for p in params}
        with torch.no_grad():
            for param in params:
                param -= LEARNING_RATE * grad_of(param)
        zero_grads(params)
        done.losses.append(loss.item())
        done.norms.append(norm.item())
        done.gradients.append(gradients)
        done.weights.append({layout_of(p).name: gathered(p, p.detach()) for p in params})
    return done


def gathered(param: nn.Parameter, piece: Tensor) -> Tensor:
    """The full tensor that this rank and its neighbours hold pieces of, of whatever sizes."""
    layout = layout_of(param)
    full = piece.new_zeros(layout.full_shape)
    place(layout, full, piece)
    for axis in layout.cut_axes:
        all_reduce(full, axis)
    return full


def assert_same_training(
    technique: Callable[[Llama], Rank],
    world_size: int = 1,
    micro_batch_size: int = 2,
    rows: int = 8,
    dtype: torch.dtype = torch.float64,
    config: LlamaConfig = CONFIG,
    sequence: int = 12,
) -> None:
    """Raises AssertionError that names the rank, the step and what differs, with the ratio."""
    batches = make_batches(config, rows, sequence)
    expected = train_alone(config, batches, dtype)
    arguments = (technique, config, batches, micro_batch_size, dtype)
    if world_size == 1:
        trained = [train_rank(*arguments)]
    else:
        trained = list(launch(train_rank, *arguments, world_size=world_size, quiet=True))
    for rank, got in enumerate(trained):
        for step in range(len(batches)):
            where = f"rank {rank}, step {step}: "
            same(where + "loss", got.losses[step], expected.losses[step], dtype, step + 1)
            for what in ("gradients", "weights"):
                full = getattr(expected, what)[step]
                for name, value in getattr(got, what)[step].items():
                    same(f"{where}{what} of {name}", value, full[name], dtype, step + 1)
            same(where + "gradient norm", got.norms[step], expected.norms[step], dtype, step + 1)
    names = {name for got in trained for name in got.weights[0]}
    assert names == expected.weights[0].keys(), (
        "a parameter is on no rank, or has a name of its own"
    )


def same(
    what: str, got: Tensor | float, expected: Tensor | float, dtype: torch.dtype, steps: int = 1
) -> None:
    """`steps`: each may add its own rounding, for it starts from rounded weights."""
    got, expected = torch.as_tensor(got), torch.as_tensor(expected)
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, should be {expected.shape}"
    error = ((got - expected).abs().max() / expected.abs().max()).item()
    ratio = (got.abs().max() / expected.abs().max()).item()
    assert error <= steps * TOLERANCE[dtype], (
        f"{what}: {error:.1e} off; it is {ratio:.6g} times as large"
    )
