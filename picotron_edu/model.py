"""A Llama to train: one rank, nothing hidden. No rank, group or environment is known in this file.

    tokens_BS ─ embed ─ x_BSD ─┬───────────────────(+)─┬──────────────────────(+)─ … ─ norm ─ head
                               └─ norm ─ attention ─┘  └─ norm ─ feed-forward ─┘         logits_BSV
                               one of num_hidden_layers blocks on the residual stream x_BSD

The parts are those of Touvron et al. 2023 (arXiv 2302.13971, 2307.09288) and Llama 3 (arXiv
2407.21783): RMSNorm before each part, rotary positions (RoPE, arXiv 2104.09864) on queries and
keys, grouped-query attention (arXiv 2305.13245: several query heads share a key/value head), and
the gated feed-forward SwiGLU (arXiv 2002.05202). Configuration fields and parameter names are
Hugging Face's, so published weights fit. Each weight starts as a function of (seed, its name)
alone: however a model is later cut over ranks, any piece is the slice of the weight that one rank
would have had.

Tensor names carry their shape. This is the legend for the whole course:

    B batch (sequences)   S sequence (positions)   D hidden size        F feed-forward size
    H query heads         K key/value heads        d size of one head   V vocabulary
    E experts             T tokens (B·S)

*dim* is always a dimension of a tensor; *axis* is an axis of the mesh of ranks.
"""

import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from picotron_edu.presets import PRESETS, LlamaConfig, RopeScaling

__all__ = ["PRESETS", "Llama", "LlamaConfig", "RopeScaling", "init_weight", "token_loss_sum"]


