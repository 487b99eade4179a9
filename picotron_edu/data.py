"""Text in, batches out: all ranks, layouts and restarts read the same tokens at the same step.

    documents ──tokens──▶ one long file, a separator after each document (no padding)
    │ sample 0 │ sample 1 │ sample 2 │ …     sample i = tokens[i·S : i·S + S + 1]
                                             inputs = its first S, labels = its last S tokens

The order is a stream of samples: epoch 0 in a shuffled order, then epoch 1 in another one, and so
on without a gap. Batch `step` is the next global_batch_size samples of that stream, so

* it is a pure function of (seed, step): to resume at step 7000, ask for batch(7000);
* each sample is read once per epoch, in another order in each;
* the global batch does not depend on the number of ranks: data-parallel rank i of n takes its
  rows of it. Ranks that share one model (tensor, pipeline, …) ask with one index.

Tokens lie in a memory-mapped file in the user's cache folder, read by all ranks.
"""

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from picotron_edu.layout import piece_of
from picotron_edu.presets import check_choice, check_count
from picotron_edu.text import Tokenizer, documents, tokenizer_from

VALIDATION_SHARE = 0.1  # the end of the text is kept for validation


@dataclass(frozen=True)
class Batch:
    """int64. labels_BS[b, s] is the token after inputs_BS[b, s]; a label of −100 is not counted."""

    inputs_BS: Tensor
    labels_BS: Tensor
    positions_S: Tensor | None = None  # where in the text they stand; None: 0, 1, 2, …

    def __len__(self) -> int:
        return len(self.inputs_BS)

    @property
    def counted(self) -> Tensor:
        """How many labels are counted."""
        return (self.labels_BS != -100).sum()

    def rows(self, part: slice) -> "Batch":
        return Batch(self.inputs_BS[part], self.labels_BS[part], self.positions_S)

    def padded(self, rows: int) -> "Batch":
        """Filled up with rows that never count: so all ranks take equally many micro-batches."""
        more = rows - len(self), self.inputs_BS.shape[1]
        fill = self.inputs_BS.new_zeros(more), self.labels_BS.new_full(more, -100)
        inputs_BS, labels_BS = map(torch.cat, zip((self.inputs_BS, self.labels_BS), fill))
        return Batch(inputs_BS, labels_BS, self.positions_S)

    def split(self, micro_batch_size: int) -> list["Batch"]:
        """Micro-batches; the last one is smaller where the rows do not divide."""
        check_count("micro_batch_size", micro_batch_size)
        starts = range(0, len(self), micro_batch_size)
        return [self.rows(slice(start, start + micro_batch_size)) for start in starts]

    def to(self, device: torch.device | str) -> "Batch":
        moved = None if self.positions_S is None else self.positions_S.to(device)
        return Batch(self.inputs_BS.to(device), self.labels_BS.to(device), moved)


