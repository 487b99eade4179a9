"""Check of predictions: what a model takes on each of many ranks, and what they send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from picotron_edu.course.comparing import assert_close
from picotron_edu.memory_states import MIXED, held, sent
from picotron_edu.presets import LlamaConfig

N = LlamaConfig.from_preset("llama-3-8b").num_parameters()
RANKS = (8, 32, 128, 512)


def llama_on_many_ranks(held_by: Callable[..., Any], gigabytes_sent: Any) -> str:
    for stage in (0, 1, 2, 3):
        for n in RANKS:
            right = (6 + 12 / n, 2 + 16 / n, 18 / n)[stage - 1] if stage else 18
            wrong = {
                "gradients are summed in float32: 4 bytes": (
                    (16, 4 + 12 / n, 2 + 14 / n, 16 / n)[stage]
                ),
                "in mixed precision the optimizer has a float32 master beside its two moments": (
                    (14, 6 + 8 / n, 2 + 12 / n, 14 / n)[stage]
                ),
                "stage 1 cuts only the optimizer states": 2 + 16 / n if stage == 1 else right,
                "stage 2 cuts the gradients too": 6 + 12 / n if stage == 2 else right,
                "stage 3 cuts the weights too": 2 + 16 / n if stage == 3 else right,
                "in stage 0 every rank holds everything": 18 / n if stage == 0 else right,
            }
            assert_close(
                held([N], n, stage, MIXED).total,
                held_by(N, stage, n),
                what=f"bytes on each of {n} ranks in stage {stage}",
                mistakes={hint: each * N for hint, each in wrong.items()},
                hints={1e-9: "bytes, not GB", 1 / N: "for all N parameters, not for one"},
                hint="weights 2, gradients 4, optimizer 12: which of them are cut?",
                rtol=1e-6,  # of the padding
            )
    right = sent([N], 64, 3, micro_batches=4) / 1e9
    assert_close(
        right,
        gigabytes_sent,
        what="GB sent",
        hints={
            1 / 4: "each of the 4 micro-batches gathers and reduces anew",
            6 / 8: "two all-gathers in bfloat16, for forward and backward; a float32 reduction",
            5 / 8: "the weights do not stay for the next micro-batch",
            12 / 8: "weights travel in bfloat16",
            64 / 63: "each rank has its own shard already: (n − 1)/n",
            1e9: "GB, not bytes",
        },
        hint="each micro-batch: two all-gathers of 2 bytes a weight, a reduce-scatter of 4",
        rtol=0.01,
    )
    return f"the 8B: {18 * N / 512 / 1e9:.2f} GB a rank on 512, and {right:.0f} GB on the wire"
