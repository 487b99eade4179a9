"""Chapter 03, data parallelism: the mistakes people make, and the words that must tell them."""

from __future__ import annotations

import torch

from picotron_edu.ranks import all_gather, all_reduce, world

# ---- 3.2 average_gradients(params, counted, axis) ----


def mean_of_means(params, counted, axis):
    for param in params:
        all_reduce(param.grad, axis, op="avg")


def sum_of_means(params, counted, axis):
    for param in params:
        all_reduce(param.grad, axis)


def sum_of_sums(params, counted, axis):
    for param in params:
        all_reduce(param.grad.mul_(counted), axis)


def weighs_and_never_adds(params, counted, axis):
    total = all_reduce(torch.tensor(counted), axis)
    for param in params:
        param.grad *= counted / total


def weighs_and_averages(params, counted, axis):
    total = all_reduce(torch.tensor(counted), axis)
    for param in params:
        all_reduce(param.grad.mul_(counted / total), axis, op="avg")


def returns_in_place_of_writing(params, counted, axis):
    total = all_reduce(torch.tensor(counted), axis)
    return [all_reduce(param.grad * counted / total, axis) for param in params]


def stays_away_without_tokens(params, counted, axis):
    if counted:
        right_weights(params, counted, axis)


def right_weights(params, counted, axis):
    total = all_reduce(torch.tensor(counted), axis)
    for param in params:
        all_reduce(param.grad.mul_(counted / total), axis)


def gathers_gradients(params, counted, axis):
    counts = all_gather(torch.tensor([counted]), axis)
    for param in params:
        of_all = all_gather(param.grad[None], axis)
        share = (counts / counts.sum()).view(-1, *[1] * param.dim())
        param.grad.copy_((of_all * share).sum(0))


def asks_the_world(params, counted, axis):
    right_weights(params, counted, world())


# ---- 3.3 Buckets(model, axis, bucket_bytes) ----


class Right:
    """What the wrong ones below change one thing of."""

    def __init__(self, model, axis, bucket_bytes):
        self.axis, self.started = axis, []
        self.buckets, filled = [], bucket_bytes
        for param in self.in_order(list(model.parameters())):
            if filled + param.nbytes > bucket_bytes:
                self.buckets.append([])
                filled = 0
            self.buckets[-1].append(param)
            filled += param.nbytes
        for number, bucket in enumerate(self.buckets):
            for param in bucket:
                hook = self.hook_of(number)
                param.register_post_accumulate_grad_hook(hook)
        self.waiting = [len(bucket) for bucket in self.buckets]

    def in_order(self, params):
        return params[::-1]

    def hook_of(self, number):
        return lambda param: self.ready(number)

    def ready(self, number):
        self.waiting[number] -= 1
        if self.waiting[number] == 0:
            self.start(number)

    def start(self, number):
        flat = torch.cat([param.grad.flatten() for param in self.buckets[number]])
        self.started.append((number, self.send(flat)))

    def send(self, flat):
        return all_reduce(flat, self.axis, async_op=True)

    def finish(self):
        for number, handle in self.started:
            self.put_back(number, handle.wait())
        self.started = []
        self.waiting = [len(bucket) for bucket in self.buckets]

    def put_back(self, number, flat):
        sizes = [param.numel() for param in self.buckets[number]]
        for param, piece in zip(self.buckets[number], flat.split(sizes)):
            param.grad = piece.view_as(param)


class NeverPutsBack(Right):
    def put_back(self, number, flat):
        pass


class NeverBeginsAnew(Right):
    def finish(self):
        for number, handle in self.started:
            self.put_back(number, handle.wait())
        self.started = []


class Averages(Right):
    def send(self, flat):
        return all_reduce(flat, self.axis, "avg", async_op=True)


class FromTheFirst(Right):
    def in_order(self, params):
        return params


class OneEach(Right):
    def __init__(self, model, axis, bucket_bytes):
        super().__init__(model, axis, 0)


class AllInOne(Right):
    def __init__(self, model, axis, bucket_bytes):
        super().__init__(model, axis, 1e9)