class TextData:
    def __init__(
        self,
        source: str | Path = "manual",
        sequence_length: int = 256,
        global_batch_size: int = 8,
        seed: int = 0,
        tokenizer: str | None = None,
        split: Literal["train", "validation"] = "train",
        megabytes: int = 100,
        cache: Path | None = None,
    ) -> None:
        """`tokenizer`: path of a tokenizer.json, None for bytes. `megabytes`: read no more text."""
        check_count("sequence_length", sequence_length)
        check_count("global_batch_size", global_batch_size)
        check_count("megabytes", megabytes)
        check_choice("split", split, ("train", "validation"))
        source = str(source)
        self.sequence_length, self.global_batch_size = sequence_length, global_batch_size
        self.seed = seed
        self.tokenizer: Tokenizer = tokenizer_from(tokenizer)
        self.vocab_size = self.tokenizer.vocab_size
        tokens = token_file(source, self.tokenizer, megabytes, cache)
        border = round(len(tokens) * (1 - VALIDATION_SHARE))
        self.tokens = tokens[:border] if split == "train" else tokens[border:]
        self.samples = max(len(self.tokens) - 1, 0) // sequence_length  # the last label is one more
        needed = global_batch_size if split == "train" else 1
        if self.samples < needed:
            raise ValueError(
                f"data {source!r} is too short: its {len(self.tokens)} {split} tokens make "
                f"{self.samples} samples of sequence_length {sequence_length}, but {needed} are "
                f"needed (global_batch_size {global_batch_size}): take more text or smaller numbers"
            )

    @property
    def steps_per_epoch(self) -> int:
        """After this many steps each sample has been read at least once."""
        return -(-self.samples // self.global_batch_size)

    def epoch_of(self, step: int) -> int:
        """The epoch that the first row of batch `step` belongs to."""
        return step * self.global_batch_size // self.samples

    def sample_numbers(self, step: int) -> list[int]:
        """Which samples batch `step` holds: the next ones of the stream of shuffled epochs."""
        first = step * self.global_batch_size
        places = range(first, first + self.global_batch_size)
        epochs = [divmod(place, self.samples) for place in places]
        return [int(order(self.samples, self.seed, epoch)[nth]) for epoch, nth in epochs]

    def batch(self, step: int, index: int = 0, count: int = 1) -> Batch:
        """The rows of data-parallel rank `index` of `count`: disjoint, together the global batch.

        Where `count` does not divide the batch, the last ranks' last row does not count.
        """
        if not 0 <= index < count <= self.global_batch_size:
            raise ValueError(
                f"index {index} of count {count} ranks: count must be at most global_batch_size "
                f"({self.global_batch_size}), so that each rank has a row, and index below count"
            )
        numbers = self.sample_numbers(step)
        mine = numbers[piece_of(len(numbers), count, index)]
        return self.read(mine).padded(-(-len(numbers) // count))

    def validation_batches(self, index: int = 0, count: int = 1) -> Iterator[Batch]:
        """All samples in order, each counted once by exactly one rank.

        Every rank gets equally many batches of equally many rows, so that none waits for another.
        """
        rows = -(-self.global_batch_size // count)
        for first in range(index * rows, self.samples + index * rows, rows * count):
            yield self.read(range(first, min(first + rows, self.samples))).padded(rows)

    def read(self, numbers: Iterable[int]) -> Batch:
        S = self.sequence_length
        rows = [self.tokens[n * S : n * S + S + 1] for n in numbers]
        tokens_BS1 = torch.from_numpy(np.array(rows, dtype=np.int64).reshape(-1, S + 1))
        return Batch(tokens_BS1[:, :-1].contiguous(), tokens_BS1[:, 1:].contiguous())

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, tokens: Iterable[int]) -> str:
        return self.tokenizer.decode([int(token) for token in tokens])


@lru_cache(maxsize=4)
def order(samples: int, seed: int, epoch: int) -> Tensor:
    """The sample numbers, shuffled: a pure function, remembered for the next step."""
    draw = torch.Generator().manual_seed(number_from("order", seed, epoch))
    return torch.randperm(samples, generator=draw)


def number_from(*parts: object) -> int:
    """A 63-bit number that depends on all parts, the same on every machine."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def token_file(
    source: str, tokenizer: Tokenizer, megabytes: int, cache: Path | None = None
) -> np.ndarray:
    """The tokens of a source as a memory-mapped array; made at the first call, found again later.

    The name holds a hash of the text and of the tokenizer, so a changed text is another file, and
    the number of tokens, so a file that was cut short is written anew. The file is written under a
    name of its own and then renamed, which is atomic: many ranks may do this at once, and each sees
    nothing or the whole.
    """
    wide: type[np.unsignedinteger] = next(
        kind
        for kind in (np.uint8, np.uint16, np.uint32)
        if tokenizer.vocab_size - 1 <= np.iinfo(kind).max
    )
    content = source if source.startswith("hf:") else hash_of(limited(source, megabytes))
    folder = cache if cache is not None else cache_folder()
    key = f"{number_from(content, tokenizer.key, megabytes):016x}"
    path = whole_file(folder, key, np.dtype(wide))
    if path is None:
        folder.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=folder, suffix=".draft")
        try:
            with os.fdopen(handle, "wb") as file:
                for text in limited(source, megabytes):
                    end = [] if tokenizer.separator is None else [tokenizer.separator]
                    np.fromiter([*tokenizer.encode(text), *end], dtype=wide).tofile(file)
                count = file.tell() // np.dtype(wide).itemsize
                if count == 0:
                    raise ValueError(f"data {source!r} holds no text")
            path = folder / f"{key}-{count}.{np.dtype(wide).name}"
            os.replace(draft, path)
        except PermissionError:  # Windows: another rank was quicker and has the file open
            path = whole_file(folder, key, np.dtype(wide))
            if path is None:
                raise
        finally:
            Path(draft).unlink(missing_ok=True)
    return np.memmap(path, dtype=wide, mode="r")


def whole_file(folder: Path, key: str, dtype: np.dtype) -> Path | None:
    """The token file of this key, if it is as long as its name says."""
    for path in folder.glob(f"{key}-*.{dtype.name}"):
        if path.stat().st_size == int(path.stem.removeprefix(f"{key}-")) * dtype.itemsize:
            return path
    return None


def limited(source: str, megabytes: int) -> Iterator[str]:
    """The documents of a source, at most `megabytes` of text; empty ones are skipped."""
    room = megabytes * 1_000_000
    for text in documents(source):
        if text.strip() and room > 0:
            yield text[:room]
            room -= len(text)
        if room <= 0:
            return


def hash_of(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode(errors="replace") + b"\0")
    return digest.hexdigest()


def cache_folder() -> Path:
    """~/.cache/picotron-edu, or a folder beside the temporary files where the home is read-only."""
    home = Path.home() / ".cache" / "picotron-edu"
    try:
        home.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=home).close()
        return home
    except OSError:
        user = os.getuid() if hasattr(os, "getuid") else "user"
        return Path(tempfile.gettempdir()) / f"picotron-edu-{user}"