def init_weight(name: str, shape: tuple[int, ...], seed: int, std: float) -> Tensor:
    """The full weight to start from: a pure function of (seed, name). Norm weights start at 1."""
    if len(shape) == 1:
        return torch.ones(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randn(shape, generator=generator) * std


def rope(config: LlamaConfig, positions_S: Tensor) -> tuple[Tensor, Tensor]:
    """cos_Sd2, sin_Sd2 of position × frequency: pair i turns once in 2π·theta^(2i/d) positions."""
    pairs = torch.arange(0, config.size_of_head, 2, device=positions_S.device, dtype=torch.float32)
    frequency = config.rope_theta ** (-pairs / config.size_of_head)
    if config.rope_scaling is not None:
        frequency = stretch(frequency, config.rope_scaling)
    angles_Sd2 = positions_S.float()[:, None] * frequency[None, :]
    return angles_Sd2.cos(), angles_Sd2.sin()


def stretch(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    """For longer contexts (Llama 3.1): slow turns get slower, fast ones stay, a ramp between."""
    old_context = scaling.original_max_position_embeddings
    turns = old_context * frequency / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = ramp.clamp(0, 1)
    return keep * frequency + (1 - keep) * frequency / scaling.factor


def rotate(x_BHSd: Tensor, cos_Sd2: Tensor, sin_Sd2: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + d/2]) by its angle: in float32 at least, rounded once."""
    left, right = x_BHSd.chunk(2, dim=-1)
    turned = (left * cos_Sd2 - right * sin_Sd2, right * cos_Sd2 + left * sin_Sd2)
    return torch.cat(turned, dim=-1).to(x_BHSd.dtype)


def causal_attention(q_BHSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor) -> Tensor:
    """Each position looks at itself and those before it. Fused: the S×S scores stay on the chip."""
    grouped = q_BHSd.shape[1] != k_BKSd.shape[1]
    return F.scaled_dot_product_attention(
        q_BHSd, k_BKSd, v_BKSd, is_causal=True, enable_gqa=grouped
    )


def project(x_BSD: Tensor, *linears: nn.Module) -> list[Tensor]:
    """Several projections of one tensor."""
    return [linear(x_BSD) for linear in linears]


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """No random numbers here: `Llama` fills every weight from (seed, name)."""


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """The same."""


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight, over the hidden dimension, computed in float32."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.eps = eps

    def forward(self, x_BSD: Tensor) -> Tensor:
        return F.rms_norm(x_BSD, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Heads are counted from the weights: the same code serves a rank that has only some."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype | None) -> None:
        super().__init__()
        D, d = config.hidden_size, config.size_of_head
        H, K = config.num_attention_heads, config.num_key_value_heads
        self.size_of_head = d
        self.q_proj = Linear(D, H * d, bias=False, dtype=dtype)
        self.k_proj = Linear(D, K * d, bias=False, dtype=dtype)
        self.v_proj = Linear(D, K * d, bias=False, dtype=dtype)
        self.o_proj = Linear(H * d, D, bias=False, dtype=dtype)
        self.project: Callable[..., list[Tensor]] = project
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] = causal_attention

    def forward(self, x_BSD: Tensor, cos_Sd2: Tensor, sin_Sd2: Tensor) -> Tensor:
        q_BHSd, k_BKSd, v_BKSd = (
            y_BSd.unflatten(-1, (-1, self.size_of_head)).transpose(1, 2)
            for y_BSd in self.project(x_BSD, self.q_proj, self.k_proj, self.v_proj)
        )
        q_BHSd = rotate(q_BHSd, cos_Sd2, sin_Sd2)
        k_BKSd = rotate(k_BKSd, cos_Sd2, sin_Sd2)
        out_BHSd = self.attend(q_BHSd, k_BKSd, v_BKSd)
        return self.o_proj(out_BHSd.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: silu(x·gate) opens or shuts each of the F channels of x·up; down leads back to D."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.gate_proj = Linear(
            config.hidden_size, config.intermediate_size, bias=False, dtype=dtype
        )
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False, dtype=dtype)
        self.down_proj = Linear(
            config.intermediate_size, config.hidden_size, bias=False, dtype=dtype
        )

        self.project: Callable[..., list[Tensor]] = project

    def forward(self, x_BSD: Tensor) -> Tensor:
        gate_BSF, up_BSF = self.project(x_BSD, self.gate_proj, self.up_proj)
        return self.down_proj(F.silu(gate_BSF) * up_BSF)


class Block(nn.Module):
    def __init__(self, config: LlamaConfig, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = Attention(config, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = FeedForward(config, dtype)

    def forward(self, x_BSD: Tensor, cos_Sd2: Tensor, sin_Sd2: Tensor) -> Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), cos_Sd2, sin_Sd2)
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))


class Decoder(nn.Module):
    """Everything below the output head: tokens in, hidden states out."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(Block(config, dtype) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

    def forward(self, tokens_BS: Tensor, positions_S: Tensor) -> Tensor:
        cos_Sd2, sin_Sd2 = rope(self.config, positions_S)
        x_BSD = self.embed_tokens(tokens_BS)
        for block in self.layers:
            x_BSD = block(x_BSD, cos_Sd2, sin_Sd2)
        return self.norm(x_BSD)


class Llama(nn.Module):
    """`Llama(LlamaConfig.from_preset("tiny"))`; device="meta" gives shapes without memory."""

    def __init__(
        self,
        config: LlamaConfig,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        device = torch.device(device) if device is not None else torch.get_default_device()
        with device:
            self.model = Decoder(config, dtype)
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
        self.head_loss: Callable[..., tuple[Tensor, Tensor]] = head_loss
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        if device.type != "meta":
            with torch.no_grad():
                for name, param in self.named_parameters():
                    start = init_weight(name, tuple(param.shape), seed, config.initializer_range)
                    param.copy_(start)

    def forward(
        self,
        tokens_BS: Tensor,
        positions_S: Tensor | None = None,
        labels_BS: Tensor | None = None,
    ) -> Any:
        """-> logits_BSV; with labels, what `token_loss_sum` returns.

        `positions_S` is where in the text the tokens stand (default 0, 1, …).
        """
        if positions_S is None:
            positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        x_BSD = self.model(tokens_BS, positions_S)
        if labels_BS is None:
            return self.lm_head(x_BSD)
        return self.head_loss(self.lm_head, x_BSD, labels_BS)


def head_loss(head: nn.Module, x_BSD: Tensor, labels_BS: Tensor) -> tuple[Tensor, Tensor]:
    return token_loss_sum(head(x_BSD), labels_BS)


def token_loss_sum(logits_BSV: Tensor, labels_BS: Tensor) -> tuple[Tensor, Tensor]:
    """The *sum* of the token losses, in float32 at least, and the number of counted tokens.

    A label of −100 is not counted. A sum and not a mean: sums of unequal pieces can be added, their
    means cannot be averaged.
    """
    exact = torch.promote_types(logits_BSV.dtype, torch.float32)
    loss = F.cross_entropy(
        logits_BSV.flatten(0, 1).to(exact), labels_BS.flatten(), ignore_index=-100, reduction="sum"
    )
    return loss, (labels_BS != -100).sum()
