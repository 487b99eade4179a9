"""Chapter 01: what the notebook claims, also away from the sizes that it happens to use."""

import json
import re
from pathlib import Path

import pytest
import torch
from oracle import CONFIG, make_batches
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from picotron_edu.flops import model_flops
from picotron_edu.layout import describe
from picotron_edu.memory import activation_bytes
from picotron_edu.memory_watch import MemoryWatch
from picotron_edu.model import Llama, LlamaConfig, token_loss_sum
from picotron_edu.optim import AdamW, global_norm, grad_of, keep_main_grads
from picotron_edu.ranks import all_gather, all_reduce, launch, world
from picotron_edu.train import accumulate, train_step

NOTEBOOK = Path(__file__).parents[1] / "notebooks/01_single_gpu.ipynb"


def new_model(config=CONFIG, dtype=torch.float64):
    model = Llama(config, dtype=dtype)
    describe(model)
    keep_main_grads(model)
    return model, AdamW(model.named_parameters())


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors])


# The proof: the cut does not matter, and the wrong way is seen


def mean_of_means(model, batch, micro_batch_size):
    micro_batches = batch.split(micro_batch_size)
    for micro in micro_batches:
        loss_sum, counted = token_loss_sum(model(micro.inputs_BS), micro.labels_BS)
        (loss_sum / counted.clamp(min=1) / len(micro_batches)).backward()


def other_cuts(way, rows, cuts):
    model, _ = new_model()
    way(model, make_batches(CONFIG, rows)[0], cuts[world().index])
    everybodys = all_gather(flat(map(grad_of, model.parameters()))[None], world())
    return ((everybodys - everybodys[0]).norm(dim=1) / everybodys[0].norm()).tolist()


@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize("cuts", [[8, 1], [8, 3], [8, 4, 2, 1]], ids=str)
def test_ranks_that_cut_the_batch_in_other_ways_get_the_same_gradient(cuts, rows):
    run = launch(other_cuts, accumulate, rows, cuts, world_size=len(cuts), quiet=True)
    assert all(max(differences) < 1e-10 for differences in run)


def test_the_mean_of_means_does_not_pass_that_proof():
    run = launch(other_cuts, mean_of_means, 8, [8, 4, 2, 1], world_size=4, quiet=True)
    assert run[0][0] == 0.0
    assert min(run[0][1:]) > 0.01


def lowest_and_highest():
    model, optimizer = new_model(dtype=torch.bfloat16)
    for batch in make_batches(CONFIG, rows=7):
        train_step(model, batch, optimizer, micro_batch_size=2, lr=1e-2)
    mine = flat(model.parameters()).float()
    return all_reduce(mine.clone(), world(), "min"), all_reduce(mine, world(), "max")


@pytest.mark.parametrize("world_size", [2, 4])
def test_replicas_stay_bitwise_equal(world_size):
    for lowest, highest in launch(lowest_and_highest, world_size=world_size, quiet=True):
        assert torch.equal(lowest, highest)


# Silent mistakes


def weights_after(update, factor):
    model, _ = new_model()
    accumulate(model, make_batches(CONFIG, rows=4)[0], micro_batch_size=4)
    for param in model.parameters():
        param.main_grad *= factor
    update(model)
    return flat(model.parameters())


@pytest.mark.parametrize("factor", [8.0, 0.125])
def test_adam_hides_a_constant_factor_and_sgd_shows_it(factor):
    def sgd(model):
        for param in model.parameters():
            param.data -= 1e-3 * param.main_grad

    def adamw(model):
        AdamW(model.named_parameters()).step(lr=1e-3)

    for update, expected in ((sgd, abs(factor - 1)), (adamw, 0.0)):
        start, right, wrong = (
            weights_after(u, f) for u, f in ((sgd, 0), (update, 1), (update, factor))
        )
        off = (wrong - right).norm() / (right - start).norm()
        assert off.item() == pytest.approx(expected, abs=0.005)


def test_a_forgotten_zero_grad_adds_one_norm_a_step():
    model, batch, norms = new_model()[0], make_batches(CONFIG, rows=4)[0], []
    for _ in range(3):
        accumulate(model, batch, micro_batch_size=2)
        norms.append(global_norm(model.parameters()).item())
    assert norms == pytest.approx([norms[0], 2 * norms[0], 3 * norms[0]], rel=1e-12)


def test_without_master_weights_small_updates_vanish():
    """Updates of 5e-5 on weights of about 0.2, whose neighbours in bfloat16 are 1e-3 away."""
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    batch, unmoved, losses = make_batches(config, rows=4)[0], {}, {}
    for forget in (False, True):
        model, optimizer = new_model(config, torch.bfloat16)
        before = flat(model.parameters()).clone()
        for _ in range(40):
            loss, _ = train_step(model, batch, optimizer, micro_batch_size=4, lr=5e-5)
            for name, master in optimizer.masters.items():
                master.copy_(optimizer.params[name] if forget else master)
        unmoved[forget] = (flat(model.parameters()) == before).float().mean().item()
        losses[forget] = loss.item()
    assert unmoved[True] > 0.9 > 0.5 > unmoved[False]
    assert losses[True] > losses[False] + 0.2


# Formulas and counts


@pytest.mark.parametrize("micro_batch_size", [1, 2, 8])
def test_the_peak_is_states_and_activations(micro_batch_size):
    """16 N + A with accumulation; without, gradients grow only while activations vanish."""
    config = LlamaConfig(num_hidden_layers=2)
    (model, optimizer), batch = new_model(config, torch.float32), make_batches(config, rows=8)[0]
    with MemoryWatch(model, optimizer) as watch:
        for _ in range(2):
            train_step(model, batch, optimizer, micro_batch_size, lr=1e-3)
    N, A = config.num_parameters(), activation_bytes(config, micro_batch_size, 12)
    if micro_batch_size == 8:
        assert 12 * N + A <= watch.peak <= 16 * N + A
    else:
        assert 16 * N + A <= watch.peak <= 1.1 * (16 * N + A)


def test_a_7b_model_is_counted_without_memory():
    config = LlamaConfig.from_preset("llama-2-7b", num_hidden_layers=2)
    model = Llama(config, device="meta")
    tokens_BS = torch.zeros(4, 8192, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        token_loss_sum(model(tokens_BS), tokens_BS)[0].backward()
    assert counter.get_total_flops() == model_flops(config, 4, 8192, causal=False).total


@pytest.mark.parametrize("layers", [1, 3])
def test_a_step_multiplies_three_matrices_for_each_one_of_forward(layers):
    config = LlamaConfig(num_hidden_layers=layers, hidden_size=32, intermediate_size=32)
    (model, optimizer), batch = new_model(config), make_batches(config, rows=2)[0]
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        train_step(model, batch, optimizer, micro_batch_size=2, lr=1e-3)
    calls = {event.key: event.count for event in profiler.key_averages()}
    assert calls["aten::mm"] == 3 * (7 * layers + 1)


# The notebook


def test_the_chapter_keeps_the_rhythm_of_the_course():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    assert [int(n) for n in re.findall(r"^## (\d+) · ", text, re.MULTILINE)] == list(range(1, 12))
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert sum(source.startswith("my_guess = ") for source in code) >= 12
    lines = [[line for line in source.splitlines() if line.strip()] for source in code]
    assert max(len(line) for cell in lines for line in cell) <= 100
    assert max(map(len, lines)) <= 9
