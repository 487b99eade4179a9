"""A training step on one rank: ours beside transformers' Llama with torch's own AdamW.

The same shapes, weights and tokens, interleaved in one process: forward, backward, clip to norm 1,
AdamW in float32. The ratio is that of the medians; goal: at most 1.0.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, fields

import torch
import transformers

from picotron_edu.data import Batch
from picotron_edu.layout import describe
from picotron_edu.model import Llama, LlamaConfig
from picotron_edu.optim import AdamW, keep_main_grads
from picotron_edu.train import train_step

MICRO, SEQUENCE, REPEATS = 8, 256, 12


def ours(config: LlamaConfig, batch: Batch) -> Callable[[], float]:
    model = Llama(config)
    describe(model)
    keep_main_grads(model)
    optimizer = AdamW(model.named_parameters(), lr=1e-3)
    return lambda: train_step(model, batch, optimizer, MICRO, 1e-3, 1.0)[0].item()


def theirs(config: LlamaConfig, batch: Batch) -> Callable[[], float]:
    known = {f.name for f in fields(LlamaConfig)} & set(transformers.LlamaConfig().to_dict())
    same = {name: value for name, value in asdict(config).items() if name in known}
    same = {name: value for name, value in same.items() if value is not None}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**same))
    model.load_state_dict(Llama(config).state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def step() -> float:
        logits = model(batch.inputs_BS).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels_BS.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def main() -> None:
    config = LlamaConfig.from_preset("tiny", vocab_size=256)
    tokens = torch.randint(
        0, 256, (MICRO, SEQUENCE + 1), generator=torch.Generator().manual_seed(0)
    )
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    steps = {"ours": ours(config, batch), "theirs": theirs(config, batch)}
    first = {name: step() for name, step in steps.items()}
    assert abs(first["ours"] - first["theirs"]) < 1e-4, first  # it is the same work
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(REPEATS):
        for name in sorted(steps, reverse=bool(repeat % 2)):
            begin = time.perf_counter()
            steps[name]()
            times[name].append(time.perf_counter() - begin)
    mine, other = (statistics.median(times[name]) for name in ("ours", "theirs"))
    print(f"tiny, {MICRO}×{SEQUENCE} tokens, float32, {torch.get_num_threads()} threads")
    print(f"  ours {mine * 1e3:.0f} ms / transformers + torch AdamW {other * 1e3:.0f} ms", end="")
    print(f" = {mine / other:.2f}")


if __name__ == "__main__":
    main()
