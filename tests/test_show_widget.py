"""The memory widget follows its sliders and explains what cannot be."""

import pytest
from show_examples import BREAKDOWN

from picotron_edu.presets import PRESETS
from picotron_edu.show.treemap import layout
from picotron_edu.show.widget import memory_widget, treemap_html

pytestmark = pytest.mark.filterwarnings("error")  # it would stand in the reader's notebook


# ---- widget --------------------------------------------------------------------------------


def simple_breakdown(config, batch, sequence, *, precision, fp32_gradients, recompute):
    count = config.num_parameters()
    kept = {"none": 34, "selective": 20, "full": 2}[recompute]
    return {
        "parameters": count * (2 if precision == "bf16" else 4),
        "gradients": count * (4 if fp32_gradients or precision == "fp32" else 2),
        "optimizer states": {"master weights": 4 * count, "moments": 8 * count},
        "activations": kept * batch * sequence * config.hidden_size * config.num_hidden_layers,
    }


def control(widget, description):
    everything = [w for row in widget.children[:2] for w in walk(row)]
    found = [w for w in everything if getattr(w, "description", "") == description]
    assert len(found) == 1
    return found[0]


def walk(widget):
    yield widget
    for child in getattr(widget, "children", ()):
        yield from walk(child)


def test_widget_follows_sliders_and_presets():
    widget = memory_widget(simple_breakdown, start="tiny")
    message, picture = widget.children[2:]
    assert f"{PRESETS['tiny'].num_parameters():,} parameters" in message.value
    control(widget, "model").value = "llama-3-8b"
    assert "8,030,261,248 parameters" in message.value
    assert control(widget, "kv heads").value == 8
    before = picture.value
    control(widget, "batch").value = 4
    assert picture.value != before
    control(widget, "model").value = "llama-3.2-1b"
    assert "1,235,814,400 parameters" in message.value
    control(widget, "tied embeddings").value = False
    assert "1,498,482,688 parameters" in message.value


def test_widget_explains_an_illegal_combination_and_keeps_the_last_picture():
    widget = memory_widget(simple_breakdown, start="llama-3-8b")
    message, picture = widget.children[2:]
    before = picture.value
    control(widget, "kv heads").value = 5
    assert "not possible" in message.value and "num_key_value_heads (5)" in message.value
    assert picture.value == before
    control(widget, "kv heads").value = 4
    assert "not possible" not in message.value and picture.value != before


def test_widget_has_real_formulas_and_all_five_models():
    widget = memory_widget()
    for name in control(widget, "model").options:
        control(widget, "model").value = name
        assert f"{PRESETS[name].num_parameters():,} parameters" in widget.children[2].value
    for way in ("none", "full", "selective"):
        control(widget, "recompute").value = way
        assert "not possible" not in widget.children[2].value


def test_widget_takes_no_choice_of_gradients_in_fp32():
    widget = memory_widget(simple_breakdown, start="tiny")
    assert not control(widget, "fp32 gradients").disabled
    control(widget, "precision").value = "fp32"
    assert control(widget, "fp32 gradients").disabled


def test_widget_draws_once_per_preset():
    calls = []

    def counted(*args, **kwargs):
        calls.append(args)
        return simple_breakdown(*args, **kwargs)

    widget = memory_widget(counted, start="tiny")
    assert len(calls) == 1
    control(widget, "model").value = "llama-3-70b"
    assert len(calls) == 2


def test_widget_boxes_say_their_bytes_when_pointed_at():
    page = treemap_html(layout(BREAKDOWN, (0, 0, 840, 340)))
    assert 'title="activations · attention: 3.2 GB"' in page
    assert page.count("position:absolute") == len(layout(BREAKDOWN, (0, 0, 840, 340)))
