"""ZeRO: ours beside torch's own, on the same two ranks, step by step in turn.

    stage 3   torch.distributed.fsdp.fully_shard on each block and the root, torch's AdamW
    stage 1   DistributedDataParallel with ZeroRedundancyOptimizer around torch's AdamW

The same model, weights and rows; the losses must agree. A ratio is the median of the ratios of
neighbouring steps: below 1.0 ours is faster. Beside it how far the resident set of a fresh process
rises over two steps.
"""

from __future__ import annotations

import torch
from pairs.in_turn import Step, print_row
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from picotron_edu.data import Batch
from picotron_edu.model import Llama, LlamaConfig, token_loss_sum
from picotron_edu.optim import AdamW
from picotron_edu.ranks import all_reduce, world
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


def main() -> None:
    pairs = {
        "ZeRO-3 / fully_shard": (lambda: ours(3), torch_zero3, 0.75),
        "ZeRO-1 / ZeroRedundancyOptimizer": (lambda: ours(1), torch_zero1, 1.0),
        "ZeRO-2 / ZeroRedundancyOptimizer": (lambda: ours(2), torch_zero1, 1.0),
    }
    print(f"2 ranks, gloo, 4 layers of 256, {ROWS}×{SEQUENCE} tokens each, float32")
    for name, (make_ours, make_theirs, goal) in pairs.items():
        print_row(name, make_ours, make_theirs, f"goal {goal}", REPEATS, 1)


if __name__ == "__main__":
    main()
