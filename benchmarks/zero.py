"""ZeRO: ours beside torch's own, on the same two ranks, step by step in turn.

    stage 3   torch.distributed.fsdp.fully_shard on each block and the root, torch's AdamW
    stage 1   DistributedDataParallel with ZeroRedundancyOptimizer around torch's AdamW

The same model, weights and rows; the losses must agree. A ratio is the median of the ratios of
neighbouring steps: below 1.0 ours is faster. Beside it how far the resident set of a fresh process
rises over two steps.
"""

from __future__ import annotations

import resource
import statistics
import warnings
from collections.abc import Callable

import torch
from pairs.in_turn import Step, in_turn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from picotron_edu.data import Batch
from picotron_edu.model import Llama, LlamaConfig, token_loss_sum
from picotron_edu.optim import AdamW
from picotron_edu.ranks import all_reduce, launch, world
from picotron_edu.train import accumulate
from picotron_edu.zero import Zero

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
)
ROWS, SEQUENCE, REPEATS = 4, 256, 12


def my_rows() -> Batch:
    draw = torch.Generator().manual_seed(world().index)
    tokens = torch.randint(0, CONFIG.vocab_size, (ROWS, SEQUENCE + 1), generator=draw)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def ours(stage: int) -> Step:
    axis, batch = world(), my_rows()
    model = Zero(Llama(CONFIG), axis, stage)
    optimizer = AdamW(model.named_parameters(), weight_decay=0.1)

    def step() -> float:
        loss = accumulate(model, batch, ROWS, lambda x: all_reduce(x, axis))  # type: ignore[arg-type]
        optimizer.step(1e-3)
        optimizer.zero_grad()
        return loss.item()

    return step


def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    axis, batch = world(), my_rows()

    def step() -> float:
        counted = all_reduce(batch.counted, axis)
        loss_sum, _ = token_loss_sum(model(batch.inputs_BS), batch.labels_BS)
        (loss_sum / counted * axis.size).backward()  # torch takes the mean over the ranks
        optimizer.step()
        optimizer.zero_grad()
        return (all_reduce(loss_sum.detach(), axis) / counted).item()

    return step


def torch_zero3() -> Step:
    model = Llama(CONFIG)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    settings = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    return step_of(model, torch.optim.AdamW(model.parameters(), **settings))


def torch_zero1() -> Step:
    model = DistributedDataParallel(Llama(CONFIG))
    settings = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **settings)
    return step_of(model, optimizer)


def peak_megabytes(make: Callable[[], Step]) -> float:
    warnings.simplefilter("ignore")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = make()
    step(), step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3


def main() -> None:
    settings = {"world_size": 2, "quiet": True, "trace": False, "timeout": 300}
    pairs = {
        "ZeRO-3 / fully_shard": (lambda: ours(3), torch_zero3, 0.75),
        "ZeRO-1 / ZeroRedundancyOptimizer": (lambda: ours(1), torch_zero1, 1.0),
        "ZeRO-2 / ZeroRedundancyOptimizer": (lambda: ours(2), torch_zero1, 1.0),
    }
    print(f"2 ranks, gloo, 4 layers of 256, {ROWS}×{SEQUENCE} tokens each, float32")
    for name, (make_ours, make_theirs, goal) in pairs.items():
        mine, other = launch(in_turn, make_ours, make_theirs, REPEATS, 1, **settings)[0]
        peaks = [launch(peak_megabytes, make, **settings)[0] for make in (make_ours, make_theirs)]
        ratio = statistics.median(a / b for a, b in zip(mine, other))
        times = (
            f"{statistics.median(mine) * 1e3:4.0f} ms / {statistics.median(other) * 1e3:4.0f} ms"
        )
        print(f"  {name:34} {times} = {ratio:.2f}   goal {goal}", end="")
        print(f"   peak memory + {peaks[0]:.0f} MB / + {peaks[1]:.0f} MB")


if __name__ == "__main__":
    main()
