"""What this machine has for ranks: cores, threads, and a way to talk."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_rank(cores: int, ranks: int) -> int:
    """Ranks share the machine: more threads than cores make everybody slower by factors."""
    return max(1, cores // ranks)


def pick_backend(world_size: int, backend: str | None = None) -> str:
    """`backend` if given; else nccl if every rank can have a GPU of its own, else gloo."""
    if backend is None:
        enough = torch.cuda.is_available() and torch.cuda.device_count() >= world_size
        return "nccl" if enough and dist.is_nccl_available() else "gloo"
    if backend not in ("gloo", "nccl"):
        raise ValueError(
            f"backend={backend!r}: must be 'gloo', 'nccl' or None for the best there is"
        )
    if backend == "nccl" and torch.cuda.device_count() < world_size:
        raise ValueError(
            f"backend='nccl' needs a GPU a rank: world_size={world_size}, but there are "
            f"{torch.cuda.device_count()} GPUs"
        )
    return backend
