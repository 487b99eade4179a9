"""Chapter 02 as a script: the same training, with more and with less kept between the passes.

    python notebooks/02_activation_recompute.py
    python notebooks/02_activation_recompute.py --no-compare --recompute full --steps 100
    python notebooks/02_activation_recompute.py --sequence-length 512 --precision bfloat16
    torchrun --nproc_per_node 2 notebooks/02_activation_recompute.py     (or: python … --nproc 2)

It trains under each policy from the same weights and on the same batches, and prints a line for
each: bytes that wait for backward, peak of memory, time of a step, MFU and HFU. Steps are timed in
turns, one under each policy, so that a busy moment of the machine meets all of them. The losses
must be the same to the last bit. On several ranks every rank is a replica, whose losses must be the
same.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import get_args

import torch

from picotron_edu import recompute
from picotron_edu.flags import flag
from picotron_edu.flops import model_flops, recomputed_flops
from picotron_edu.memory import measured_activation_bytes
from picotron_edu.memory_watch import MemoryWatch
from picotron_edu.model import token_loss_sum
from picotron_edu.optim import AdamW
from picotron_edu.presets import check_count
from picotron_edu.ranks import all_reduce, device, entrypoint, world
from picotron_edu.report import History, in_units
from picotron_edu.train import Diverged, TrainConfig, train, train_step

COLUMNS = "policy        waiting     peak    step     MFU    HFU   last loss"


@dataclass(frozen=True)
class Config(TrainConfig):
    steps: int = flag(20, "optimizer steps under each policy")
    repeats: int = flag(10, "timed steps under each policy, in turns; at least 1")
    compare: bool = flag(True, "train under each policy; without it, under --recompute alone")


def main(config: Config) -> int:
    """Train a Llama on text under each policy of recomputation, and compare."""
    speaker = world().index == 0
    policies = get_args(recompute.Policy) if config.compare else (config.recompute,)
    losses, sizes = {}, {}
    try:
        check_count("repeats", config.repeats)
        data = config.text()
        for policy in policies:
            history = train(replace(config, recompute=policy), progress=False, data=data)
            losses[policy] = torch.tensor(history.losses, dtype=torch.float64, device=device())
            sizes[policy] = waiting_and_peak(config, history)
        times = seconds(config, history, policies)
        if speaker:
            print(COLUMNS)
            for policy in policies:
                line = report(policy, config, history, times[policy])
                waiting, peak = map(in_units, sizes[policy])
                print(f"{policy:10} {waiting:>10} {peak:>8} {line} {losses[policy][-1]:11.6f}")
    except (Diverged, ValueError, OSError, ImportError) as error:
        if speaker:
            print(f"{Path(__file__).name}: error: {error}", file=sys.stderr, flush=True)
        return 2
    if config.compare or world().size > 1:
        compare(losses)
    return 0


def waiting_and_peak(config: Config, history: History) -> tuple[int, int]:
    """Bytes that wait for the backward of a micro-batch, and the most in a step."""
    model, micro = history.model, config.micro_batch_size
    batch = history.data.batch(0).to(model.lm_head.weight.device)
    inputs_BS, labels_BS = batch.inputs_BS[:micro], batch.labels_BS[:micro]
    waiting = measured_activation_bytes(
        model, lambda: token_loss_sum(model(inputs_BS), labels_BS)[0]
    )
    optimizer = AdamW(model.named_parameters())
    step = partial(train_step, model, batch, optimizer, micro, config.lr)
    return waiting, peak_of(step, model, optimizer)


def seconds(
    config: Config, history: History, policies: Sequence[recompute.Policy]
) -> dict[recompute.Policy, float]:
    """Median time of a step under each policy: one model, which takes turns with them."""
    model = history.model
    batch = history.data.batch(0).to(model.lm_head.weight.device)
    optimizer = AdamW(model.named_parameters())
    times: dict[recompute.Policy, list[float]] = {policy: [] for policy in policies}
    for repeat in range(config.repeats + 1):  # the first turn makes the optimizer's states
        for policy in policies:
            recompute.apply(model, policy)
            begin = time.perf_counter()
            loss, _ = train_step(model, batch, optimizer, config.micro_batch_size, config.lr)
            loss.item()  # waits until the device has finished
            if model.lm_head.weight.is_cuda:
                torch.cuda.synchronize()  # the optimizer, too
            if repeat:
                times[policy].append(time.perf_counter() - begin)
    return {policy: median(each) for policy, each in times.items()}


def report(policy: recompute.Policy, config: Config, history: History, seconds: float) -> str:
    """Time, MFU and HFU of a step."""
    shape = (history.model.config, history.data.global_batch_size, config.sequence_length)
    needed = model_flops(*shape).total
    done = needed + recomputed_flops(*shape, policy).total
    mfu, hfu = (100 * history.peak.utilization(flops, seconds) for flops in (needed, done))
    return f"{1e3 * seconds:4.0f} ms {mfu:5.1f} % {hfu:4.1f} %"


def peak_of(step: partial, model: torch.nn.Module, optimizer: AdamW) -> int:
    """Most bytes of tensors in the second of two steps: by then all states are there."""
    step()
    if model.lm_head.weight.is_cuda:  # autograd has its own threads there, which nobody can watch
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated()
    with MemoryWatch(model, optimizer) as watch:
        step()
    return watch.peak


def compare(losses: dict[str, torch.Tensor]) -> None:
    """Policies, and ranks, have lost the same, to the last bit."""
    every = torch.stack(list(losses.values()))
    least, most = (all_reduce(every.clone(), world(), op) for op in ("min", "max"))
    equal = torch.equal(least, most) and bool((every == every[0]).all())
    if not equal and every.device.type == "cpu":  # GPU kernels add in no fixed order
        raise RuntimeError(f"the losses differ: {losses}")
    if world().index == 0:
        how = "bit-identical" if equal else "equal up to rounding"
        among = f"under {', '.join(losses)}; ranks: {world().size}"
        print(f"\nThe losses of all {every.shape[1]} steps are {how} ({among}).")


if __name__ == "__main__":
    sys.exit(entrypoint(main, Config))
