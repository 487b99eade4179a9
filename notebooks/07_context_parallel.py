"""Chapter 07 as a script: all ranks share every sequence (cp = all ranks), and meet in attention.

    torchrun --nproc_per_node 2 notebooks/07_context_parallel.py
    torchrun --nproc_per_node 4 notebooks/07_context_parallel.py --kind ulysses
    python notebooks/07_context_parallel.py --nproc 4 --order contiguous --sequence-length 2048

It trains on real text. Then it looks at three promises: the losses and gradient norms are those of
one rank; a rank computes as many pairs of query and key, keeps as many bytes for backward and sends
as many as the formulas say.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from picotron_edu import context_parallel, recompute
from picotron_edu.config import OneReplica
from picotron_edu.context_parallel import Kind, cut
from picotron_edu.data import TextData
from picotron_edu.flags import flag
from picotron_edu.flops import OperationCounter, forward_flops
from picotron_edu.memory import activation_bytes, measured_activation_bytes
from picotron_edu.memory_states import recording
from picotron_edu.model import Llama, LlamaConfig
from picotron_edu.optim import AdamW, cosine_lr
from picotron_edu.partial_grads import sum_partial_grads
from picotron_edu.presets import check_choice, check_count
from picotron_edu.ranks import all_gather, all_reduce, device, entrypoint, wire_bytes, world
from picotron_edu.ring_attention import ROWS, Order
from picotron_edu.show.ledger import number, size
from picotron_edu.train import Diverged, accumulate, build_model, train, train_step

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}  # the ranks add up in another order


@dataclass(frozen=True)
class Config(OneReplica):
    steps: int = flag(20, "optimizer steps")
    sequence_length: int = flag(1024, "tokens in a sample, over all ranks")
    micro_batch_size: int = flag(1, "samples per forward pass")
    kind: Literal["ring", "all_gather", "ulysses"] = flag(
        "ring", "how attention meets the keys of other ranks"
    )
    order: Literal["zigzag", "contiguous"] = flag("zigzag", "which tokens a rank has")
    check_steps: int = flag(3, "steps to compare with one rank alone; 0: none")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("kind", self.kind, get_args(Kind))
        check_choice("order", self.order, get_args(Order))
        check_count("check_steps", self.check_steps, least=0)


@dataclass(frozen=True)
class Result:
    losses: list[float]
    norms: list[float]
    work: list[float]  # pairs computed, bytes kept, bytes sent: of this rank


class Broken(RuntimeError):
    """A promise that does not hold; every rank raises it."""


def main(config: Config) -> int:
    """Train one Llama, each sequence cut over all ranks."""
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


def make_model(config: Config, vocab_size: int) -> Llama:
    model = build_model(replace(config, recompute="none"), vocab_size)
    context_parallel.apply(model, world(), config.kind, config.order)
    recompute.apply(model, config.recompute)  # of the attention that there is now
    model.finish = lambda: sum_partial_grads(model.parameters(), all_reduce)  # for `accumulate`
    return model


def over_ranks(x: Tensor) -> Tensor:
    return all_reduce(x, world())


def run(config: Config, data: TextData) -> Result:
    """Train; then look at what is sent, kept and computed in one more step, without an update."""
    losses, norms = [], []
    with recording() as recorder:
        model = make_model(config, data.vocab_size)
        optimizer = AdamW(model.named_parameters(), weight_decay=config.weight_decay)
        for step in range(config.steps):
            lr = cosine_lr(step, config.lr, config.warmup, config.steps, floor=config.lr / 10)
            batch = cut(data.batch(step), world(), config.order).to(model.lm_head.weight.device)
            how = config.micro_batch_size, lr, config.max_grad_norm, over_ranks
            loss, norm = train_step(model, batch, optimizer, *how)
            losses.append(loss.item())
            norms.append(norm.item())
        before = len(recorder.events)
        accumulate(model, batch, config.micro_batch_size, over_ranks)
        sent = sum(e.wire_bytes for e in recorder.events[before:] if e.axis == "world")
    rows = slice(0, config.micro_batch_size)
    inputs, labels = batch.inputs_BS[rows].clone(), batch.labels_BS[rows].clone()
    with OperationCounter() as counter:
        kept = measured_activation_bytes(model, lambda: model(inputs, batch.positions_S, labels)[0])
    matrices = forward_flops(model.config, *inputs.shape).weights
    return Result(losses, norms, [counter.total - matrices, kept, sent])


def pairs_of(config: Config, n: int, index: int) -> float:
    """Pairs of query and key that a rank computes for a sequence.

    A block on the diagonal is masked in part. The ring cuts it into bands of ROWS queries, each of
    which looks no further than its own end; the other kinds compute all of it (a kernel may skip).
    In Ulysses a rank has all pairs of an n-th of the heads.
    """
    S = config.sequence_length
    if config.kind == "ulysses":
        return S**2 / n
    chunk = S // (2 * n) if config.order == "zigzag" else S // n
    whole, diagonal = (2 * n - 1, 2) if config.order == "zigzag" else (index, 1)
    bands = (min(ROWS, chunk - start) * min(start + ROWS, chunk) for start in range(0, chunk, ROWS))
    return whole * chunk**2 + diagonal * (sum(bands) if config.kind == "ring" else chunk**2)


def kept_by(config: Config, shape: LlamaConfig, n: int, index: int) -> float:
    """Activations of one micro-batch: an n-th of them all, and what the other kinds add."""
    B, S, L = config.micro_batch_size, config.sequence_length, shape.num_hidden_layers
    w, gpu = config.dtype.itemsize, device().type == "cuda"
    kept = activation_bytes(shape, B, S // n, config.dtype, gpu, config.recompute)
    order = 8 * S  # int64: where in the text the tokens of all ranks belong
    keys = 2 * B * (S - S // n) * shape.num_key_value_heads * shape.size_of_head  # other ranks'
    masks = pairs_of(config, n, index)
    # o_proj keeps a copy of what the kernel put out; with one head the ring needs none
    copy = w * B * S // n * shape.size_of_head if shape.num_attention_heads == 1 else 0
    gathered = order + w * (keys + masks) + copy
    more = {"ring": 0, "ulysses": 4 * order + copy, "all_gather": gathered}
    return kept + (L * more[config.kind] if config.recompute == "none" else 0)


def sent_by(config: Config, shape: LlamaConfig, n: int) -> float:
    """On the wire in a step: attention in each layer, then gradients; counted tokens and loss."""
    w, s = config.dtype.itemsize, config.sequence_length // n
    of_a_head = config.micro_batch_size * s * shape.size_of_head
    kv, q = 2 * of_a_head * shape.num_key_value_heads, of_a_head * shape.num_attention_heads
    once = (n - 1) * w * (kv if config.kind != "ulysses" else (2 * q + kv) / n)
    passes = 2 + (config.recompute != "none")  # recomputed attention sends again
    of_a_layer = passes * once + (4 * n * kv if config.kind == "ring" and n > 1 else 0)
    at_the_end = wire_bytes("all_reduce", 4 * shape.num_parameters() + 8 + 4, n)
    return config.accumulation * shape.num_hidden_layers * of_a_layer + at_the_end


def report(config: Config, result: Result, shape: LlamaConfig) -> list[str]:
    """What each rank computes, keeps and sends, counted; below it the formulas, which must hold."""
    n, B, S = world().size, config.micro_batch_size, config.sequence_length
    layers_and_heads = shape.num_hidden_layers * shape.num_attention_heads
    operations, kept, sent = result.work  # of a pair: 2·d for the score, 2·d for the value
    pairs = operations / (4 * shape.size_of_head * layers_and_heads * B)
    counted = all_gather(torch.tensor([[pairs, kept, sent]], dtype=torch.float64), world())
    formulas = [
        [pairs_of(config, n, i), kept_by(config, shape, n, i), sent_by(config, shape, n)]
        for i in range(n)
    ]
    lines = [f"{n} rank{'s' * (n > 1)}, {config.kind}, {config.order}, sequences of {S} tokens:"]
    lines.append(" " * 32 + "".join(f"{f'rank {i}':>11}" for i in range(n)))
    whats = "pairs computed, masked too", "bytes kept, of a micro-batch", "bytes sent, in a step"
    for what, found, right in zip(whats, counted.T.tolist(), zip(*formulas)):
        write = number if what.startswith("pairs") else size
        for name, values in {what: found, "    formula": right}.items():
            lines.append(f"{name:32}" + "".join(f"{write(value):>11}" for value in values))
        for rank, (count, formula) in enumerate(zip(found, right)):
            if abs(count - formula) > 1 and device().type == "cpu":
                numbers = f"{number(count)} counted on rank {rank}, {number(formula)}"
                raise Broken(f"{what}: {numbers} by the formula")
    losses, steps = result.losses, f"{config.steps} step{'s' * (config.steps > 1)}"
    return [*lines, f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {steps}"]


def compare_with_one_rank(config: Config, data: TextData) -> str:
    """Each rank trains a few steps on whole sequences alone, and compares."""
    few = replace(config, steps=config.check_steps)
    together, alone = run(few, data), train(few, progress=False, data=data)
    pairs = [
        *zip(together.losses, (record.loss for record in alone)),
        *zip(together.norms, (record.grad_norm for record in alone)),
    ]
    apart = torch.tensor(max(abs(mine / its - 1) for mine, its in pairs))
    worst = all_reduce(apart, world(), "max").item()  # every rank has compared
    if not worst < TOLERANCE[config.precision]:
        raise Broken(f"{world().size} ranks do not train like one: {worst:.1e} apart")
    return (
        f"losses and gradient norms of {len(alone)} step{'s' * (len(alone) > 1)} are those of "
        f"one rank, to {max(worst, 1e-7):.0e}"
    )


if __name__ == "__main__":
    sys.exit(entrypoint(main, Config))
