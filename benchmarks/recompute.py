"""A training step with every block recomputed: ours beside torch.utils.checkpoint.

The same model, weights and tokens, interleaved in one process: forward and backward of 4 layers of
256, 4×256 tokens, float32. Each repeat gives one ratio ours / theirs; printed is their median.
Beside it the price of recomputing (against keeping everything), and the peak of memory. Goal: at
most 1.0.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from picotron_edu import recompute
from picotron_edu.layout import describe
from picotron_edu.memory_watch import MemoryWatch
from picotron_edu.model import Llama, LlamaConfig, token_loss_sum
from picotron_edu.optim import AdamW
from picotron_edu.ranks import span

ROWS, SEQUENCE, REPEATS = 4, 256, 20
CONFIG = LlamaConfig(vocab_size=256, hidden_size=256, intermediate_size=688, num_hidden_layers=4)


def ours(model: Llama) -> None:
    recompute.apply(model, "full")


def theirs(model: Llama) -> None:
    for block in model.model.layers:
        block.forward = partial(torch_checkpoint, block.forward, use_reentrant=False)


def keeps_all(model: Llama) -> None:
    recompute.apply(model, "none")


def make_step(choose: Callable[[Llama], None]) -> tuple[Llama, Callable[[], float]]:
    model = Llama(CONFIG)
    describe(model)
    choose(model)
    draw = torch.Generator().manual_seed(0)
    tokens_BS, labels_BS = torch.randint(0, 256, (2, ROWS, SEQUENCE), generator=draw)

    def step() -> float:
        model.zero_grad()
        with span("forward"):
            loss, counted = token_loss_sum(model(tokens_BS), labels_BS)
        with span("backward"):
            (loss / counted).backward()
        return loss.item()

    return model, step


def peak(model: Llama, step: Callable[[], float]) -> int:
    """Most bytes of tensors at one moment, weights and gradients included."""
    with MemoryWatch(model, AdamW(model.named_parameters())) as watch:
        step()
    return watch.peak


def main() -> None:
    ways = {"ours": ours, "theirs": theirs, "keeps all": keeps_all}
    made = {name: make_step(choose) for name, choose in ways.items()}
    losses = {name: step() for name, (_, step) in made.items()}
    assert len(set(losses.values())) == 1, losses  # it is the same work, to the last bit
    peaks = {name: peak(model, step) / 1e6 for name, (model, step) in made.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(REPEATS):
        for name in sorted(ways, reverse=bool(repeat % 2)):
            begin = time.perf_counter()
            made[name][1]()
            times[name].append(time.perf_counter() - begin)

    def ratio(a: str, b: str) -> float:
        return statistics.median(x / y for x, y in zip(times[a], times[b]))

    mine, other = (statistics.median(times[name]) * 1e3 for name in ("ours", "theirs"))
    print(f"full recomputation, 4 layers of 256, {ROWS}×{SEQUENCE} tokens, float32, ", end="")
    print(f"{torch.get_num_threads()} threads")
    print(f"  ours {mine:.0f} ms / torch.utils.checkpoint {other:.0f} ms", end="")
    print(f" = {ratio('ours', 'theirs'):.3f}")
    print(f"  against keeping all: ours {ratio('ours', 'keeps all'):.2f}", end="")
    print(f", torch's {ratio('theirs', 'keeps all'):.2f}")
    print("  peak memory: " + ", ".join(f"{name} {mb:.1f} MB" for name, mb in peaks.items()))


if __name__ == "__main__":
    main()
