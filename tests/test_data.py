"""Batches are a pure function of (seed, step), the same for every layout; text errors are clear."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from picotron_edu.data import Batch, TextData, token_file
from picotron_edu.text import Bytes


@pytest.fixture
def seven(tmp_path):
    """A text of samples of four tokens: sample n is the letter number n, four times."""
    text = "".join(letter * 4 for letter in "abcdefg") + "........"
    (tmp_path / "seven.txt").write_text(text)

    def data(**changes):
        settings = {
            "sequence_length": 4,
            "global_batch_size": 3,
            "cache": tmp_path / "cache",
        } | changes
        source = settings.pop("source", str(tmp_path / "seven.txt"))
        return TextData(source, **settings)

    assert data().samples == 8  # 33 training tokens of 37: the eighth is of dots
    return data


def letters(batch: Batch) -> str:
    return "".join(chr(row[0]) for row in batch.inputs_BS)


def test_labels_are_the_inputs_one_token_further(seven):
    batch = seven().batch(0)
    assert batch.inputs_BS.dtype == batch.labels_BS.dtype == torch.int64
    assert torch.equal(batch.inputs_BS[:, 1:], batch.labels_BS[:, :-1])
    stream = seven().tokens
    for row, sample in enumerate(seven().sample_numbers(0)):
        assert batch.labels_BS[row, -1] == stream[sample * 4 + 4]  # one beyond the sample itself


def test_a_batch_is_a_pure_function_of_seed_and_step(seven):
    one, two = seven(), seven()
    forwards = [one.batch(step) for step in range(6)]
    backwards = [two.batch(step) for step in reversed(range(6))][::-1]  # as after a restart
    torch.manual_seed(5)
    for a, b in zip(forwards, backwards, strict=True):
        assert torch.equal(a.inputs_BS, b.inputs_BS) and torch.equal(a.labels_BS, b.labels_BS)
    other = [seven(seed=1).batch(step) for step in range(6)]
    assert [letters(b) for b in forwards] != [letters(b) for b in other]


def test_every_sample_comes_once_per_epoch_and_the_order_changes(seven):
    """Eight samples in batches of three: an epoch ends inside a batch, and nothing is lost."""
    data = seven()
    stream = [n for step in range(8) for n in data.sample_numbers(step)]
    epochs = [stream[start : start + 8] for start in (0, 8, 16)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(8))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert [data.epoch_of(step) for step in range(8)] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert data.steps_per_epoch == 3


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_ranks_read_disjoint_rows_of_the_same_global_batch(seven, count):
    data = seven(global_batch_size=5)
    for step in range(4):
        parts, whole = [data.batch(step, i, count) for i in range(count)], data.batch(step)
        rows = [(p.labels_BS != -100).any(dim=1) for p in parts]
        for name in ("inputs_BS", "labels_BS"):
            counted = [getattr(part, name)[row] for part, row in zip(parts, rows)]
            assert torch.equal(torch.cat(counted), getattr(whole, name))
        assert len({len(part) for part in parts}) == 1, "a rank has another number of rows"
        assert max(row.sum() for row in rows) - min(row.sum() for row in rows) <= 1


def test_four_ranks_as_tp2_dp2_see_two_different_inputs(seven):
    """Ranks of one model-parallel group ask with the same data-parallel index (case 14)."""
    data = seven(global_batch_size=4)
    seen = [letters(data.batch(0, index=rank // 2, count=2)) for rank in range(4)]
    assert seen[0] == seen[1] != seen[2] == seen[3]
    assert not set(seen[0]) & set(seen[2])


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_validation_counts_each_sample_once_for_any_number_of_ranks(tmp_path, count):
    """Samples of value 0..6: their mean is 3.0; padding by repetition gives 2.625 (case 12)."""
    (tmp_path / "text.txt").write_bytes(b"x" * 261 + b"".join(bytes([n]) * 4 for n in range(7)))
    data = TextData(str(tmp_path / "text.txt"), 4, 4, split="validation", cache=tmp_path / "cache")
    assert data.samples == 7
    total = counted = 0
    batches = [list(data.validation_batches(index, count)) for index in range(count)]
    assert len({len(mine) for mine in batches}) == 1  # no rank runs out before the others
    assert len({b.inputs_BS.shape for mine in batches for b in mine}) == 1
    for batch in (b for mine in batches for b in mine):
        rows = batch.labels_BS[:, 0] != -100
        total += batch.inputs_BS[rows, 0].sum().item()
        counted += rows.sum().item()
    assert (counted, total / counted) == (7, 3.0)


def test_train_and_validation_do_not_overlap(seven):
    train, validation = seven(), seven(split="validation", sequence_length=3)
    assert len(train.tokens) + len(validation.tokens) == 37  # 36 letters and the separator
    assert bytes(train.tokens).count(b"g") == 4
    assert set(bytes(validation.tokens)) == {ord("."), 0}


def test_more_ranks_than_rows_or_a_wrong_index_is_refused(seven):
    with pytest.raises(ValueError, match=r"count 4 .*global_batch_size \(3\)"):
        seven().batch(0, index=0, count=4)
    with pytest.raises(ValueError, match="index 2 of count 2"):
        seven().batch(0, index=2, count=2)


def test_micro_batches_cover_the_rows_and_the_last_may_be_ragged(seven):
    batch = seven(global_batch_size=7).batch(0)
    micro = batch.split(3)
    assert [len(m) for m in micro] == [3, 3, 1]
    assert torch.equal(torch.cat([m.labels_BS for m in micro]), batch.labels_BS)
    assert batch.counted == 28


def test_the_manual_needs_no_download_and_reads_as_text(tmp_path):
    data = TextData(cache=tmp_path)
    assert data.vocab_size == 256
    assert len(data.tokens) > 300_000
    assert data.decode(data.batch(0).inputs_BS[0]).isprintable() is False  # it has line ends
    everything = data.decode(data.tokens)
    assert "Assert statements are a convenient way" in everything
    assert data.decode(data.encode("naïve ✓")) == "naïve ✓"


def test_documents_are_packed_with_a_separator_after_each(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "more": 1}\n')
    tokens = token_file(str(tmp_path / "a.jsonl"), Bytes(), 1, tmp_path / "cache")
    assert bytes(tokens) == b"one\0two\0"


def test_a_megabyte_limit_is_kept(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 1_500_000)
    assert len(token_file(str(tmp_path / "a.txt"), Bytes(), 1, tmp_path / "cache")) == 1_000_001


def test_a_changed_text_is_read_anew(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("first")
    assert bytes(token_file(str(file), Bytes(), 1, tmp_path / "cache")) == b"first\0"
    file.write_text("other")
    assert bytes(token_file(str(file), Bytes(), 1, tmp_path / "cache")) == b"other\0"


def test_a_token_file_that_was_cut_short_is_written_anew(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    settings = str(tmp_path / "a.txt"), Bytes(), 1, tmp_path / "cache"
    token_file(*settings)
    (file,) = (tmp_path / "cache").iterdir()
    file.write_bytes(b"some")
    assert bytes(token_file(*settings)) == b"some text\0"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"split": "valid"}, "split must be one of 'train', 'validation', got 'valid'"),
        ({"global_batch_size": 0}, "global_batch_size must be at least 1, got 0"),
        ({"global_batch_size": -1}, "global_batch_size must be at least 1, got -1"),
        ({"sequence_length": 0}, "sequence_length must be at least 1, got 0"),
    ],
)
def test_impossible_numbers_are_refused(seven, settings, reason):
    with pytest.raises(ValueError, match=reason):
        seven(**settings)
    with pytest.raises(ValueError, match="micro_batch_size must be at least 1, got 0"):
        seven().batch(0).split(0)


def test_a_path_is_a_source_too(seven, tmp_path):
    assert seven(source=tmp_path / "seven.txt").samples == 8


def test_many_ranks_may_write_the_cache_at_once(tmp_path):
    """Threads in place of processes: the files, their names and the race are the same."""
    (tmp_path / "a.txt").write_text("x" * 300_000 + "the end.")

    def last_tokens(_: int) -> bytes:
        return bytes(token_file(str(tmp_path / "a.txt"), Bytes(), 1, tmp_path / "cache"))[-9:]

    with ThreadPoolExecutor(8) as ranks:
        assert list(ranks.map(last_tokens, range(8))) == [b"the end.\0"] * 8
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".uint8"]  # no draft is left


def test_tokens_are_mapped_and_stored_in_the_narrowest_type(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    tokens = token_file(str(tmp_path / "a.txt"), Bytes(), 1, tmp_path / "cache")
    assert isinstance(tokens, np.memmap) and tokens.dtype == np.uint8

    class Wide(Bytes):
        vocab_size, separator, key = 70_000, 69_999, "wide"

    wide = token_file(str(tmp_path / "a.txt"), Wide(), 1, tmp_path / "cache")
    assert wide.dtype == np.uint32 and wide[-1] == 69_999
