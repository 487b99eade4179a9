"""Shapes of models: a configuration with Hugging Face's field names, and published shapes.

A configuration knows the shape of every weight, so it can count them without building anything:

    LlamaConfig.from_preset("llama-3-8b").num_parameters()      # 8,030,261,248

Sources: the `config.json` files published with Llama 2, 3, 3.1 and 3.2; for the Playbook's
shapes, the runs behind Hugging Face's Ultra-Scale Playbook (nanotron,
scripts/scaling_benchmarks.py; vocabulary 131,072, no grouped queries).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from types import MappingProxyType


def check_count(name: str, value: object, least: int = 1) -> None:
    """Refuse what is not a whole number from `least` on: 0, 2.5, "5", True."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    if int(value) < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_number(name: str, value: object, zero: bool = False) -> None:
    """Refuse what is not a finite number above 0 (`zero`: or 0 itself)."""
    usable = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not usable or float(value) < 0 or (value == 0 and not zero):  # type: ignore[arg-type]
        allowed = "0 or more, and finite" if zero else "above 0 and finite"
        raise ValueError(f"{name} must be a number {allowed}, got {value!r}")


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        allowed = ", ".join(map(repr, choices))
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of rotary positions ("rope_type": "llama3")."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor ({self.low_freq_factor}) must be below "
                f"high_freq_factor ({self.high_freq_factor})"
            )


@dataclass(frozen=True)
class LlamaConfig:
    vocab_size: int = 256
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
        )
        for name in (*sizes, "num_key_value_heads", "max_position_embeddings"):
            check_count(name, getattr(self, name))
        if self.head_dim is not None:
            check_count("head_dim", self.head_dim)
        check_number("rope_theta", self.rope_theta)
        for name in ("rms_norm_eps", "initializer_range"):
            check_number(name, getattr(self, name), zero=True)
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads "
                f"({self.num_attention_heads}), or head_dim must be given"
            )
        if self.size_of_head % 2:
            raise ValueError(
                f"the size of a head must be even for rotary positions, got {self.size_of_head}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )

    @property
    def size_of_head(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @classmethod
    def from_preset(cls, name: str, **changes: object) -> "LlamaConfig":
        """A published shape, with changes: `from_preset("tiny", num_hidden_layers=2)`."""
        if name not in PRESETS:
            raise ValueError(f"preset {name!r} is unknown; there are {', '.join(PRESETS)}")
        return replace(PRESETS[name], **changes)  # type: ignore[arg-type]

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> full shape of each weight, in the order of `Llama(config).named_parameters()`."""
        D, F, V, d = self.hidden_size, self.intermediate_size, self.vocab_size, self.size_of_head
        H, K = self.num_attention_heads, self.num_key_value_heads
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D)}
        for layer in range(self.num_hidden_layers):
            block = f"model.layers.{layer}."
            shapes |= {
                block + "input_layernorm.weight": (D,),
                block + "self_attn.q_proj.weight": (H * d, D),
                block + "self_attn.k_proj.weight": (K * d, D),
                block + "self_attn.v_proj.weight": (K * d, D),
                block + "self_attn.o_proj.weight": (D, H * d),
                block + "post_attention_layernorm.weight": (D,),
                block + "mlp.gate_proj.weight": (F, D),
                block + "mlp.up_proj.weight": (F, D),
                block + "mlp.down_proj.weight": (D, F),
            }
        shapes["model.norm.weight"] = (D,)
        if not self.tie_word_embeddings:  # tied: the head *is* the embedding, counted once
            shapes["lm_head.weight"] = (V, D)
        return shapes

    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.weight_shapes().values())


LLAMA_3 = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    rope_theta=500_000.0,
    max_position_embeddings=8192,
)
PLAYBOOK = LlamaConfig(
    vocab_size=131_072,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    max_position_embeddings=4096,
)


def shape(
    base: LlamaConfig,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    tied: bool = False,
) -> LlamaConfig:
    return replace(
        base,
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=ffn,
        tie_word_embeddings=tied,
    )


PRESETS: Mapping[str, LlamaConfig] = MappingProxyType(
    {
        # The course's own: 0.9 M parameters over bytes, and every size divides by 2 and 4 ranks.
        "tiny": LlamaConfig(),
        "llama-2-7b": replace(
            shape(LLAMA_3, 32, 4096, 32, 32, 11_008),
            vocab_size=32_000,
            rope_theta=10_000.0,
            max_position_embeddings=4096,
        ),
        "llama-3.2-1b": replace(
            shape(LLAMA_3, 16, 2048, 32, 8, 8192, tied=True),
            rope_scaling=RopeScaling(factor=32.0),
            max_position_embeddings=131_072,
        ),
        "llama-3-8b": LLAMA_3,
        "llama-3-70b": shape(LLAMA_3, 80, 8192, 64, 8, 28_672),
        "llama-3-405b": replace(
            shape(LLAMA_3, 126, 16_384, 128, 8, 53_248),
            rope_scaling=RopeScaling(factor=8.0),
            max_position_embeddings=131_072,
        ),
        "playbook-1b": shape(PLAYBOOK, 16, 2048, 32, 32, 8192, tied=True),
        "playbook-3b": shape(PLAYBOOK, 28, 3072, 32, 32, 8192, tied=True),
        "playbook-8b": PLAYBOOK,
        "playbook-80b": shape(PLAYBOOK, 80, 8192, 64, 64, 28_672),
    }
)
