"""Chapter 03 as a script: ranks share each batch, and train like one rank with all of it.

    python notebooks/03_data_parallel.py --nproc 2
    python notebooks/03_data_parallel.py --nproc 2 --data-parallel naive --accumulation 4
    torchrun --nproc_per_node 4 notebooks/03_data_parallel.py --steps 300 --bucket-mb 25

It trains on real text, then looks at three promises: the replicas are bit-identical at the end; n
ranks have the losses of one rank that accumulates n times as many micro-batches; and communication
hides behind backward. The last is measured from outside: a step, a step that sends nothing, and the
sums alone.
"""

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import get_args

import torch

from picotron_edu.data import Batch, TextData
from picotron_edu.data_parallel import DataParallel, Mode
from picotron_edu.flags import flag
from picotron_edu.optim import zero_grads
from picotron_edu.presets import check_count
from picotron_edu.ranks import all_reduce, barrier, device, entrypoint, world
from picotron_edu.train import Diverged, TrainConfig, accumulate, build_model, evaluate, train
from picotron_edu.zero import Zero

TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}  # the ranks add up in another order


@dataclass(frozen=True)
class Config(TrainConfig):
    steps: int = flag(30, "optimizer steps")
    bucket_mb: float = flag(1.0, "size of a bucket of gradients, in 10^6 bytes")
    check_steps: int = flag(3, "steps to compare with one rank alone; 0: none")
    repeats: int = flag(5, "of each timing; 0: none")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("check_steps", "repeats"):
            check_count(name, getattr(self, name), least=0)


def main(config: Config) -> int:
    """Train a Llama on text, the batch shared out among the ranks."""
    axis = world()
    speaker = axis.index == 0
    try:
        data = config.text(replicas=axis.size)
        validation = config.text("validation", replicas=axis.size)
        history = train(config, progress=speaker, data=data, dp=axis)
        batches = validation.validation_batches(axis.index, axis.size)
        total = partial(all_reduce, axis=axis)
        loss = evaluate(history.model, batches, history.model.lm_head.weight.device, total)
        lines = [f"{axis.size} × {history.summary()}", f"loss on text it has not seen: {loss:.3f}"]
        if axis.size > 1:
            lines.append(compare_replicas(history.trained))
            if config.check_steps:
                lines.append(compare_with_one_rank(config, data))
            if config.repeats:
                lines += time_modes(config, data)
    except (Diverged, ValueError, OSError, ImportError) as error:
        if speaker:
            print(f"{Path(__file__).name}: error: {error}", file=sys.stderr, flush=True)
        return 2
    if speaker:
        print("\n".join(lines))
    return 0


def compare_replicas(model: DataParallel | Zero) -> str:
    """All ranks hold the same weights, to the last bit."""
    with model.whole() if isinstance(model, Zero) else nullcontext(model) as whole:
        mine = torch.cat([param.detach().flatten() for param in whole.parameters()])
    least, most = (all_reduce(mine.clone(), world(), op) for op in ("min", "max"))
    if not torch.equal(least, most):
        raise RuntimeError("the replicas differ: their gradients were not the same")
    return f"\nAll {world().size} replicas hold bit-identical weights."


def compare_with_one_rank(config: Config, data: TextData) -> str:
    """Each rank trains a few steps alone, on the whole batches, and compares the losses."""
    few = replace(config, steps=config.check_steps)
    shared = train(few, progress=False, data=data, dp=world())
    alone = train(replace(few, zero=0), progress=False, data=data)
    n, k = world().size, config.accumulation
    worst = max(
        abs(getattr(mine, what) / getattr(its, what) - 1)
        for mine, its in zip(shared, alone)
        for what in ("loss", "grad_norm")
    )
    if not worst < TOLERANCE[config.precision]:
        raise RuntimeError(f"{n} ranks do not train like one: losses or norms {worst:.1e} apart")
    return (
        f"{n} ranks × {k} micro-batch{'es' * (k > 1)} = 1 rank × {n * k}: losses and "
        f"gradient norms of {len(shared)} steps agree to {max(worst, 1e-7):.0e}."
    )


def time_modes(config: Config, data: TextData) -> list[str]:
    """For each mode: how much of its communication does a step not wait for?"""
    batch = data.batch(0, world().index, world().size).to(device())
    lines = ["\nmode       messages     step   silent step   sums alone   exposed   hidden"]
    for mode in get_args(Mode):
        model = build_model(config, data.vocab_size)
        parallel = DataParallel(model, world(), mode, config.bucket_mb)
        whole, silent, sums, more = seconds(parallel, model, batch, config)
        exposed = max(0.0, more)
        hidden = max(0.0, 1 - exposed / sums)
        lines.append(
            f"{mode:9} {len(parallel.buckets):9} {1e3 * whole:6.1f} ms {1e3 * silent:10.1f} ms "
            f"{1e3 * sums:9.1f} ms {1e3 * exposed:6.1f} ms {hidden:7.0%}"
        )
    return [
        *lines,
        "exposed: step − silent step, the median of turns; it also counts waiting for a slower",
        "neighbour. Where the sums are short beside a step, chance decides what is hidden.",
    ]


def seconds(
    parallel: DataParallel, model: torch.nn.Module, batch: Batch, config: Config
) -> list[float]:
    """Median times, on the slowest rank: a step, a step that sends nothing, the sums alone; last
    how much longer a step took than the silent one of the same turn."""

    def silent() -> None:
        with parallel.no_sync():
            accumulate(model, batch, config.micro_batch_size)

    def step() -> None:
        accumulate(parallel, batch, config.micro_batch_size)

    times: dict[Callable[[], None], list[float]] = {step: [], silent: [], parallel.finish: []}
    for repeat in range(config.repeats + 1):  # buckets are put in order after the first
        for fn in times:  # in turns, so that a busy moment of the machine hits all of them
            barrier(world())
            begin = time.perf_counter()
            fn()
            if device().type == "cuda":
                torch.cuda.synchronize()  # a GPU call returns before its work is done
            if repeat:
                times[fn].append(time.perf_counter() - begin)
            zero_grads(model.parameters())
    more = [whole - quiet for whole, quiet in zip(times[step], times[silent])]
    middle = torch.tensor([median(each) for each in (*times.values(), more)], device=device())
    return all_reduce(middle, world(), op="max").tolist()


if __name__ == "__main__":
    sys.exit(entrypoint(main, Config))
