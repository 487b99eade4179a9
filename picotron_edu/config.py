"""All settings of a training run: one frozen dataclass, whose fields are the scripts' flags.

    TrainConfig(steps=100, precision="bfloat16")          in a notebook
    --steps 100 --precision bfloat16                      on the command line

A value that cannot work is refused here, before anything is built or any rank is started.
"""

from dataclasses import dataclass, fields, replace
from typing import Literal, get_args, get_type_hints

import torch

from picotron_edu.data import TextData
from picotron_edu.flags import fixed, flag
from picotron_edu.model import LlamaConfig
from picotron_edu.presets import check_choice, check_count, check_number
from picotron_edu.text import check_source, tokenizer_file


@dataclass(frozen=True)
class TrainConfig:
    model: str = flag(
        "tiny", "a preset: tiny, llama-3.2-1b, llama-3-8b, … (vocabulary: the data's)"
    )
    num_hidden_layers: int | None = flag(None, "layers, in place of the preset's")
    hidden_size: int | None = flag(None, "hidden size, in place of the preset's")
    intermediate_size: int | None = flag(None, "feed-forward size, in place of the preset's")
    num_attention_heads: int | None = flag(None, "query heads, in place of the preset's")
    num_key_value_heads: int | None = flag(None, "key/value heads, in place of the preset's")
    data: str = flag("manual", "manual, a .txt/.jsonl/.parquet file or folder, or hf:<dataset>")
    data_megabytes: int = flag(100, "read at most so much of the text")
    tokenizer: str | None = flag(None, "a tokenizer.json; without one, bytes are the tokens")
    sequence_length: int = flag(256, "tokens in a sample")
    micro_batch_size: int = flag(8, "samples per forward pass")
    accumulation: int = flag(1, "micro-batches per optimizer step")
    steps: int = flag(300, "optimizer steps")
    lr: float = flag(3e-3, "learning rate at its peak")
    warmup: int = flag(20, "steps until the peak")
    weight_decay: float = flag(0.1, "AdamW's decay of matrices, times the learning rate")
    max_grad_norm: float = flag(1.0, "clip the gradient to this global norm")
    precision: Literal["float32", "bfloat16"] = flag("float32", "type the model computes in")
    data_parallel: Literal["naive", "overlap", "bucketed"] = flag(
        "bucketed", "how ranks that share a batch sum their gradients"
    )
    bucket_mb: float = flag(25.0, "size of a bucket of gradients, in 10^6 bytes")
    zero: Literal[0, 1, 2, 3] = flag(
        0, "ZeRO stage in which they share the states (0: each has all of them)"
    )
    recompute: Literal["none", "selective", "full"] = flag(
        "none", "which activations to drop in forward and make again in backward"
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = flag("auto", "where to train")
    seed: int = flag(0, "of the weights and of the order of samples")

    def __post_init__(self) -> None:
        counts = ("data_megabytes", "sequence_length", "micro_batch_size", "accumulation", "steps")
        for name in counts:
            check_count(name, getattr(self, name))
        for name in ("warmup", "seed"):
            check_count(name, getattr(self, name), least=0)
        for name in ("lr", "max_grad_norm", "bucket_mb"):
            check_number(name, getattr(self, name))
        check_number("weight_decay", self.weight_decay, zero=True)
        for name in ("precision", "recompute", "device", "data_parallel", "zero"):
            check_choice(name, getattr(self, name), get_args(get_type_hints(TrainConfig)[name]))
        longest = self.shape(vocab_size=256).max_position_embeddings
        if self.sequence_length > longest:
            raise ValueError(
                f"sequence_length ({self.sequence_length}) is above the model's "
                f"max_position_embeddings ({longest})"
            )
        if self.device in ("cuda", "mps") and not getattr(torch, self.device).is_available():
            raise ValueError(f"device '{self.device}' is not there on this machine; use 'auto'")
        check_source(self.data)
        if self.tokenizer is not None:
            tokenizer_file(self.tokenizer)

    def shape(self, vocab_size: int) -> LlamaConfig:
        """The preset with the changes asked for."""
        preset = LlamaConfig.from_preset(self.model, vocab_size=vocab_size)
        names = {f.name for f in fields(LlamaConfig)} & {f.name for f in fields(TrainConfig)}
        changes = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(preset, **changes)

    @property
    def dtype(self) -> torch.dtype:
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.precision]

    def text(self, split: Literal["train", "validation"] = "train", replicas: int = 1) -> TextData:
        """The data to train on, or the part kept for validation, for `replicas` that share it.

        The global batch is micro_batch_size × accumulation × replicas.
        """
        passes = self.accumulation if split == "train" else 1
        return TextData(
            self.data,
            self.sequence_length,
            self.micro_batch_size * passes * replicas,
            self.seed,
            self.tokenizer,
            split,
            self.data_megabytes,
        )


@dataclass(frozen=True)
class OneReplica(TrainConfig):
    """All ranks together hold one model and read the same rows: nobody is there to share with."""

    data_parallel: Literal["bucketed"] = fixed("bucketed")
    bucket_mb: float = fixed(25.0)
    zero: Literal[0] = fixed(0)
