"""Chapter 05 as a script: all ranks together compute each layer of one Llama (tp = all ranks).

    torchrun --nproc_per_node 2 notebooks/05_tensor_parallel.py
    torchrun --nproc_per_node 4 notebooks/05_tensor_parallel.py --hidden-size 512 --loss-chunks 4
    python notebooks/05_tensor_parallel.py --nproc 4 --recompute full --precision bfloat16

It trains on real text; every rank reads the same tokens. Then it looks at three promises: the
losses and gradient norms are those of one rank; a rank holds an n-th of weights, gradients and
optimizer states, and of the activations inside the blocks; it sends what the formula says.
"""

import sys
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import torch

from picotron_edu import tensor_parallel
from picotron_edu.config import OneReplica
from picotron_edu.data import TextData
from picotron_edu.flags import flag
from picotron_edu.memory import STATES, activation_bytes, measured_activation_bytes
from picotron_edu.memory_states import held, measured, recording
from picotron_edu.model import Llama, LlamaConfig
from picotron_edu.optim import AdamW, cosine_lr
from picotron_edu.partial_grads import sum_partial_grads
from picotron_edu.ranks import all_reduce, device, entrypoint, wire_bytes, world
from picotron_edu.show.ledger import size
from picotron_edu.train import Diverged, accumulate, build_model, train, train_step

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}  # the ranks add up in another order
COLUMNS = ("weights", "gradients", "optimizer", "activations", "sent")


@dataclass(frozen=True)
class Config(OneReplica):
    steps: int = flag(20, "optimizer steps")
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
    tensor_parallel.apply(model, world(), config.loss_chunks)
    model.finish = lambda: sum_partial_grads(model.parameters(), all_reduce)  # of shared key heads
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


def bytes_sent(config: Config, shape: LlamaConfig) -> float:
    """On the wire in a step: the all-reduces of B·S·D numbers, and the small ones of the loss.

    Each layer has 2 in forward and 2 in backward. Full recomputation repeats 1: backward wants what
    comes before a layer's last sum, not the sum. The embedding has 1, and the head as many as
    chunks, for as many numbers in all. The loss sends 3 float32 numbers a token, in chunks twice.
    """
    tokens = config.micro_batch_size * config.sequence_length
    each_layer = 4 + (config.recompute == "full")
    large = tokens * shape.hidden_size * config.dtype.itemsize
    small = 3 * 4 * tokens * (1 + (config.loss_chunks > 1))
    payload = large * (each_layer * shape.num_hidden_layers + 2) + small
    return config.accumulation * wire_bytes("all_reduce", payload, world().size)


def report(config: Config, result: Result, shape: LlamaConfig) -> list[str]:
    """The most that a rank holds and sends, counted; below it the formulas, which must hold.

    Those for activations leave out the masks of the loss, so there it need not be to the byte.
    """
    n, mixed = world().size, config.precision == "bfloat16"
    states = STATES["bfloat16, float32 gradients" if mixed else "float32"]
    tokens, gpu = (config.micro_batch_size, config.sequence_length), device().type == "cuda"
    counted = torch.tensor(result.bytes, dtype=torch.float64, device=device())
    rows = {"counted": all_reduce(counted, world(), "max").tolist()}
    for name, each in {"formula": tensor_parallel.rank_shape(shape, n), "alone": shape}.items():
        there = held([each.num_parameters()], 1, 0, states)
        kept = activation_bytes(each, *tokens, config.dtype, gpu, config.recompute)
        rows[name] = [*astuple(there), kept, 0.0 if each is shape else bytes_sent(config, shape)]
    lines = [f"{n} rank{'s' * (n > 1)}, one model; bytes that a rank holds, and sends in a step:"]
    lines.append(" " * 8 + "".join(f"{column:>13}" for column in COLUMNS))
    for name, row in rows.items():
        lines.append(f"{name:8}" + "".join(f"{size(part):>13}" for part in row))
    for column, count, formula in zip(COLUMNS, rows["counted"], rows["formula"]):
        if abs(count - formula) > 1 and column != "activations":
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
