"""Chapter 06 as a script: tensor parallelism on all ranks, and between its blocks each rank has a
part of the sequence.

    torchrun --nproc_per_node 2 notebooks/06_sequence_parallel.py
    torchrun --nproc_per_node 4 notebooks/06_sequence_parallel.py --no-regather --loss-chunks 4
    python notebooks/06_sequence_parallel.py --nproc 4 --recompute full --precision bfloat16

It trains on real text; every rank reads the same tokens. Then it looks at three promises: the
losses and gradient norms are those of one rank; a rank keeps an n-th of the activations, to the
byte; it sends what the formula says. Beside them is what tensor parallelism alone would do.
"""

import math
import sys
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import torch

from picotron_edu import sequence_parallel
from picotron_edu.config import OneReplica
from picotron_edu.data import TextData
from picotron_edu.flags import flag
from picotron_edu.memory import STATES, activations, measured_activation_bytes
from picotron_edu.memory_states import held, measured, recording
from picotron_edu.model import Llama, LlamaConfig
from picotron_edu.optim import AdamW, cosine_lr
from picotron_edu.partial_grads import sum_partial_grads
from picotron_edu.ranks import all_reduce, device, entrypoint, wire_bytes, world
from picotron_edu.show.ledger import size
from picotron_edu.tensor_parallel import rank_shape
from picotron_edu.train import Diverged, accumulate, build_model, train, train_step

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}  # the ranks add up in another order
COLUMNS = ("weights", "gradients", "optimizer", "activations", "sent")


@dataclass(frozen=True)
class Config(OneReplica):
    steps: int = flag(20, "optimizer steps")
    regather: bool = flag(True, "gather x once more in backward, in place of keeping it")
    loss_chunks: int = flag(1, "parts of the sequence that have logits one after the other")
    check_steps: int = flag(3, "steps to compare with one rank alone; 0: none")


@dataclass(frozen=True)
class Result:
    losses: list[float]
    norms: list[float]
    bytes: list[float]  # of this rank, as in COLUMNS


class Broken(RuntimeError):
    """A promise that does not hold; every rank raises it."""


def main(config: Config) -> int:
    """Train one Llama on all ranks together. Without flags: tiny, 20 steps of the Python manual."""
    try:
        data = config.text()
        lines = report(config, run(config, data), config.shape(data.vocab_size))
        if config.check_steps:
            lines.append(compare_with_one_rank(config, data))
    except (Diverged, ValueError, OSError, ImportError, Broken) as error:
        if world().index == 0:  # one line; every rank has the same
            print(f"{Path(__file__).name}: error: {error}", file=sys.stderr, flush=True)
        return 1 if isinstance(error, Broken) else 2  # 2: the reader can mend it
    if world().index == 0:
        print("\n".join(lines))
    return 0


def cut_model(config: Config, vocab_size: int) -> Llama:
    """Each rank makes the whole model and keeps its pieces. `accumulate` calls `finish` at last."""
    model = build_model(config, vocab_size)
    sequence_parallel.apply(model, world(), config.loss_chunks, config.regather)
    model.finish = lambda: sum_partial_grads(model.parameters(), all_reduce)  # of the norms
    return model


def run(config: Config, data: TextData) -> Result:
    """Train, then look at what there is and what is sent just before another update."""
    losses, norms, limit = [], [], config.max_grad_norm
    with recording() as recorder:
        model = cut_model(config, data.vocab_size)
        optimizer = AdamW(model.named_parameters(), weight_decay=config.weight_decay)
        for step in range(config.steps):
            lr = cosine_lr(step, config.lr, config.warmup, config.steps, floor=config.lr / 10)
            batch = data.batch(step).to(model.lm_head.weight.device)  # the same rows on all ranks
            loss, norm = train_step(model, batch, optimizer, config.micro_batch_size, lr, limit)
            losses.append(loss.item())
            norms.append(norm.item())
        before = len(recorder.events)
        accumulate(model, batch, config.micro_batch_size)
        sent = sum(e.wire_bytes for e in recorder.events[before:] if e.axis == "world")
    micro = batch.split(config.micro_batch_size)[0]
    kept = measured_activation_bytes(
        model, lambda: model(micro.inputs_BS, micro.positions_S, micro.labels_BS)[0]
    )
    return Result(losses, norms, [*astuple(measured(model, optimizer)), kept, sent])