class AfterBackward(Right):
    def ready(self, number):
        pass

    def finish(self):
        for number in range(len(self.buckets)):
            self.start(number)
        super().finish()


class WithTheLastOfAll(Right):
    def ready(self, number):
        self.waiting[number] -= 1
        if not any(self.waiting):
            for each in range(len(self.buckets)):
                self.start(each)


class WaitsInTheHook(Right):
    def start(self, number):
        super().start(number)
        self.started[-1][1].wait()


# ---- 3.4 Overlap, run_window(parallel, model, micro_batches, counted) ----


class RightOverlap:
    def __init__(self, model, axis):
        self.axis, self.syncing, self.handles = axis, True, []
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(self.ready)

    def ready(self, param):
        if self.syncing:
            self.handles.append(all_reduce(param.grad, self.axis, async_op=True))

    def no_sync(self):
        return Paused(self)

    def finish(self):
        for handle in self.handles:
            handle.wait()
        self.handles = []


class Paused:
    """A context in which `syncing` is False."""

    def __init__(self, overlap):
        self.overlap = overlap

    def __enter__(self):
        self.overlap.syncing = False

    def __exit__(self, kind, *_):
        self.overlap.syncing = True


class PausedForEver(Paused):
    def __exit__(self, kind, *_):
        self.overlap.syncing = kind is None


class Swallows(Paused):
    def __exit__(self, *_):
        super().__exit__(*_)
        return True


class SwallowsErrors(RightOverlap):
    def no_sync(self):
        return Swallows(self)


class NoFinally(RightOverlap):
    def no_sync(self):
        return PausedForEver(self)


class AllAtTheEnd(RightOverlap):
    def __init__(self, model, axis):
        self.axis, self.params = axis, list(model.parameters())

    def finish(self):
        for param in self.params:
            all_reduce(param.grad, self.axis)


class NothingIsPaused(RightOverlap):
    def ready(self, param):
        self.handles.append(all_reduce(param.grad, self.axis, async_op=True))


def backward(model, batch, counted):
    logits_NV = model(batch.inputs_BS).flatten(0, 1)
    labels_N = batch.labels_BS.flatten()
    loss = torch.nn.functional.cross_entropy(logits_NV, labels_N, reduction="sum")
    (loss / counted).backward()


def right_window(parallel, model, micro_batches, counted):
    *firsts, last = micro_batches
    for batch in firsts:
        with parallel.no_sync():
            backward(model, batch, counted)
    backward(model, last, counted)


def syncs_the_first(parallel, model, micro_batches, counted):
    first, *others = micro_batches
    backward(model, first, counted)
    for batch in others:
        with parallel.no_sync():
            backward(model, batch, counted)


def syncs_each(parallel, model, micro_batches, counted):
    for batch in micro_batches:
        backward(model, batch, counted)


def counts_to_three(parallel, model, micro_batches, counted):
    for i, batch in enumerate(micro_batches):
        if (i + 1) % 3 == 0:
            backward(model, batch, counted)
        else:
            with parallel.no_sync():
                backward(model, batch, counted)


def forgets_the_others(parallel, model, micro_batches, counted):
    for batch in micro_batches:
        model.zero_grad()
        with parallel.no_sync():
            backward(model, batch, counted)
    model.zero_grad()
    backward(model, batch, counted)


# ---- 3.5 install_hooks(model, axis, sync), accumulate(model, micro_batches, counted, sync) ----


def hooks_on(what):
    def install_hooks(model, axis, sync):
        def reduce(param):
            if sync[0]:
                what(param, axis)

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(reduce)

    return install_hooks


def last_of(micro_batches, i):
    return i == len(micro_batches) - 1


def loop(syncs):
    def accumulate(model, micro_batches, counted, sync):
        for i, batch in enumerate(micro_batches):
            sync[0] = syncs(micro_batches, i)
            backward(model, batch, counted)

    return accumulate


