"""Cost, memory, treemap, bars and loss draw exactly the numbers they are given."""

import itertools

import numpy as np
import pytest
import torch
from show_examples import (
    BREAKDOWN,
    SIZES,
    moments,
    texts_of,
)

from picotron_edu import memory, show
from picotron_edu.presets import PRESETS
from picotron_edu.show.treemap import layout, squarify

pytestmark = pytest.mark.filterwarnings("error")  # it would stand in the reader's notebook


# ---- cost ----------------------------------------------------------------------------------


def test_fit_finds_latency_and_bandwidth_through_noise_over_six_decades():
    sizes = np.geomspace(64, 64e6, 13)
    noise = np.random.default_rng(0).uniform(0.9, 1.1, 13)
    alpha, beta = show.fit_alpha_beta(sizes, (40e-6 + 0.5e-9 * sizes) * noise)
    assert alpha == pytest.approx(40e-6, rel=0.1) and beta == pytest.approx(0.5e-9, rel=0.1)


def test_fit_is_exact_without_noise_and_never_negative():
    assert show.fit_alpha_beta([1, 1e6], [1e-5 + 1e-9, 1e-5 + 1e-3]) == pytest.approx((1e-5, 1e-9))
    alpha, beta = show.fit_alpha_beta([1e3, 1e4], [1e-6, 2e-5])
    assert alpha == 0 and beta > 0
    alpha, beta = show.fit_alpha_beta([1e3, 1e6], [2e-5, 1e-5])
    assert alpha > 0 and beta == 0


@pytest.mark.parametrize(("sizes", "seconds"), [([1], [1]), ([1, 1], [1, 2]), ([1, 2], [1, 0])])
def test_fit_refuses_what_has_no_line(sizes, seconds):
    with pytest.raises(ValueError, match=r"sizes|seconds"):
        show.fit_alpha_beta(sizes, seconds)


def test_cost_draws_the_measured_points_and_the_bandwidth():
    seconds = [5e-5 + 1e-9 * n for n in SIZES]
    left, right = show.alpha_beta(SIZES, {"send": seconds}).figure.axes
    assert left.lines[0].get_ydata() == pytest.approx(seconds)
    assert right.lines[0].get_ydata() == pytest.approx(np.array(SIZES) / seconds)
    assert left.get_xscale() == left.get_yscale() == "log"


# ---- memory --------------------------------------------------------------------------------


def test_memory_steps_stack_up_to_the_recorded_bytes():
    picture = show.memory_steps(moments())
    ax = picture.figure.axes[0]
    heights = [c.get_datalim(ax.transData).y1 for c in ax.collections]
    assert ax.get_ylabel() == "memory in MB"
    totals = [sum(v for k, v in r.items() if k not in ("step", "event")) for r in moments()]
    assert heights[-1] == pytest.approx(max(totals) / 1e6)
    assert [t.get_text() for t in ax.get_xticklabels()] == ["step 0", "step 1"]
    phases = [t.get_text() for t in ax.texts]
    assert phases[:2] == ["forward", "backward"]


def test_activations_draw_measured_points_and_formula_lines():
    ax = show.activations([64, 128], {2: [4e6, 8e6]}, formula={2: [4e6, 8.4e6]}).figure.axes[0]
    assert ax.lines[0].get_ydata() == pytest.approx([4, 8])
    assert ax.lines[1].get_ydata() == pytest.approx([4, 8.4])
    with pytest.raises(ValueError, match="batch 2 has 1 values for 2"):
        show.activations([64, 128], {2: [4e6]})


@pytest.mark.parametrize("values", [[1], [6, 6, 4, 3, 2, 2, 1], [1e12, 3, 1e-3], [1] * 17])
def test_squarify_fills_the_area_in_proportion_without_overlap(values):
    boxes = squarify(values, (1, 2, 8, 5))
    for value, (_, _, width, height) in zip(values, boxes):
        assert width * height == pytest.approx(40 * value / sum(values), rel=1e-6)
    for a, b in itertools.combinations(boxes, 2):
        across = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
        down = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
        assert across < 1e-9 or down < 1e-9
    assert min(b[0] for b in boxes) == 1 and min(b[1] for b in boxes) == 2
    assert max(b[0] + b[2] for b in boxes) == pytest.approx(9)
    assert max(b[1] + b[3] for b in boxes) == pytest.approx(7)