def bytes_sent(config: Config, shape: LlamaConfig, sequence_parallel: bool = True) -> float:
    """On the wire in a step, in units of one all-gather or reduce-scatter of B·S·D numbers.

    Each layer has 4 in forward and 4 in backward, and 2 more to gather x once more. Full
    recomputation repeats 3: backward wants what comes before a layer's last sum, not the sum.
    Embedding and head have 2 each, the head 1 more to gather x again, and 1 if chunks of the loss
    make the logits again. An all-reduce of tensor parallelism is 2 units: it is both in one. The
    loss sends 3 float32 numbers a token, in chunks twice; the norms sum their gradients at the end.
    """
    again, full = config.regather, config.recompute == "full"
    chunked, tokens = config.loss_chunks > 1, config.micro_batch_size * config.sequence_length
    each_layer, ends = 8 + 2 * again + 3 * full, 4 + again + chunked
    if not sequence_parallel:
        each_layer, ends = 8 + 2 * full, 4
    large = tokens * shape.hidden_size * config.dtype.itemsize
    units = wire_bytes("all_gather", large, world().size)
    units *= each_layer * shape.num_hidden_layers + ends
    small = wire_bytes("all_reduce", 3 * 4 * tokens * (1 + chunked), world().size)
    norms = 4 * (2 * shape.num_hidden_layers + 1) * shape.hidden_size * sequence_parallel
    return config.accumulation * (units + small) + wire_bytes("all_reduce", norms, world().size)


def activation_bytes(config: Config, shape: LlamaConfig) -> dict[str, int]:
    """By the formulas: with sequence parallelism, with tensor parallelism alone, on one rank."""
    n, tokens = world().size, (config.micro_batch_size, config.sequence_length)
    options = {"dtype": config.dtype, "gpu": device().type == "cuda", "recompute": config.recompute}
    kept = {
        "formula": sequence_parallel.rank_activations(
            shape, n, *tokens, config.regather, config.loss_chunks, **options
        ),
        "tensor": activations(rank_shape(shape, n), *tokens, **options),
        "alone": activations(shape, *tokens, **options),
    }
    # The loss of many ranks keeps masks, a byte a token (3, in chunks 1), and no weight of the
    # labels. In chunks it makes the logits again.
    chunked = config.loss_chunks > 1
    dropped = {"weight of the labels"} | ({"log-probabilities"} if chunked else set())
    totals = {"alone": sum(k.total for k in kept.pop("alone"))}
    for name, rows in kept.items():
        cut = sum(k.total for k in rows if k.name not in dropped)
        totals[name] = cut + (1 if chunked else 3) * math.prod(tokens)
    return totals


def report(config: Config, result: Result, shape: LlamaConfig) -> list[str]:
    """The most that a rank holds and sends, counted; below it the formulas, which must hold."""
    n, mixed = world().size, config.precision == "bfloat16"
    states = STATES["bfloat16, float32 gradients" if mixed else "float32"]
    counted = torch.tensor(result.bytes, dtype=torch.float64, device=device())
    rows = {"counted": all_reduce(counted, world(), "max").tolist()}
    sent = {"formula": bytes_sent(config, shape), "tensor": bytes_sent(config, shape, False)}
    kept = activation_bytes(config, shape)
    for name in ("formula", "tensor", "alone"):
        each = shape if name == "alone" else rank_shape(shape, n)
        there = held([each.num_parameters()], 1, 0, states)
        rows[name] = [*astuple(there), kept[name], sent.get(name, 0.0)]
    lines = [f"{n} rank{'s' * (n > 1)}, one model; bytes that a rank holds, and sends in a step:"]
    lines.append(" " * 8 + "".join(f"{column:>13}" for column in COLUMNS))
    for name, row in rows.items():
        lines.append(f"{name:8}" + "".join(f"{size(part):>13}" for part in row))
    for column, count, formula in zip(COLUMNS, rows["counted"], rows["formula"]):
        if abs(count - formula) > 1 and (column != "activations" or device().type == "cpu"):
            raise Broken(f"{column}: {count:,.0f} counted, {formula:,.0f} by the formula")
    losses, steps = result.losses, f"{config.steps} step{'s' * (config.steps > 1)}"
    return [*lines, f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {steps}"]


def compare_with_one_rank(config: Config, data: TextData) -> str:
    """Each rank trains a few steps of the whole model alone, and compares."""
    few = replace(config, steps=config.check_steps)
    together, alone = run(few, data), train(few, progress=False, data=data)
    pairs = [
        *zip(together.losses, (record.loss for record in alone)),
        *zip(together.norms, (record.grad_norm for record in alone)),
    ]
    apart = torch.tensor(max(abs(mine / its - 1) for mine, its in pairs), device=device())
    worst = all_reduce(apart, world(), "max").item()  # every rank has compared
    if not worst < TOLERANCE[config.precision]:
        raise Broken(f"{world().size} ranks do not train like one: {worst:.1e} apart")
    return (
        f"losses and gradient norms of {len(alone)} step{'s' * (len(alone) > 1)} are those of "
        f"one rank, to {max(worst, 1e-7):.0e}"
    )


if __name__ == "__main__":
    sys.exit(entrypoint(main, Config))