of_gradients = hooks_on(lambda param, axis: all_reduce(param.grad, axis))
of_weights = hooks_on(lambda param, axis: all_reduce(param, axis, op="avg"))
of_summed_weights = hooks_on(lambda param, axis: all_reduce(param, axis))
of_the_world = hooks_on(lambda param, axis: all_reduce(param.grad, world()))
of_means_times_two = hooks_on(lambda param, axis: all_reduce(param.grad, axis, op="avg").mul_(2))
in_the_first, in_the_last = loop(lambda batches, i: i == 0), loop(last_of)
in_each = loop(lambda batches, i: True)


WRONG_ANSWERS = (
    ("3.1", (48, 6, 180_000, 180_000), "4 times too large. Hint: of one rank"),
    ("3.1", (12, 5, 180_000, 180_000), "Hint: a gradient is not cut"),
    ("3.1", (12, 6, 120_000, 180_000), "Hint: that is N, the size of the gradients"),
    ("3.1", (12, 6, 180_000, 540_000), "Hint: only the last of the three backward passes sends"),
    ("3.2", mean_of_means, "gradient of 2 ranks with [3, 9] tokens: expected"),
    ("3.2", mean_of_means, "Hint: a mean of means: a rank with few tokens"),
    ("3.2", sum_of_means, "Hint: means cannot be added"),
    ("3.2", sum_of_sums, "12 times too large. Hint: that is the gradient of the sum"),
    ("3.2", weighs_and_never_adds, "Hint: that is this rank's own part"),
    ("3.2", weighs_and_averages, "2 times too small. Hint: sum what is weighted"),
    ("3.2", returns_in_place_of_writing, "Hint: nothing has changed: write the result into"),
    ("3.2", stays_away_without_tokens, "Hint: every rank must send, also one that has counted no"),
    ("3.2", gathers_gradients, "weigh first, then one all_reduce of each gradient"),
    ("3.2", asks_the_world, "in two pairs, 0 with 2 and 1 with 3"),
    ("3.3", NeverPutsBack, "Hint: that is this rank's own: finish() must wait"),
    ("3.3", NeverBeginsAnew, "in step 2: expected"),
    ("3.3", Averages, "2 times too small. Hint: add up, do not average"),
    ("3.3", FromTheFirst, "Hint: fill buckets from the last parameter to the first"),
    ("3.3", OneEach, "expected 5 messages, got 10. Hint: a bucket takes the next parameter"),
    ("3.3", AllInOne, "expected 5 messages, got 1. Hint: a bucket takes the next parameter"),
    ("3.3", AfterBackward, "no message begins before finish(). Hint: start a bucket's message in"),
    ("3.3", WithTheLastOfAll, "message 1 of 5 begins later than the last gradient of its bucket"),
    ("3.3", WaitsInTheHook, "messages were waited for during backward. Hint: all_reduce(…, async"),
    ("3.4", (RightOverlap, syncs_the_first), "messages begin before the last backward"),
    ("3.4", (RightOverlap, syncs_each), "expected 12 messages, one a parameter, got 36"),
    ("3.4", (NothingIsPaused, right_window), "got 36. Hint: only the last backward of a window"),
    ("3.4", (AllAtTheEnd, right_window), "messages begin in finish()"),
    ("3.4", (RightOverlap, counts_to_three), "in window 2, of 1 micro-batch: expected 12 messages"),
    ("3.4", (RightOverlap, counts_to_three), "Hint: the data may end early: know the last one"),
    ("3.4", (RightOverlap, forgets_the_others), "Hint: only the last micro-batch is there"),
    ("3.4", (NoFinally, right_window), "after an error inside no_sync() nothing is sent any more"),
    ("3.4", (SwallowsErrors, right_window), "an error inside no_sync() never reaches its caller"),
    ("3.5", (of_the_world, in_the_last), "in two pairs, 0 with 2 and 1 with 3"),
    ("3.5", (of_means_times_two, in_the_last), "2 times too small. Hint: all micro-batches of all"),
    ("3.5", (of_weights, in_the_last), "Hint: that is this rank's own: no backward"),
    ("3.5", (of_summed_weights, in_the_last), "expected the weights as they were, they changed"),
    ("3.5", (of_gradients, in_the_first), "Hint: the first micro-batch was summed"),
    ("3.5", (of_gradients, in_each), "Hint: each backward sums what earlier ones have summed"),
)
