"""What a training run says about itself: a record a step, and a summary whose numbers name their
convention."""

import sys
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from picotron_edu.data import TextData
from picotron_edu.flops import CONVENTION, Peak
from picotron_edu.model import Llama


@dataclass(frozen=True)
class StepRecord:
    """loss: per counted token of the global batch; mfu: 0.4 is 40 %; peak_memory: bytes or None."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    tokens_per_second: float
    mfu: float
    peak_memory: int | None

    def __str__(self) -> str:
        return (
            f"step {self.step:5d}   loss {self.loss:6.3f}   gradient norm {self.grad_norm:6.3f}   "
            f"lr {self.lr:.1e}   {self.tokens_per_second:,.0f} tokens/s"
        )


@dataclass
class History:
    """The records of a run, in order: `history[0].loss`, `for record in history`, `.losses`.

    model: the plain one. trained: as it trained, DataParallel, Zero or the plain one; under ZeRO-3
    it alone has the weights, and `with trained.whole():` brings them into the plain one.
    """

    model: Llama
    data: TextData
    peak: Peak
    trained: Any
    records: list[StepRecord] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, step: int) -> StepRecord:
        return self.records[step]

    @property
    def losses(self) -> list[float]:
        return [record.loss for record in self.records]

    def summary(self) -> str:
        device = self.model.lm_head.weight.device
        first, last = self.records[0], self.records[-1]
        tokens = sum(record.tokens for record in self.records)
        seconds = sum(record.seconds for record in self.records)
        digits = 1 if seconds < 10 else 0
        speed = median(r.tokens_per_second for r in self.records)
        mfu = median(r.mfu for r in self.records)
        memory = "not known here" if last.peak_memory is None else in_units(last.peak_memory)
        return "\n".join(
            [
                f"{len(self)} steps, {tokens:,} tokens, {seconds:.{digits}f} s on {device.type}",
                f"loss         {first.loss:.3f} -> {last.loss:.3f}",
                f"speed        {speed:,.0f} tokens/s (median step)",
                f"MFU          {mfu:.1%} of {self.peak.flops / 1e9:,.0f} GFLOP/s",
                f"             model FLOPs: {CONVENTION}",
                f"             machine: {self.peak.source}",
                f"peak memory  {memory} ({memory_convention(device)})",
            ]
        )


class Progress:
    """A bar on a terminal; ten lines where the output is kept (a log, a rank's text)."""

    def __init__(self, steps: int, shown: bool) -> None:
        self.steps, self.shown = steps, shown
        self.bar = tqdm(total=steps, unit="step", disable=not (shown and sys.stderr.isatty()))

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def show(self, record: StepRecord) -> None:
        self.bar.set_postfix_str(f"loss {record.loss:.3f}", refresh=False)
        self.bar.update()
        every = max(1, self.steps // 10)
        if (
            self.shown
            and self.bar.disable
            and (record.step % every == 0 or record.step == self.steps - 1)
        ):
            print(record, flush=True)


def in_units(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def peak_memory(device: torch.device) -> int | None:
    """Bytes; see `memory_convention` for what of."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    try:
        import resource
    except ImportError:  # Windows
        return None
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024  # Linux counts kB


def memory_convention(device: torch.device) -> str:
    return {
        "cuda": "most memory of the GPU that tensors held at once",
        "mps": "memory the driver holds now",
    }.get(device.type, "largest resident set of this process, Python and PyTorch included")
