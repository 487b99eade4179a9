"""Tensor parallelism: ours beside torch's `parallelize_module`, on the same two ranks, in turn.

The same Llama, weights and tokens, cut in the same places as torch's documentation does: q, k, v,
gate and up by columns, o and down by rows, the embedding by rows, the head by columns with its
logits gathered. Forward and backward; the losses must agree. A ratio is the median of the ratios of
neighbouring steps: below 1.0 ours is faster.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from pairs.in_turn import in_turn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from picotron_edu import tensor_parallel
from picotron_edu.model import Llama, LlamaConfig, token_loss_sum
from picotron_edu.ranks import launch, world

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
)
ROWS, SEQUENCE, REPEATS = 4, 256, 24
Step = Callable[[], float]


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """The same on all ranks, which share one model."""
    draw = torch.Generator().manual_seed(0)
    some = torch.randint(0, CONFIG.vocab_size, (ROWS, SEQUENCE + 1), generator=draw)
    return some[:, :-1].contiguous(), some[:, 1:].contiguous()


def ours() -> Step:
    model, (inputs_BS, labels_BS) = Llama(CONFIG), tokens()
    tensor_parallel.apply(model, world())

    def step() -> float:
        model.zero_grad()
        loss_sum, counted = model(inputs_BS, None, labels_BS)
        (loss_sum / counted).backward()
        return (loss_sum / counted).item()

    return step


def torchs() -> Step:
    model, (inputs_BS, labels_BS) = Llama(CONFIG), tokens()
    mesh = init_device_mesh("cpu", (world().size,))
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        plan[f"model.layers.*.self_attn.{name}"] = rows if name == "o_proj" else columns
    for name in ("gate_proj", "up_proj", "down_proj"):
        plan[f"model.layers.*.mlp.{name}"] = rows if name == "down_proj" else columns
    parallelize_module(model, mesh, plan)

    def step() -> float:
        model.zero_grad()
        loss_sum, counted = token_loss_sum(model(inputs_BS), labels_BS)
        (loss_sum / counted).backward()
        return (loss_sum / counted).item()

    return step


def main() -> None:
    print(f"2 ranks, gloo, 4 layers of 256, {ROWS}×{SEQUENCE} tokens, float32, forward + backward")
    mine, other = launch(
        in_turn, ours, torchs, REPEATS, 2, world_size=2, quiet=True, trace=False, timeout=300
    )[0]
    ratio = statistics.median(a / b for a, b in zip(mine, other))
    times = f"{statistics.median(mine) * 1e3:4.0f} ms / {statistics.median(other) * 1e3:4.0f} ms"
    print(f"  {'tensor parallel / parallelize_module':38} {times} = {ratio:.2f}   goal 0.8")


if __name__ == "__main__":
    main()
