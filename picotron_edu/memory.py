"""Where the memory of a training step goes: formulas that a real model is held against, byte for
byte.

Four occupants. The first three depend on the number of parameters N alone, and are there before
the first token:

                                    weights  gradients  master  Adam m, v    bytes per parameter
    float32                            4         4         –        8             16
    bfloat16, bfloat16 gradients       2         2         4        8             16
    bfloat16, float32 gradients        2         4         4        8             18   (as optim.py)
    … and bfloat16 ones kept too       2       2 + 4       4        8             20

Mixed precision does not save state memory: it makes matmuls faster and halves the fourth
occupant, the *activations*: what the forward pass must keep for the backward pass. They grow with
the tokens in a micro-batch, and for this model they are

    each layer:  norm inputs, q, k, v, attention output, four tensors of the feed-forward size
    once:        the loss's float32 log-probabilities, 4·S·B·V bytes: often the largest of all

Korthikanti et al. 2022 (arXiv 2205.05198, eq. 2) give S·B·D·(34 + 5·a·S/D) bytes a layer *for GPT
with dropout, GELU of 4·D, as many key as query heads and unfused attention in 16 bits*. Fused
attention removes the term in S², and without dropout, with SwiGLU and with grouped queries the 34
becomes another number: `activations` below has it line by line.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from picotron_edu.presets import LlamaConfig


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter."""

    weights: int
    gradients: int
    master: int
    moments: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.master + self.moments


STATES = MappingProxyType(
    {
        "float32": StateBytes(4, 4, 0, 8),
        "bfloat16, bfloat16 gradients": StateBytes(2, 2, 4, 8),
        "bfloat16, float32 gradients": StateBytes(2, 4, 4, 8),
        "bfloat16, both gradients": StateBytes(2, 2 + 4, 4, 8),
    }
)


@dataclass(frozen=True)
class Kept:
    """One tensor that the forward pass keeps: `count` times `bytes`."""

    name: str
    shape: str
    bytes: int
    count: int

    @property
    def total(self) -> int:
        return self.bytes * self.count


def activations(
    config: LlamaConfig,
    batch: int,
    sequence: int,
    dtype: torch.dtype = torch.float32,
    gpu: bool = False,
) -> list[Kept]:
    """Every tensor kept for the backward pass of `Llama` and its loss.

    `gpu`: there one kernel does the whole RMSNorm and keeps only its input, and the attention
    output lies as o_proj reads it. The CPU's norm is composed of several operations in float32,
    and its attention output is copied once for o_proj.
    """
    S, B, D, L = sequence, batch, config.hidden_size, config.num_hidden_layers
    F, V, d = config.intermediate_size, config.vocab_size, config.size_of_head
    H, K = config.num_attention_heads, config.num_key_value_heads
    w = dtype.itemsize  # bytes of a number the model computes with
    x = torch.promote_types(dtype, torch.float32).itemsize  # of one it is exact with
    BS = B * S
    norms = 2 * L + 1
    norm_input = w if gpu else x
    only_on_cpu = [
        Kept("normalised input", "BSD", x * BS * D, norms),
        Kept("attention output, heads joined", "BSHd", w * BS * H * d, L),
    ]
    return [
        Kept("token numbers", "BS", 8 * BS, 1),
        Kept("cosine and sine of the positions", "2 x Sd/2", 4 * S * d, 1),
        Kept("norm input", "BSD", norm_input * BS * D, norms),
        Kept("norm scale", "BS", x * BS, norms),
        Kept("norm output", "BSD", w * BS * D, norms),
        Kept("query", "BHSd", w * BS * H * d, L),
        Kept("key and value", "2 x BKSd", 2 * w * BS * K * d, L),
        Kept("attention output", "BHSd", w * BS * H * d, L),
        Kept("attention log-sum-exp", "BHS", x * BS * H, L),
        Kept("gate, silu(gate), up, their product", "4 x BSF", 4 * w * BS * F, L),
        Kept("log-probabilities", "BSV", x * BS * V, 1),
        Kept("labels", "BS", 8 * BS, 1),
        Kept("weight of the labels", "1", x, 1),
        *([] if gpu else only_on_cpu),
    ]


def activation_bytes(
    config: LlamaConfig,
    batch: int,
    sequence: int,
    dtype: torch.dtype = torch.float32,
    gpu: bool = False,
) -> int:
    return sum(kept.total for kept in activations(config, batch, sequence, dtype, gpu))


def korthikanti_bytes(
    hidden: int, heads: int, layers: int, batch: int, sequence: int, selective: bool = False
) -> float:
    """GPT's activations in 16 bits, without logits; `selective`: the S² terms are recomputed."""
    scores = 0 if selective else 5 * heads * sequence / hidden
    return sequence * batch * hidden * (34 + scores) * layers


def measured_activation_bytes(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Run `forward` and count what autograd keeps: each piece of memory once, weights left out."""
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(kept.values())
