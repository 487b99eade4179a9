"""Chapter 02, recomputation: the mistakes people make, and the words that must tell them."""

from __future__ import annotations

import itertools

import torch
from torch.autograd.graph import saved_tensors_hooks

# ---- 2.1 checkpoint(fn, x) ----


def by_hooks(fn, x, restore=True, put_back=True, cut=True, early=False, late=False):
    """Right, but for what is said otherwise."""
    state, numbers, made = torch.get_rng_state(), itertools.count(), []

    def make():
        now = torch.get_rng_state()
        if restore:
            torch.set_rng_state(state)
        again = saved_tensors_hooks(lambda t: made.append(t.detach()), lambda t: t)
        with torch.enable_grad(), again:
            fn(x.detach().requires_grad_(x.requires_grad) if cut else x)
        if put_back:
            torch.set_rng_state(now)

    def get(number):
        if not made or late:
            made.clear()
            make()
        return made[number]

    with saved_tensors_hooks(lambda t: next(numbers), get):
        y = fn(x)
    if early:
        make()
    return y


def keeps_everything(fn, x):
    return fn(x)


def keeps_it_in_a_list(fn, x):
    kept = []
    with saved_tensors_hooks(lambda t: kept.append(t) or len(kept) - 1, lambda i: kept[i]):
        return fn(x)


def makes_it_again_at_once(fn, x):
    return by_hooks(fn, x, early=True)


def makes_it_again_for_each_tensor(fn, x):
    return by_hooks(fn, x, late=True)


def forgets_the_state(fn, x):
    return by_hooks(fn, x, restore=False)


def leaves_the_old_state(fn, x):
    return by_hooks(fn, x, put_back=False)


def seeds_both_calls(fn, x):
    def seeded(x):
        torch.manual_seed(7)
        return fn(x)

    return by_hooks(seeded, x)


def returns_nothing(fn, x):
    by_hooks(fn, x)


class Again(torch.autograd.Function):
    """The other way; flags say what is wrong with it."""

    @staticmethod
    def forward(ctx, fn, x, from_above, start):
        ctx.fn, ctx.from_above, ctx.state = fn, from_above, torch.get_rng_state()
        ctx.save_for_backward(x)
        return fn(x)

    @staticmethod
    def backward(ctx, grad_y):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            y = ctx.fn(x)
        torch.set_rng_state(now)
        y.backward(grad_y if ctx.from_above else torch.ones_like(grad_y))
        return None, x.grad, None, None


def no_input_with_a_gradient(fn, x):
    return Again.apply(fn, x, True, None)


def ignores_the_gradient_from_above(fn, x):
    return Again.apply(fn, x, False, torch.empty(0, requires_grad=True))


def no_graph_at_all(fn, x):
    with torch.no_grad():
        return fn(x)


# ---- 2.3 Again ----


class StateTooLate(torch.autograd.Function):
    """As planted."""

    @staticmethod
    def forward(ctx, fn, x):
        y = fn(x)
        ctx.fn, ctx.state = fn, torch.get_rng_state()
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            y = ctx.fn(x)
        torch.set_rng_state(now)
        y.backward(grad_y)
        return None, x.grad


class SeedInBoth(StateTooLate):
    @staticmethod
    def forward(ctx, fn, x):
        torch.manual_seed(3)
        ctx.state = torch.get_rng_state()
        y = fn(x)
        ctx.fn = fn
        ctx.save_for_backward(x)
        return y


class StateNotPutBack(StateTooLate):
    @staticmethod
    def forward(ctx, fn, x):
        ctx.fn, ctx.state = fn, torch.get_rng_state()
        ctx.save_for_backward(x)
        return fn(x)

    @staticmethod
    def backward(ctx, grad_y):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            y = ctx.fn(x)
        y.backward(grad_y)
        return None, x.grad


# ---- 2.4 choose_layers(kept, inputs, seconds, budget) ----


def cheapest(kept, inputs, seconds, budget, peak):
    layers = range(len(kept))
    some = [list(c) for n in range(len(kept) + 1) for c in itertools.combinations(layers, n)]
    fits = [c for c in some if peak(kept, inputs, c) <= budget]
    return min(fits, key=lambda c: sum(seconds[i] for i in c), default=None)


