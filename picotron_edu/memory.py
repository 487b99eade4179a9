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

`activations` has them line by line, and `made_again` what backward makes again, one block at a
time, if the blocks are recomputed (chapter 02). Korthikanti et al. 2022 (arXiv 2205.05198, eq. 2)
give S·B·D·(34 + 5·a·S/D) bytes a layer *for GPT with dropout, GELU of 4·D, as many key as query
heads and unfused attention in 16 bits*: `gpt_block` has that sum. Fused attention removes the term
in S², and without dropout, with SwiGLU and with grouped queries the 34 becomes another number.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

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


@dataclass(frozen=True)
class Row:
    """A kind of tensor that is kept: how often in each block, how often outside of them."""

    name: str
    shape: str
    bytes: int
    in_block: int
    around: int = 0
    inside_attention: bool = False  # what "selective" recomputation drops


def rows(
    config: LlamaConfig, batch: int, sequence: int, dtype: torch.dtype, gpu: bool, scores: bool
) -> list[Row]:
    S, B, D = sequence, batch, config.hidden_size
    F, V, d = config.intermediate_size, config.vocab_size, config.size_of_head
    H, K = config.num_attention_heads, config.num_key_value_heads
    w = dtype.itemsize  # bytes of a number the model computes with
    x = torch.promote_types(dtype, torch.float32).itemsize  # of one it is exact with
    BS = B * S
    as_read = gpu or H == 1  # the output lies as o_proj reads it, and is the tensor that it keeps
    fused = [
        Row("attention output", "BHSd", w * BS * H * d, 1, inside_attention=not as_read),
        Row("attention log-sum-exp", "BHS", x * BS * H, 1, inside_attention=True),
    ]
    table = [
        Row("attention weights of all pairs", "BHSS", w * BS * H * S, 1, inside_attention=True)
    ]
    only_on_cpu = [Row("normalised input", "BSD", x * BS * D, 2, 1)]
    joined = [Row("attention output, heads joined", "BSHd", w * BS * H * d, 1)]
    return [
        Row("token numbers", "BS", 8 * BS, 0, 1),
        Row("cosine and sine of the positions", "2 x Sd/2", 4 * S * d, 0, 1),
        Row("norm input", "BSD", (w if gpu else x) * BS * D, 2, 1),
        Row("norm scale", "BS", x * BS, 2, 1),
        Row("norm output", "BSD", w * BS * D, 2, 1),
        Row("query", "BHSd", w * BS * H * d, 1),
        Row("key and value", "2 x BKSd", 2 * w * BS * K * d, 1),
        *(table if scores else fused),
        Row("gate, silu(gate), up, their product", "4 x BSF", 4 * w * BS * F, 1),
        Row("log-probabilities", "BSV", x * BS * V, 0, 1),
        Row("labels", "BS", 8 * BS, 0, 1),
        Row("weight of the labels", "1", x, 0, 1),
        *([] if gpu else only_on_cpu),
        *(joined if scores or not as_read else []),
    ]


def activations(
    config: LlamaConfig,
    batch: int,
    sequence: int,
    dtype: torch.dtype = torch.float32,
    gpu: bool = False,
    recompute: Literal["none", "selective", "full"] = "none",
    scores: bool = False,
) -> list[Kept]:
    """Every tensor of `Llama` and its loss that waits for backward when forward has ended.

    `gpu`: there one kernel does the whole RMSNorm and keeps only its input, and the attention
    output lies as o_proj reads it. The CPU's norm is composed of several operations in float32,
    and its attention output is copied once for o_proj (of one head it need not be). `scores`:
    attention is not fused but `recompute.scores_attention`, and keeps its table.
    """
    kept = []
    for row in rows(config, batch, sequence, dtype, gpu, scores):
        dropped = recompute == "full" or (recompute == "selective" and row.inside_attention)
        in_blocks = 0 if dropped else row.in_block * config.num_hidden_layers
        kept.append(Kept(row.name, row.shape, row.bytes, in_blocks + row.around))
    if recompute == "full":
        each = dtype.itemsize * batch * sequence * config.hidden_size
        kept.append(Kept("block input", "BSD", each, config.num_hidden_layers))
    return [each for each in kept if each.count]


def made_again(
    config: LlamaConfig,
    batch: int,
    sequence: int,
    dtype: torch.dtype = torch.float32,
    gpu: bool = False,
    recompute: Literal["none", "selective", "full"] = "none",
    scores: bool = False,
) -> list[Kept]:
    """What comes on top while backward is in a block: one block's worth, however many there are."""
    made = []
    for row in rows(config, batch, sequence, dtype, gpu, scores):
        again = row.inside_attention or row.name == "attention output"  # also if o_proj keeps one
        count = row.in_block if recompute == "full" or again else 0
        if row.name == "norm input" and (gpu or dtype.itemsize >= 4):
            count -= 1  # the first norm reads the block's input itself, which has been waiting
        made.append(Kept(row.name, row.shape, row.bytes, count))
    K, d = config.num_key_value_heads, config.size_of_head
    if scores and recompute == "selective" and batch > 1 and K > 1:  # a product wants whole heads
        value = dtype.itemsize * batch * sequence * K * d
        made.append(Kept("value, a copy with each head in one piece", "BKSd", value, 1))
    return [each for each in made if each.count > 0 and recompute != "none"]


def activation_bytes(
    config: LlamaConfig,
    batch: int,
    sequence: int,
    dtype: torch.dtype = torch.float32,
    gpu: bool = False,
    recompute: Literal["none", "selective", "full"] = "none",
    scores: bool = False,
) -> int:
    kept = activations(config, batch, sequence, dtype, gpu, recompute, scores)
    return sum(each.total for each in kept)


def gpt_block(hidden: int, heads: int, batch: int, sequence: int) -> list[Kept]:
    """A layer of classical GPT in 16 bits (dropout, GELU, no fused attention), line by line.

    34·S·B·D + 5·a·S²·B bytes, as Korthikanti et al. 2022 add them up in their section 4.1.
    """
    BSD, BaSS = batch * sequence * hidden, batch * heads * sequence**2
    return [
        Kept("norm input", "BSD", 2 * BSD, 2),
        Kept("norm output", "BSD", 2 * BSD, 2),
        Kept("query", "BHSd", 2 * BSD, 1),
        Kept("key and value", "2 x BHSd", 2 * 2 * BSD, 1),
        Kept("attention weights of all pairs", "BHSS", 2 * BaSS, 1),
        Kept("their dropout mask, a byte each", "BHSS", BaSS, 1),
        Kept("attention weights after dropout", "BHSS", 2 * BaSS, 1),
        Kept("attention output, heads joined", "BSHd", 2 * BSD, 1),
        Kept("dropout mask, a byte each", "BSD", BSD, 2),
        Kept("up, and gelu(up)", "2 x BSF", 2 * 2 * 4 * BSD, 1),
    ]


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
