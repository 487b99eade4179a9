"""Training on one rank: the step, the loop around it, and what it reports.

A step: forward and backward for each micro-batch while gradients add up, then clip, then AdamW.

    global batch   ┌ micro-batch 0 ┐ forward, backward ─┐
                   │ micro-batch 1 │ forward, backward ─┼─(+)─▶ main_grad ─▶ clip ─▶ AdamW
                   └ micro-batch 2 ┘ forward, backward ─┘
                     only one micro-batch's activations are in memory at a time

The loss is *the sum of token losses over the number of counted tokens of the whole global batch*.
Dividing by that one number makes the result independent of how the batch is cut. The mean of the
micro-batches' means is not: of losses (1, 1, 1) and (4) it makes 2.5, where the mean is 1.75.

On many ranks "whole" means all of them: `total` sums a tensor over the ranks that share the
batch, and on one rank there is nothing to sum. The step itself is the same on any number of ranks:
`spread` gives the model its techniques, and they know what to send.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from picotron_edu import flops, ranks, recompute
from picotron_edu.config import TrainConfig
from picotron_edu.data import Batch, TextData
from picotron_edu.data_parallel import DataParallel
from picotron_edu.layout import describe
from picotron_edu.model import Llama
from picotron_edu.optim import AdamW, clip_by_global_norm, cosine_lr, keep_main_grads
from picotron_edu.presets import check_count, check_number
from picotron_edu.report import History, Progress, StepRecord, peak_memory
from picotron_edu.zero import Zero

__all__ = [
    "Diverged",
    "TrainConfig",
    "accumulate",
    "evaluate",
    "sample_text",
    "train",
    "train_step",
]


class Diverged(ValueError):
    """The loss or the gradient is nan or infinite: no further step can mend the weights."""


def alone(x: Tensor) -> Tensor:
    """The total over one rank."""
    return x


def accumulate(
    model: nn.Module,
    batch: Batch,
    micro_batch_size: int,
    total: Callable[[Tensor], Tensor] = alone,
) -> Tensor:
    """Forward and backward over this rank's rows; returns the loss of the global batch.

    If no token at all is counted, the loss and all gradients are 0. A data-parallel model (one that
    has no_sync and finish) sums its gradients over the ranks in the last backward.
    """
    counted = total(batch.counted).clamp(min=1)
    loss_sum = torch.zeros((), device=counted.device)
    micro_batches = batch.split(micro_batch_size)
    no_sync = getattr(model, "no_sync", nullcontext)
    for micro in micro_batches:
        with ranks.span("forward"):
            micro_sum, _ = model(micro.inputs_BS, micro.positions_S, micro.labels_BS)
        with nullcontext() if micro is micro_batches[-1] else no_sync(), ranks.span("backward"):
            (micro_sum / counted).backward()
        loss_sum = loss_sum + micro_sum.detach()
    getattr(model, "finish", lambda: None)()
    return total(loss_sum) / counted


def train_step(
    model: nn.Module,
    batch: Batch,
    optimizer: AdamW,
    micro_batch_size: int,
    lr: float,
    max_grad_norm: float = float("inf"),
    total: Callable[[Tensor], Tensor] = alone,
) -> tuple[Tensor, Tensor]:
    """One optimizer step; returns the loss and the gradient's norm before clipping.

    Raises Diverged, and leaves the weights alone, if one of the two is nan or infinite.
    """
    loss = accumulate(model, batch, micro_batch_size, total)
    with ranks.span("optimizer"):
        grad_norm = clip_by_global_norm(model.parameters(), max_grad_norm, ranks.all_reduce)
        if not (loss.isfinite() & grad_norm.isfinite()):
            raise Diverged(f"loss is {loss.item():.3g}, gradient norm {grad_norm.item():.3g}")
        optimizer.step(lr)
        optimizer.zero_grad()
    return loss, grad_norm


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    device: torch.device,
    total: Callable[[Tensor], Tensor] = alone,
) -> float:
    """The mean loss over all counted tokens: each sample once, however unequal the batches."""
    loss_sum = torch.zeros((), device=device)
    counted = torch.zeros((), device=device, dtype=torch.int64)
    for batch in batches:
        batch = batch.to(device)
        batch_sum, batch_count = model(batch.inputs_BS, batch.positions_S, batch.labels_BS)
        loss_sum, counted = loss_sum + batch_sum, counted + batch_count
    return (total(loss_sum) / total(counted).clamp(min=1)).item()


def pick_device(name: str) -> torch.device:
    """For "auto": this rank's own device; for a single process, the best one there is."""
    if name != "auto":
        return torch.device(name)
    if ranks.world().size > 1:
        return ranks.device()
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def build_model(config: TrainConfig, vocab_size: int) -> Llama:
    """The model to train: on its device, in its precision, with layouts and float32 gradients."""
    device = pick_device(config.device)
    model = Llama(config.shape(vocab_size), config.seed, device, config.dtype)
    describe(model)
    keep_main_grads(model)
    recompute.apply(model, config.recompute)
    return model


