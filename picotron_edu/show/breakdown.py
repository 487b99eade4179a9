"""All of a training step's memory by category, ready for `show.treemap` and the widget.

The bytes come from `picotron_edu.memory`, which is held against real models; here they are only
gathered under the names a reader looks for. Three ways to keep activations:

    none        the attention scores are kept, one number per pair of tokens and head: S² grows fast
    selective   the scores are computed again in the backward pass; FlashAttention does that by
                itself, and so does the model of this course: this is what it really keeps
    full        only the input of each layer is kept, and the layer at work is computed again
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch

from picotron_edu import memory
from picotron_edu.presets import LlamaConfig

# A word in the name of a tensor kept by `memory.activations` tells its group; the first counts.
GROUPS = (
    ("norm", "norms"),
    ("attention", "attention"),
    ("query", "attention"),
    ("key", "attention"),
    ("gate", "feed-forward"),
    ("probabilities", "vocabulary loss"),
    ("", "tokens and positions"),
)


def memory_breakdown(
    config: LlamaConfig,
    batch: int,
    sequence: int,
    *,
    precision: Literal["bf16", "fp32"] = "bf16",
    fp32_gradients: bool = True,
    recompute: Literal["none", "selective", "full"] = "selective",
    gpu: bool = True,
) -> dict[str, float | Mapping[str, float]]:
    """Bytes of parameters, optimizer states, gradients and activations on one rank.

    With gpu=False, what a CPU keeps, which has no fused kernel for the norms.

    show.treemap(show.memory_breakdown(LlamaConfig.from_preset("tiny"), batch=8, sequence=256))
    """
    if precision not in ("bf16", "fp32"):
        raise ValueError(f"precision is bf16 or fp32, got {precision!r}")
    if recompute not in ("none", "selective", "full"):
        raise ValueError(f"recompute is none, selective or full, got {recompute!r}")
    gradients = "float32 gradients" if fp32_gradients else "bfloat16 gradients"
    state = memory.STATES["float32" if precision == "fp32" else f"bfloat16, {gradients}"]
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    count = config.num_parameters()
    optimizer = {"master weights": state.master * count, "Adam m and v": state.moments * count}
    return {
        "parameters": state.weights * count,
        "optimizer states": {name: value for name, value in optimizer.items() if value},
        "gradients": state.gradients * count,
        "activations": _activations(config, batch, sequence, dtype, recompute, gpu),
    }


def _activations(
    config: LlamaConfig, batch: int, sequence: int, dtype: torch.dtype, recompute: str, gpu: bool
) -> dict[str, float]:
    layers = config.num_hidden_layers
    at_work = replace(config, num_hidden_layers=1) if recompute == "full" else config
    found: dict[str, float] = {}
    for kept in memory.activations(at_work, batch, sequence, dtype, gpu):
        group = next(group for word, group in GROUPS if word in kept.name)
        found[group] = found.get(group, 0) + kept.total
    if recompute == "none":
        scores = batch * config.num_attention_heads * sequence**2
        found["attention scores"] = dtype.itemsize * scores * layers
    if recompute == "full" and layers > 1:
        layer_input = dtype.itemsize * batch * sequence * config.hidden_size
        found["inputs of other layers"] = (layers - 1) * layer_input
    return found
