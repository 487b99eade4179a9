"""How much arithmetic a training step needs, and how much of the machine it used (MFU).

A matmul of (m × k)·(k × n) takes 2·m·k·n floating-point operations: k multiplications and k
additions for each result. So each weight costs a token 2 operations forward, and 4 backward (the
gradient of the input and that of the weight):

    weights     6 · N · tokens        N: every weight that a token is multiplied with. The output
                                      head counts, also when tied; the embedding, a look-up, does
                                      not, nor do the norms.
    attention   12 · L · H · d · S² · B    scores q·k and mix p·v: 2·2·S²·H·d forward, twice that
                                      backward. All query heads count: sharing keys (GQA) saves
                                      projections and memory, not scores. Causal: half of it.

MFU, model FLOPs utilization, is what the *model* needs per second over what the machine can do
(PaLM, arXiv 2204.02311, appendix B). HFU counts what the *hardware* did: recomputation raises it,
and leaves MFU as it is. Published numbers follow different conventions (full or causal attention,
recompute in or out): always print yours.
"""

import time
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from picotron_edu.memory_watch import EachOperation
from picotron_edu.presets import LlamaConfig

# Dense bf16 operations per second by name of the GPU, from NVIDIA's data sheets.
PEAK_BF16 = MappingProxyType(
    {"A100": 312e12, "H100": 989e12, "H200": 989e12, "H800": 989e12, "B200": 2250e12}
)
CONVENTION = "6 x matmul weights x tokens + causal attention; no recompute"


@dataclass(frozen=True)
class Flops:
    weights: float
    attention: float

    @property
    def total(self) -> float:
        return self.weights + self.attention

    def times(self, factor: float) -> "Flops":
        return Flops(self.weights * factor, self.attention * factor)


def matmul_parameters(config: LlamaConfig) -> int:
    """N: the weights a token is multiplied with."""
    D, F, L = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    Hd = config.num_attention_heads * config.size_of_head
    Kd = config.num_key_value_heads * config.size_of_head
    per_layer = 2 * D * Hd + 2 * D * Kd + 3 * D * F  # q, o; k, v; gate, up, down
    return L * per_layer + D * config.vocab_size


def forward_flops(config: LlamaConfig, batch: int, sequence: int, causal: bool = True) -> Flops:
    Hd = config.num_attention_heads * config.size_of_head
    full = 4.0 * config.num_hidden_layers * Hd * sequence**2 * batch
    weights = 2.0 * matmul_parameters(config) * batch * sequence
    return Flops(weights, full / 2 if causal else full)


def model_flops(config: LlamaConfig, batch: int, sequence: int, causal: bool = True) -> Flops:
    """Forward and backward of `batch` sequences: three times the forward."""
    return forward_flops(config, batch, sequence, causal).times(3)


def hardware_flops(
    config: LlamaConfig,
    batch: int,
    sequence: int,
    recompute: Literal["none", "selective", "full"] = "none",
    causal: bool = True,
) -> Flops:
    """With recomputation, as papers count: attention (selective) or the forward pass once more."""
    once = forward_flops(config, batch, sequence, causal)
    again = {"none": (3, 3), "selective": (3, 4), "full": (4, 4)}[recompute]
    return Flops(once.weights * again[0], once.attention * again[1])


def recomputed_flops(
    config: LlamaConfig,
    batch: int,
    sequence: int,
    recompute: Literal["none", "selective", "full"],
    causal: bool = True,
) -> Flops:
    """What `recompute.py` really runs again, which is less: the head is in no block, and a block is
    stopped at its last matmul (down), whose inputs are all that its gradient needs."""
    if recompute == "none":
        return Flops(0.0, 0.0)
    once = forward_flops(config, batch, sequence, causal)
    down = config.num_hidden_layers * config.hidden_size * config.intermediate_size
    stopped = 2.0 * (down + config.hidden_size * config.vocab_size) * batch * sequence
    return Flops(once.weights - stopped if recompute == "full" else 0.0, once.attention)


class OperationCounter(EachOperation):
    """`with OperationCounter() as counter: …` and then `counter.total`: what was really computed.

    By PyTorch's formulas (`flop_counter`), and ours for fused attention on the CPU, which has none
    there. Masked pairs count, as they do in PyTorch's formulas for the kernels of a GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        packet, name = func.overloadpacket, func.overloadpacket.__name__
        if packet in flop_registry:
            self.total += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        elif name == "_scaled_dot_product_flash_attention_for_cpu":
            self.total += fused_attention_flops(args[0], args[1], products=2)
        elif name == "_scaled_dot_product_flash_attention_for_cpu_backward":
            self.total += fused_attention_flops(args[1], args[2], products=5)  # scores again
        return result


def fused_attention_flops(q_BHSd: Tensor, k_BKTd: Tensor, products: int) -> int:
    return products * 2 * q_BHSd.numel() * k_BKTd.shape[2]


@dataclass(frozen=True)
class Peak:
    """What the machine can do: operations per second, and where the number comes from."""

    flops: float
    source: str

    def utilization(self, flops: float, seconds: float) -> float:
        """0.40 means 40 %."""
        return flops / seconds / self.flops


def peak_of(device: torch.device, dtype: torch.dtype) -> Peak:
    """The data sheet's number for a known GPU in bfloat16; else a plain matmul, measured."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for key, flops in PEAK_BF16.items():
            if key in name:
                return Peak(flops, f"data sheet of {key}, dense bfloat16")
    return measured_peak(device, dtype)


def measured_peak(device: torch.device, dtype: torch.dtype) -> Peak:
    size = 512 if device.type == "cpu" else 4096  # a GPU is not busy with less
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    best, end = float("inf"), time.perf_counter() + 0.2
    while best == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        (a @ b)[0, 0].item()  # item() waits for the device
        best = min(best, time.perf_counter() - start)  # the run that was least disturbed
    name = str(dtype).removeprefix("torch.")
    return Peak(2 * size**3 / best, f"measured here: {name} matmul of {size} x {size}")
