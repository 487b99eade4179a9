"""The memory treemap with sliders: change a shape, see what fills the memory.

    show.memory_widget()

A second view of `show.treemap`: the same boxes, drawn as HTML, since a browser redraws that
within a frame while a slider moves (an image would take a tenth of a second and flicker). Point
at a box to read its bytes. An illegal combination is explained in red over the last legal
picture.
"""

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ipywidgets as widgets

from picotron_edu.presets import PRESETS, LlamaConfig
from picotron_edu.show.breakdown import memory_breakdown
from picotron_edu.show.ledger import size
from picotron_edu.show.palette import ink
from picotron_edu.show.treemap import Breakdown, Part, category_sums, layout, percent, total_bytes

WIDTH, HEIGHT = 840, 340  # pixels of the treemap; it shrinks with a narrow window
GPU_BYTES = 80e9  # an A100 or H100
SHOWN = ("tiny", "llama-3.2-1b", "llama-3-8b", "llama-3-70b", "llama-3-405b")

# Field of LlamaConfig -> (label, smallest, largest, step)
SHAPE_SLIDERS = {
    "hidden_size": ("hidden", 64, 16_384, 64),
    "intermediate_size": ("feed-forward", 64, 53_248, 64),
    "num_hidden_layers": ("layers", 1, 128, 1),
    "num_attention_heads": ("heads", 1, 128, 1),
    "num_key_value_heads": ("kv heads", 1, 128, 1),
    "vocab_size": ("vocabulary", 256, 262_144, 256),
}
LABELS = {"description_width": "95px"}
SEQUENCES = [2**power for power in range(6, 18)]  # 64 … 131,072 tokens


def memory_widget(
    breakdown: Callable[..., Breakdown] = memory_breakdown,
    presets: Mapping[str, LlamaConfig] = PRESETS,
    start: str = "llama-3.2-1b",
) -> widgets.VBox:
    """Sliders for a model and its training, over a treemap of the memory they take.

    breakdown   (config, batch, sequence, precision=, fp32_gradients=, recompute=) -> what
                `show.treemap` draws; a ValueError it raises is shown in the widget
    """
    preset = widgets.Dropdown(
        options=[name for name in SHOWN if name in presets],
        value=start,
        description="model",
        style=LABELS,
    )
    shape = {
        field: widgets.IntSlider(min=low, max=high, step=step, description=label, style=LABELS)
        for field, (label, low, high, step) in SHAPE_SLIDERS.items()
    }
    tied = widgets.Checkbox(description="tied embeddings", indent=False)
    batch = widgets.IntSlider(value=1, min=1, max=64, description="batch", style=LABELS)
    sequence = widgets.SelectionSlider(
        options=SEQUENCES, value=4096, description="sequence", style=LABELS
    )
    narrow = LABELS | {"button_width": "85px"}
    precision = widgets.ToggleButtons(
        options=["bf16", "fp32"], description="precision", style=narrow
    )
    fp32_gradients = widgets.Checkbox(value=True, description="fp32 gradients", indent=False)
    recompute = widgets.ToggleButtons(
        options=["none", "selective", "full"],
        value="selective",
        description="recompute",
        style=narrow,
    )
    message = widgets.HTML()
    picture = widgets.HTML()
    loading = False  # while a preset sets many sliders, draw once at the end

    def draw(_: Any = None) -> None:
        if loading:
            return
        fp32_gradients.disabled = precision.value == "fp32"  # they cannot be anything else
        try:
            config = replace(
                presets[preset.value],
                head_dim=None,
                tie_word_embeddings=tied.value,
                **{field: slider.value for field, slider in shape.items()},
            )
            training = {
                "precision": precision.value,
                "fp32_gradients": fp32_gradients.value,
                "recompute": recompute.value,
            }
            bytes_of = breakdown(config, batch.value, sequence.value, **training)
            picture.value = treemap_html(layout(bytes_of, (0, 0, WIDTH, HEIGHT)))
            message.value = _summary(config, total_bytes(bytes_of))
        except ValueError as error:
            message.value = _problem(str(error))

    def load(_: Any = None) -> None:
        nonlocal loading
        loading = True
        config = presets[preset.value]
        for field, slider in shape.items():
            slider.value = getattr(config, field)
        tied.value = config.tie_word_embeddings
        loading = False
        draw()

    preset.observe(load, "value")
    for control in [*shape.values(), tied, batch, sequence, precision, fp32_gradients, recompute]:
        control.observe(draw, "value")
    load()
    left = widgets.VBox([preset, batch, sequence, shape["hidden_size"], shape["intermediate_size"]])
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    middle = widgets.VBox([*(shape[name] for name in names), tied])
    buttons = widgets.HBox([precision, recompute, fp32_gradients])
    return widgets.VBox([widgets.HBox([left, middle]), buttons, message, picture])


def treemap_html(parts: Sequence[Part]) -> str:
    """The treemap as positioned boxes; pointing at one tells its name and bytes."""
    boxes = "".join(_box_html(part) for part in parts)
    frame = f"position:relative;width:100%;max-width:{WIDTH}px;height:{HEIGHT}px"
    first = {part.category: part.colour for part in reversed(parts)}
    legend = " ".join(
        f'<span style="display:inline-block;margin-right:18px"><span style="display:inline-block;'
        f'width:12px;height:12px;background:{first[category]}"></span> '
        f"{html.escape(category)} {size(value)}</span>"
        for category, value in category_sums(parts).items()
    )
    return f'<div style="{frame}">{boxes}</div><div style="line-height:1.8">{legend}</div>'


def _box_html(part: Part) -> str:
    x, y, width, height = part.box
    amount = size(part.bytes)
    across = f"left:{100 * x / WIDTH:.3f}%;width:{100 * width / WIDTH:.3f}%"
    place = f"{across};top:{y:.1f}px;height:{height:.1f}px"
    look = f"background:{part.colour};color:{ink(part.colour)};border:1px solid white"
    text = ""
    if width > 7.5 * max(len(part.name), len(amount)) + 8 and height > 38:
        text = f"{html.escape(part.name)}<br>{amount}"
    elif width > 7.5 * (len(part.name) + len(amount)) + 12 and height > 20:
        text = f"{html.escape(part.name)} {amount}"
    return (
        f'<div title="{html.escape(part.label)}: {amount}" style="position:absolute;{place};{look};'
        "box-sizing:border-box;display:flex;align-items:center;justify-content:center;"
        f'text-align:center;overflow:hidden;font-size:13px;line-height:1.35">{text}</div>'
    )


def _summary(config: LlamaConfig, total: float) -> str:
    count = config.num_parameters()
    room = f"{percent(total / GPU_BYTES)} of one {size(GPU_BYTES)} GPU"
    if total > GPU_BYTES:
        room = f"{total / GPU_BYTES:.1f} GPUs of {size(GPU_BYTES)}, if it could be cut evenly"
    return f'<div style="font-size:15px"><b>{count:,} parameters · {size(total)}</b> · {room}</div>'


def _problem(text: str) -> str:
    return (
        f'<div style="font-size:15px;color:#B3261E"><b>not possible:</b> {html.escape(text)}</div>'
    )
