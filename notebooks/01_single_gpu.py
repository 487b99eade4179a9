"""Chapter 01 as a script: train a small Llama on real text, on one GPU or one CPU.

    python notebooks/01_single_gpu.py --steps 300
    python notebooks/01_single_gpu.py --precision bfloat16 --micro-batch-size 4 --accumulation 2
    python notebooks/01_single_gpu.py --data my_texts/ --hidden-size 256 --sequence-length 512
    torchrun --nproc_per_node 2 notebooks/01_single_gpu.py        (or: python … --nproc 2)

On several ranks it shows where the course starts from: every rank trains the same model on the same
batches. Nothing is gained, and at the end all of them hold bit-identical weights.
"""

import hashlib
import sys
from pathlib import Path

import torch

from picotron_edu import ranks
from picotron_edu.ranks import all_reduce, entrypoint, world
from picotron_edu.train import Diverged, TrainConfig, evaluate, sample_text, train


def main(config: TrainConfig) -> int:
    """Train a Llama on text, then let it write. Without flags: the Python manual, one minute."""
    speaker = world().index == 0
    try:
        data, validation = config.text(), config.text("validation")
    except (ValueError, OSError, ImportError) as error:
        return explain(error)
    try:
        history = train(config, progress=speaker, data=data)
    except Diverged as error:
        return explain(error)
    model = history.model
    if speaker:
        print(history.summary())
        loss = evaluate(model, validation.validation_batches(), model.lm_head.weight.device)
        print(f"loss on text it has not seen: {loss:.3f}\n")
        print(sample_text(model, data, prompt="The ", seed=config.seed))
    if world().size > 1:
        compare_replicas(model)
    return 0


def explain(error: Exception) -> int:
    """What the reader can mend is one line and no traceback; every rank has the same error."""
    if world().index == 0:
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr, flush=True)
    return 2


def compare_replicas(model: torch.nn.Module) -> None:
    """All ranks hold the same weights, to the last bit: compare a hash of them."""
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(param.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    mine = torch.tensor(int.from_bytes(digest.digest()[:4], "big"), device=ranks.device())
    least, most = (all_reduce(mine.clone(), world(), op) for op in ("min", "max"))
    equal = bool(least == most)
    if not equal and mine.device.type == "cpu":  # GPU kernels add in no fixed order
        raise RuntimeError("the replicas differ, although all ranks trained on the same batches")
    if world().index == 0:
        n, how = world().size, "bit-identical weights" if equal else "equal weights, up to rounding"
        print(f"\nAll {n} replicas hold {how}: {n} ranks, the speed of one.")
        print("Chapter 03 shares the batch out among them.")


if __name__ == "__main__":
    sys.exit(entrypoint(main, TrainConfig))