def spread(model: Llama, config: TrainConfig, dp: ranks.Axis | None) -> Any:
    """The model as it trains on its ranks; without an axis it trains alone, as it is."""
    if dp is None:
        if config.zero:
            raise ValueError(f"zero={config.zero} needs dp: the axis to share the states over")
        return model
    if config.zero:
        return Zero(model, dp, config.zero)
    return DataParallel(model, dp, config.data_parallel, config.bucket_mb)


def train(
    config: TrainConfig,
    progress: bool = True,
    data: TextData | None = None,
    dp: ranks.Axis | None = None,
) -> History:
    """Train a new model; the history holds a record for each step, the model and the data.

    data: None for `config.text(replicas=dp.size)`. dp: the ranks that share each global batch of
    the data; None where each rank trains for itself. Tokens, tokens/s and MFU are those of all of
    them together. Raises Diverged at a loss or gradient that is not finite.
    """
    index, replicas = (dp.index, dp.size) if dp else (0, 1)
    total = partial(ranks.all_reduce, axis=dp) if dp else alone
    data = config.text(replicas=replicas) if data is None else data
    model = build_model(config, data.vocab_size)
    trained = spread(model, config, dp)
    device = model.lm_head.weight.device
    optimizer = AdamW(trained.named_parameters(), weight_decay=config.weight_decay)
    tokens = data.global_batch_size * data.sequence_length
    work = flops.model_flops(model.config, data.global_batch_size, data.sequence_length)
    history = History(model, data, flops.peak_of(device, config.dtype), trained)

    with Progress(config.steps, shown=progress) as bar:
        for step in range(config.steps):
            start = time.perf_counter()
            lr = cosine_lr(step, config.lr, config.warmup, config.steps, floor=config.lr / 10)
            batch = data.batch(step, index, replicas).to(device)
            try:
                loss, grad_norm = train_step(
                    trained,
                    batch,
                    optimizer,
                    config.micro_batch_size,
                    lr,
                    config.max_grad_norm,
                    total,
                )
            except Diverged as error:
                raise Diverged(f"{error} at step {step}: try a lower lr ({config.lr:g})") from None
            losses = loss.item(), grad_norm.item()  # waits until the device has finished
            seconds = time.perf_counter() - start
            speed = tokens / seconds
            mfu = history.peak.utilization(work.total / replicas, seconds)
            memory = peak_memory(device)
            record = StepRecord(step, *losses, lr, tokens, seconds, speed, mfu, memory)
            history.records.append(record)
            bar.show(record)
    return history


@torch.no_grad()
def sample_text(
    model: Llama,
    data: TextData,
    prompt: str,
    length: int = 300,
    temperature: float = 0.8,
    seed: int = 0,
) -> str:
    """Let the model write: draw the next token from its probabilities, again and again.

    It reads the whole text so far for each token: simple, and fast enough for a look.
    """
    check_count("length", length, least=0)
    check_number("temperature", temperature)
    if not prompt:
        raise ValueError("prompt must hold at least one character to go on from, got ''")
    device, draw = model.lm_head.weight.device, torch.Generator().manual_seed(seed)
    tokens = data.encode(prompt)
    for _ in range(length):
        context_BS = torch.tensor([tokens[-data.sequence_length :]], device=device)
        logits_V = model(context_BS)[0, -1].float().cpu()
        probabilities_V = (logits_V / temperature).softmax(dim=-1)
        tokens.append(int(torch.multinomial(probabilities_V, 1, generator=draw)))
    return data.decode(tokens)
