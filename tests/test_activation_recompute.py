"""Chapter 02: its script, its bars, and the arithmetic that recomputation really adds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from picotron_edu import recompute
from picotron_edu.flops import hardware_flops, model_flops, recomputed_flops
from picotron_edu.model import Llama, LlamaConfig, token_loss_sum
from picotron_edu.show.grouped import grouped_bars

ROOT = Path(__file__).parent.parent
SCRIPT = [str(ROOT / "notebooks/02_activation_recompute.py")]
SMALL = [
    *("--steps", "2", "--num-hidden-layers", "2", "--hidden-size", "16"),
    *("--intermediate-size", "24", "--sequence-length", "64"),
    *("--micro-batch-size", "2", "--device", "cpu"),
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node"]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # tiny tensors only wait for more
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, cwd=ROOT, env=one_thread
    )


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ([sys.executable, *SCRIPT], 1),
        ([*TORCHRUN, "4", *SCRIPT], 4),
    ],
    ids=["alone", "torchrun 4"],
)
def test_the_script_trains_alike_under_each_policy_on_every_rank(command, ranks):
    done = run([*command, *SMALL])
    assert done.returncode == 0, done.stdout + done.stderr
    same = f"bit-identical (under none, selective, full; ranks: {ranks})"
    assert f"The losses of all 2 steps are {same}" in done.stdout
    lines = [line.split() for line in done.stdout.splitlines()]
    found = {line[0]: line for line in lines if line and line[0] in ("none", "selective", "full")}
    assert list(found) == ["none", "selective", "full"]
    assert len({line[-1] for line in found.values()}) == 1  # the last loss


def test_the_script_can_train_under_one_policy():
    text = run([sys.executable, *SCRIPT, *SMALL, "--no-compare", "--recompute", "full"]).stdout
    assert re.search(r"^full ", text, re.MULTILINE) and not re.search(r"^none ", text, re.MULTILINE)


# ---- arithmetic ----------------------------------------------------------------------------------

CONFIG = LlamaConfig(
    vocab_size=40,
    hidden_size=24,
    intermediate_size=36,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_matmuls_that_run_again_are_counted(tied):
    config = LlamaConfig(**{**vars(CONFIG), "tie_word_embeddings": tied})
    model, tokens_BS = Llama(config), torch.zeros(2, 16, dtype=torch.int64)
    recompute.apply(model, "full")
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        token_loss_sum(model(tokens_BS), tokens_BS)[0].backward()
    needed = model_flops(config, 2, 16, causal=False).total
    again = recomputed_flops(config, 2, 16, "full", causal=False).total
    assert counter.get_total_flops() == needed + again
    assert needed + again < hardware_flops(config, 2, 16, "full", causal=False).total


def test_selective_runs_attention_again_and_none_nothing():
    once = model_flops(CONFIG, 2, 16).attention / 3
    assert recomputed_flops(CONFIG, 2, 16, "selective").total == once
    assert recomputed_flops(CONFIG, 2, 16, "none").total == 0
    calls = []
    model = Llama(CONFIG)
    for block in model.model.layers:
        attend = block.self_attn.attend
        block.self_attn.attend = lambda *qkv, attend=attend: calls.append(1) or attend(*qkv)
    recompute.apply(model, "selective")
    model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
    assert len(calls) == 2 * CONFIG.num_hidden_layers


# ---- bars ----------------------------------------------------------------------------------------


def test_grouped_bars_have_the_given_heights_and_dots():
    groups = {"small": {"none": 3e6, "full": 1e6}, "large": {"none": 300e6, "full": 10e6}}
    picture = grouped_bars(
        groups, "bytes", measured={"small": {"none": 3e6}}, limit=("a GPU", 20e6), caption="What."
    )
    ax = picture.figure.axes[0]
    assert [bar.get_height() for bar in ax.patches] == [3e6, 1e6, 40e6, 10e6]  # cut at twice
    assert [text.get_text() for text in ax.texts] == ["3 MB", "1 MB", "300 MB ↑", "10 MB"]
    assert [list(line.get_ydata()) for line in ax.lines] == [[3e6], [20e6, 20e6]]
    labels = [text.get_text() for text in picture.figure.legends[0].get_texts()]
    assert labels == ["none", "full", "measured", "a GPU"]


def test_grouped_bars_must_be_the_same_in_each_group():
    with pytest.raises(ValueError, match=r"group 'b' has bars \['y'\]; the first one has \['x'\]"):
        grouped_bars({"a": {"x": 1}, "b": {"y": 1}})
    with pytest.raises(ValueError, match="groups is empty"):
        grouped_bars({})