def waits_alone(kept, inputs, seconds, budget):
    """Forgets that a recomputed layer comes to life in backward."""

    def waits(kept, inputs, chosen):
        return sum(inputs[i] if i in chosen else kept[i] for i in range(len(kept)))

    return cheapest(kept, inputs, seconds, budget, waits)


def inputs_are_free(kept, inputs, seconds, budget):
    def peak(kept, inputs, chosen):
        waits = [0 if i in chosen else kept[i] for i in range(len(kept))]
        return max(sum(waits[:i]) + kept[i] for i in range(len(kept)))

    return cheapest(kept, inputs, seconds, budget, peak)


def right_peak(kept, inputs, chosen):
    waits = [inputs[i] if i in chosen else kept[i] for i in range(len(kept))]
    return max(sum(waits[:i]) + kept[i] for i in range(len(kept)))


def the_largest_first(kept, inputs, seconds, budget):
    order, chosen = sorted(range(len(kept)), key=lambda i: -kept[i]), []
    while right_peak(kept, inputs, chosen) > budget:
        if not order:
            return None
        chosen.append(order.pop(0))
    return chosen


def all_of_them(kept, inputs, seconds, budget):
    return list(range(len(kept)))


def empty_when_nothing_fits(kept, inputs, seconds, budget):
    return cheapest(kept, inputs, seconds, budget, right_peak) or []


def only_the_seconds(kept, inputs, seconds, budget):
    found = cheapest(kept, inputs, seconds, budget, right_peak)
    return None if found is None else sum(seconds[i] for i in found)


WRONG_ANSWERS = (
    ("2.1", keeps_everything, "expected x alone to be kept after forward"),
    ("2.1", keeps_it_in_a_list, "Hint: what fn makes must not wait for backward"),
    ("2.1", makes_it_again_at_once, "expected 1 call of fn in forward, got 2"),
    ("2.1", makes_it_again_for_each_tensor, "expected 2 calls of fn, one in backward, got"),
    (
        "2.1",
        forgets_the_state,
        "of 1000 places otherwise. Hint: the second call must draw the mask",
    ),
    ("2.1", leaves_the_old_state, "after backward: expected the next random numbers"),
    ("2.1", seeds_both_calls, "Hint: leave the random numbers of forward alone"),
    ("2.1", returns_nothing, "Hint: return what fn(x) returns"),
    ("2.1", no_input_with_a_gradient, "Hint: fn has weights: inside your own Function"),
    ("2.1", ignores_the_gradient_from_above, "Hint: the gradient of the result comes from above"),
    ("2.1", no_graph_at_all, "expected a result with a gradient to compute"),
    ("2.2", (3 * 2 * 16 * 32, 24_576, 49_152), "Hint: bytes, not numbers"),
    ("2.2", (12_288 // 3, 24_576, 49_152), "Hint: there are three blocks, and each has an input"),
    ("2.2", (12_288, 24_576 // 2, 49_152), "scores_bytes: expected 24576, got 12288"),
    ("2.2", (12_288, 24_576 // 16, 49_152), "Hint: one number for each *pair* of tokens"),
    ("2.2", (12_288, 24_576, 3 * 49_152), "Hint: one block at a time is at work"),
    ("2.2", (12_288, 24_576, 49_152 * 3 // 4), "Hint: gate, silu(gate), up and their product"),
    ("2.3", StateTooLate, "of 1000 places otherwise. Hint: the second call must draw"),
    ("2.3", SeedInBoth, "Hint: leave the random numbers of forward alone"),
    ("2.3", StateNotPutBack, "after backward: expected the next random numbers"),
    ("2.4", waits_alone, "Hint: when backward is in a recomputed layer"),
    ("2.4", inputs_are_free, "Hint: an input that is kept takes memory, too"),
    ("2.4", the_largest_first, "Hint: few layers suffice"),
    ("2.4", all_of_them, "expected 0 seconds more, got 4 with layers [0, 1, 2, 3]"),
    ("2.4", empty_when_nothing_fits, "expected None, got []"),
    ("2.4", only_the_seconds, "expected a list of numbers from 0 to 3, got 0"),
)