def test_squarify_makes_squares_where_it_can():
    assert all(max(w / h, h / w) < 1.01 for _, _, w, h in squarify([1] * 4, (0, 0, 2, 2)))


def test_treemap_draws_every_byte_and_names_every_part():
    picture = show.treemap(BREAKDOWN)
    total = 2 * 2.47e9 + 3 * 4.94e9 + 3.2e9 + 4.4e9 + 2.1e9 + 2e6 + 1e7
    boxes = [p for p in picture.figure.axes[0].patches if p.get_label()]
    area = sum(box.get_width() * box.get_height() for box in boxes)
    drawn = {box.get_label(): box.get_width() * box.get_height() / area * total for box in boxes}
    assert drawn["parameters"] == pytest.approx(2.47e9)
    assert drawn["activations · attention"] == pytest.approx(3.2e9)
    assert drawn["activations · rope"] == pytest.approx(2e6)
    said = " ".join(t.get_text() for t, _ in texts_of(picture))
    for name in ("parameters", "fp32 master weights", "attention", "rope: 2 MB", "other: 10 MB"):
        assert name in said


def test_treemap_merges_hairlines_of_one_category_without_losing_bytes():
    parts = layout({"activations": {"big": 1e9, "a": 1e3, "b": 2e3}}, (0, 0, 1, 1))
    assert [(p.name, p.bytes) for p in parts] == [("big", 1e9), ("other parts", 3e3)]


def test_treemap_refuses_negative_and_empty_breakdowns():
    with pytest.raises(ValueError, match="gradients"):
        show.treemap({"parameters": 5, "gradients": -1})
    with pytest.raises(ValueError, match="no bytes"):
        show.treemap({"parameters": 0})


def test_breakdown_adds_up_to_the_formulas_of_a_step():
    config = PRESETS["llama-3.2-1b"]
    count = config.num_parameters()
    found = show.memory_breakdown(config, 2, 1024, precision="bf16", fp32_gradients=False)
    assert found["parameters"] == found["gradients"] == 2 * count
    assert sum(found["optimizer states"].values()) == 12 * count
    kept = memory.activation_bytes(config, 2, 1024, torch.bfloat16, gpu=True)
    assert sum(found["activations"].values()) == kept
    wide = show.memory_breakdown(config, 2, 1024, precision="fp32", gpu=False)
    assert sum(sum(v.values()) if isinstance(v, dict) else v for v in wide.values()) == (
        16 * count + memory.activation_bytes(config, 2, 1024, torch.float32, gpu=False)
    )


def test_recomputing_keeps_less_and_nothing_but_activations_changes():
    def kept(recompute, sequence=8192):
        found = show.memory_breakdown(PRESETS["llama-3-8b"], 1, sequence, recompute=recompute)
        return found.pop("activations"), found

    none, selective, full = kept("none"), kept("selective"), kept("full")
    assert none[1] == selective[1] == full[1]
    assert none[0].pop("attention scores") == 2 * 32 * 8192**2 * 32  # bytes · heads · S² · layers
    log_sum_exp = 4 * 32 * 8192 * 32  # of fused attention alone
    assert none[0].pop("attention") == selective[0]["attention"] - log_sum_exp
    assert none[0] == {name: value for name, value in selective[0].items() if name != "attention"}
    assert full[0].pop("inputs of the layers") == 2 * 8192 * 4096 * 32
    assert full[0]["feed-forward"] == selective[0]["feed-forward"] / 32
    with pytest.raises(ValueError, match="recompute is none, selective or full, got 'some'"):
        kept("some")


# ---- bars and loss -------------------------------------------------------------------------


def test_bars_have_the_given_lengths_and_say_them():
    ax = show.bars({"a": 812e6, "b": 331e6}, unit="bytes").figure.axes[0]
    assert [p.get_width() for p in ax.patches] == [812e6, 331e6]
    assert [t.get_text() for t in ax.texts] == ["812 MB", "331 MB"]


def test_loss_draws_each_step_and_the_mean_around_it():
    values = [5.0 - 0.01 * i for i in range(100)]
    ax = show.loss(values).figure.axes[0]
    assert ax.lines[0].get_ydata() == pytest.approx(values)
    assert ax.lines[1].get_ydata()[50] == pytest.approx(np.mean(values[48:52]))
    assert ax.lines[0].get_xdata()[0] == 1
