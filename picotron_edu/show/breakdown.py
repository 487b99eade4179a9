"""All of a training step's memory by category, ready for `show.treemap` and the widget.

The bytes come from `picotron_edu.memory`, which is held against real models; here they are only
gathered under the names a reader looks for. Three ways to keep activations:

    none        the attention scores are kept, one number per pair of tokens and head: S² grows fast
    selective   the scores are computed again in the backward pass; FlashAttention does that by
                itself, and so does the model of this course: this is what it really keeps
    full        only the input of each layer is kept; what the layer at work makes again is added
"""

from collections.abc import Mapping
from typing import Literal

import torch

from picotron_edu import memory
from picotron_edu.presets import LlamaConfig

# A word in the name of a tensor kept by `memory.activations` tells its group; the first counts.
GROUPS = (
    ("norm", "norms"),
    ("attention weights", "attention scores"),
    ("attention", "attention"),
    ("query", "attention"),
    ("key", "attention"),
    ("gate", "feed-forward"),
    ("probabilities", "vocabulary loss"),
    ("block input", "inputs of the layers"),
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
    sizes = config, batch, sequence, dtype, gpu
    if recompute == "full":
        kept = memory.activations(*sizes, "full") + memory.made_again(*sizes, "full")
    else:
        kept = memory.activations(*sizes, scores=recompute == "none")
    found: dict[str, float] = {}
    for each in kept:
        group = next(group for word, group in GROUPS if word in each.name)
        found[group] = found.get(group, 0) + each.total
    return found
