"""Chapter 04 as a script: train a small Llama on real text, and share its states over the ranks.

    torchrun --standalone --nproc-per-node 4 notebooks/04_zero.py
    torchrun --standalone --nproc-per-node 2 notebooks/04_zero.py --zero 3 --steps 300
    python notebooks/04_zero.py --nproc 2 --precision bfloat16 --accumulation 4

Without --zero all four stages train, one after the other; `--zero 3` trains stages 0 and 3. For
each stage: what a rank holds of weights, gradients and optimizer states, counted in its tensors
and beside the formula; the bytes that it sends in a step; and the loss, which is that of stage 0.
"""

import gc
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from picotron_edu.data import TextData
from picotron_edu.flags import flag
from picotron_edu.memory import STATES
from picotron_edu.memory_states import RankBytes, held, measured, recording, sent
from picotron_edu.optim import AdamW, cosine_lr
from picotron_edu.ranks import all_reduce, entrypoint, world
from picotron_edu.show.ledger import size
from picotron_edu.train import Diverged, TrainConfig, accumulate, build_model, spread, train_step


@dataclass(frozen=True)
class Config(TrainConfig):
    steps: int = flag(20, "optimizer steps")
    zero: Literal[0, 1, 2, 3] = flag(0, "1, 2 or 3: train stages 0 and this; 0: all four")


@dataclass(frozen=True)
class Result:
    loss: float
    there: RankBytes
    formula: RankBytes
    sent: float
    sent_formula: float


def main(config: Config) -> int:
    """Train on ranks that share the states by ZeRO. Without flags: 20 steps in each stage."""
    stages: list[Literal[0, 1, 2, 3]] = [0, config.zero] if config.zero else [0, 1, 2, 3]
    try:
        data = config.text(replicas=world().size)
        results = {stage: run(replace(config, zero=stage), data) for stage in stages}
    except (Diverged, ValueError, OSError, ImportError) as error:
        return explain(error)
    if world().index == 0:
        report(config, results)
    gc.collect()  # models hold their process group in cycles; its threads must end before Python
    return 0


def run(config: Config, data: TextData) -> Result:
    """Train, then look at what there is just before the last update."""
    plain = build_model(config, data.vocab_size)
    parameters, device = sum(p.numel() for p in plain.parameters()), plain.lm_head.weight.device
    with recording() as recorder:
        dp = world()
        model, total = spread(plain, config, dp), partial(all_reduce, axis=dp)
        optimizer = AdamW(model.named_parameters(), weight_decay=config.weight_decay)
        for step in range(config.steps + 1):
            batch = data.batch(step, dp.index, dp.size).to(device)
            before = len(recorder.events)
            if step == config.steps:  # the last one is only looked at
                break
            lr = cosine_lr(step, config.lr, config.warmup, config.steps, floor=config.lr / 10)
            limit = config.max_grad_norm
            train_step(model, batch, optimizer, config.micro_batch_size, lr, limit, total)
        loss = accumulate(model, batch, config.micro_batch_size, total)
    counted = sum(e.wire_bytes for e in recorder.events[before:] if e.payload_bytes > 8)

    mixed = config.precision == "bfloat16"
    states = STATES["bfloat16, float32 gradients" if mixed else "float32"]
    units = [parameters] if config.zero == 0 else [unit.ends[-1] for unit in model.units]
    return Result(
        loss.item(),
        measured(model, optimizer),
        held(units, dp.size, config.zero, states, dp.index),
        counted,
        sent(units, dp.size, config.zero, config.accumulation, states),
    )


def report(config: Config, results: Mapping[Literal[0, 1, 2, 3], Result]) -> None:
    """A line a stage; what is counted must be what the formulas say."""
    n = world().size
    ranks = f"{n} rank{'s' * (n > 1)}"
    print(f"{ranks}, {config.precision}; bytes that rank 0 holds, and sends in a step:")
    columns = ("weights", "gradients", "optimizer", "sum", "formula", "sent", "formula", "loss")
    print(" " * 7 + "".join(f"{name:>11}" for name in columns))
    for stage, result in results.items():
        there, formula = result.there, result.formula
        parts = (there.parameters, there.gradients, there.optimizer_states, there.total)
        cells = [*map(size, (*parts, formula.total, result.sent, result.sent_formula))]
        print(f"stage {stage}" + "".join(f"{cell:>11}" for cell in [*cells, f"{result.loss:.4f}"]))
        if there != formula or abs(result.sent - result.sent_formula) > 1:
            raise RuntimeError(f"stage {stage} is not what the formulas say: {result}")
    first, *others = (result.loss for result in results.values())
    apart = max((abs(loss / first - 1) for loss in others), default=0.0)
    print(f"equal to the formulas to the byte; the losses agree to {max(apart, 1e-7):.0e}")


def explain(error: Exception) -> int:
    """What the reader can mend is one line and no traceback; every rank has the same error."""
    if world().index == 0:
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    sys.exit(entrypoint(main, Config))
