"""Sequence parallelism: ours beside torch's, on the same two ranks, in turn.

torch's is `parallelize_module` with `SequenceParallel` norms and sequence-sharded layouts, in the
places its documentation does it: gathered in front of attention, feed-forward and head, scattered
behind them and behind the embedding. The same Llama, weights and tokens. Forward, backward and the
sum of the norms' gradients; the losses must agree. A ratio is the median of the ratios of
neighbouring steps: below 1.0 ours is faster. Beside it: how far the resident set of a fresh process
rises over two steps, and chapter 05's tensor parallelism in the same place.

Both wait for the same messages, which brings their ratio nearer to 1: over gloo the reduce-scatter
of 1 MB takes as long as a whole all-reduce (2.4 and 2.2 ms on two cores), and the all-gather 1.4 ms
on top. On NCCL the two halves together cost one all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from pairs.in_turn import Step, print_row
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from picotron_edu import sequence_parallel, tensor_parallel
from picotron_edu.model import Llama, LlamaConfig, token_loss_sum
from picotron_edu.partial_grads import sum_partial_grads
from picotron_edu.ranks import all_reduce, world

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
)
ROWS, SEQUENCE, REPEATS = 4, 256, 24


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """The same on all ranks, which share one model."""
    draw = torch.Generator().manual_seed(0)
    some = torch.randint(0, CONFIG.vocab_size, (ROWS, SEQUENCE + 1), generator=draw)
    return some[:, :-1].contiguous(), some[:, 1:].contiguous()


def ours(technique: ModuleType = sequence_parallel, **how: Any) -> Step:
    model, (inputs_BS, labels_BS) = Llama(CONFIG), tokens()
    technique.apply(model, world(), **how)

    def step() -> float:
        model.zero_grad()
        loss_sum, counted = model(inputs_BS, None, labels_BS)
        (loss_sum / counted).backward()
        sum_partial_grads(model.parameters(), all_reduce)
        return (loss_sum / counted).item()

    return step


def plan() -> dict[str, Any]:
    cut, whole = Shard(1), Replicate()
    each_layer = {
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_layouts=(cut, None, None), desired_input_layouts=(whole, None, None)
        ),
        "self_attn.o_proj": RowwiseParallel(output_layouts=cut),
        "mlp": PrepareModuleInput(input_layouts=(cut,), desired_input_layouts=(whole,)),
        "mlp.down_proj": RowwiseParallel(output_layouts=cut),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        each_layer[name] = ColwiseParallel()
    for name in ("mlp.gate_proj", "mlp.up_proj"):
        each_layer[name] = ColwiseParallel()
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=cut),
        **{f"model.layers.*.{name}": style for name, style in each_layer.items()},
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=cut, output_layouts=whole),
    }


def torchs() -> Step:
    model, (inputs_BS, labels_BS) = Llama(CONFIG), tokens()
    parallelize_module(model, init_device_mesh("cpu", (world().size,)), plan())

    def step() -> float:
        model.zero_grad()
        loss_sum, counted = token_loss_sum(model(inputs_BS), labels_BS)
        (loss_sum / counted).backward()
        return (loss_sum / counted).item()

    return step


def main() -> None:
    kept = partial(ours, regather=False)
    tensor = partial(ours, tensor_parallel)
    pairs: dict[str, tuple[Callable[[], Step], Callable[[], Step], str]] = {
        "sequence parallel / torch's": (ours, torchs, "goal 0.8"),
        "with gathered x kept / torch's": (kept, torchs, "goal 0.8"),
        "sequence parallel / tensor parallel": (ours, tensor, "no goal"),
        "with gathered x kept / tensor parallel": (kept, tensor, "no goal"),
    }
    print(f"2 ranks, gloo, 4 layers of 256, {ROWS}×{SEQUENCE} tokens, float32, forward + backward")
    for name, (make_ours, make_theirs, goal) in pairs.items():
        print_row(name, make_ours, make_theirs, goal, REPEATS, 2)


if __name__ == "__main__":
    main()
