"""A data-parallel step: ours in each of its three modes beside torch's DistributedDataParallel.

Forward, backward and the summing of gradients, on the same ranks, model and tokens, interleaved.
Each repeat gives one pair of times a mode; printed is the median of the pairs' ratios. Goal: at
most 1.0 for `bucketed`, ± 0.02 of noise. Beside it the peak of the memory that tensors held.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from picotron_edu.data import Batch
from picotron_edu.data_parallel import DataParallel
from picotron_edu.layout import describe
from picotron_edu.model import Llama, LlamaConfig, token_loss_sum
from picotron_edu.optim import keep_main_grads
from picotron_edu.ranks import all_reduce, barrier, launch, world
from picotron_edu.train import accumulate

RANKS, ROWS, SEQUENCE, REPEATS = 2, 4, 256, 30
CONFIG = LlamaConfig(256, 256, 704, num_hidden_layers=4, num_attention_heads=4)
MODES = ("naive", "overlap", "bucketed")


def rows_of_this_rank() -> Batch:
    draw = torch.Generator().manual_seed(world().index)
    tokens = torch.randint(0, CONFIG.vocab_size, (ROWS, SEQUENCE + 1), generator=draw)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def clear(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = param.main_grad = None


def ours(mode: str, batch: Batch) -> Callable[[], object]:
    model = Llama(CONFIG)
    describe(model)
    keep_main_grads(model)
    parallel = DataParallel(model, world(), mode)

    def step() -> None:
        accumulate(parallel, batch, ROWS, lambda x: all_reduce(x, world()))
        clear(model)

    return step


def theirs(batch: Batch) -> Callable[[], object]:
    model = Llama(CONFIG)
    parallel = DistributedDataParallel(model)

    def step() -> None:
        counted = all_reduce(batch.counted, world())
        loss, _ = token_loss_sum(parallel(batch.inputs_BS), batch.labels_BS)
        (loss * world().size / counted).backward()  # torch takes the mean over the ranks
        all_reduce(loss.detach(), world())
        clear(model)

    return step


def make(name: str) -> Callable[[], object]:
    batch = rows_of_this_rank()
    step = theirs(batch) if name == "DDP" else ours(name, batch)
    step(), step()  # buckets are laid anew after the first step, here and there
    return step


def times(repeats: int) -> dict[str, list[float]]:
    """Seconds of each repeat, by name."""
    steps = {name: make(name) for name in (*MODES, "DDP")}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats):
        for name in list(steps)[:: 1 if repeat % 2 else -1]:
            barrier(world())
            begin = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def peak_megabytes(name: str) -> float:
    """How far the largest resident set of this fresh process rises."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    make(name)()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3


def main() -> None:
    settings = {"world_size": RANKS, "quiet": True, "trace": False, "timeout": 300}
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else REPEATS
    seconds = launch(times, repeats, **settings)[0]
    print(f"{RANKS} ranks, gloo; 4 layers of 256, {ROWS}×{SEQUENCE} tokens a rank, float32")
    for name in (*MODES, "DDP"):
        ratios = [mine / other for mine, other in zip(seconds[name], seconds["DDP"])]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"  {name:8} / DDP = {middle:.3f} (quartiles {low:.2f} … {high:.2f}), "
            f"{statistics.median(seconds[name]) * 1e3:.0f} ms, "
            f"peak memory + {launch(peak_megabytes, name, **settings)[0]:.0f} MB"
        )


if __name__ == "__main__":
    main()
