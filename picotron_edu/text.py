"""Where text comes from, and how it becomes tokens.

    documents("manual")        the Python manual that ships with every interpreter: no download
    documents("notes.txt")     one file is one document
    documents("news.jsonl")    each line is a JSON object, its "text" a document
    documents("news.parquet")  each row is a document, in the column "text"
    documents("folder/")       all such files in it, in the order of their names
    documents("hf:HuggingFaceFW/fineweb-edu:sample-10BT")
                               hf:<dataset> or hf:<dataset>:<configuration>, streamed from the
                               Hugging Face hub: pip install "picotron-edu[datasets]"

A tokenizer has `vocab_size`, `separator` (the token after each document, or None), `key` (to tell
caches apart), `encode` and `decode`. The default needs nothing: the 256 values of a byte are the
tokens, and the unused byte 0 ends a document.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

SUFFIXES = (".txt", ".jsonl", ".parquet")
END_OF_TEXT = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "[SEP]")


def documents(source: str) -> Iterator[str]:
    """The documents of a source, one by one; ValueError or FileNotFoundError say what is wrong."""
    if source == "manual":
        yield from python_manual()
    elif source.startswith("hf:"):
        yield from hugging_face(source.removeprefix("hf:"))
    else:
        for path in files(source):
            yield from READERS[path.suffix.lower()](path)


def check_source(source: str | Path) -> None:
    """Raise what `documents(source)` would raise at once, without reading anything."""
    source = str(source)
    if source != "manual" and not source.startswith("hf:"):
        files(source)


def python_manual() -> Iterator[str]:
    """Some 80 chapters, 460 kB: the text behind `help("topics")`."""
    try:
        from pydoc_data import topics
    except ImportError:
        raise ValueError(
            "data 'manual' needs the module pydoc_data, which this Python was installed without; "
            "give a text of your own: data = a .txt, .jsonl or .parquet file"
        ) from None
    for name in sorted(topics.topics):
        yield topics.topics[name]


def hugging_face(name: str) -> Iterator[str]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(
            f"data 'hf:{name}' needs the package datasets: pip install 'picotron-edu[datasets]'"
        ) from None
    dataset, _, config = name.partition(":")
    try:
        stream = load_dataset(dataset, config or None, split="train", streaming=True)
    except Exception as error:  # no network, no such name, …: the library raises many kinds
        raise ValueError(f"data 'hf:{name}' cannot be loaded: {error}") from None
    for number, row in enumerate(stream):
        yield text_of(row, f"hf:{name}, row {number}")


def files(source: str) -> list[Path]:
    path = Path(source).expanduser()
    if not source or not path.exists():  # an empty path would be the current folder
        raise FileNotFoundError(
            f"data {source!r} does not exist; allowed are 'manual', a .txt, .jsonl or .parquet "
            "file, a folder of them, or 'hf:<dataset>'"
        )
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
        if not found:
            raise ValueError(f"data {source!r} holds no file that ends in {', '.join(SUFFIXES)}")
        return found
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(
            f"data {source!r} ends in {path.suffix!r}; allowed are {', '.join(SUFFIXES)}"
        )
    return [path]


def read_txt(path: Path) -> Iterator[str]:
    try:
        yield path.read_text(encoding="utf-8-sig")  # without the mark that Windows may put first
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None


def read_jsonl(path: Path) -> Iterator[str]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}, line {number}"
            if line.strip():
                try:
                    row = json.loads(line.decode("utf-8-sig"))
                except UnicodeDecodeError as error:
                    raise ValueError(f"{where} is not UTF-8 text: {error}") from None
                except json.JSONDecodeError as error:
                    raise ValueError(f"{where} is not JSON: {error}") from None
                yield text_of(row, where)


def read_parquet(path: Path) -> Iterator[str]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ValueError(
            f"{path} needs the package pyarrow: pip install 'picotron-edu[text]'"
        ) from None
    try:
        file = parquet.ParquetFile(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is not a valid parquet file: {error}") from None
    if "text" not in file.schema_arrow.names:
        raise ValueError(f"{path} has no column 'text', only {', '.join(file.schema_arrow.names)}")
    for batch in file.iter_batches(columns=["text"]):
        for row in batch.to_pylist():
            yield text_of(row, str(path))


READERS = {".txt": read_txt, ".jsonl": read_jsonl, ".parquet": read_parquet}


def text_of(row: Any, where: str) -> str:
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise ValueError(f'{where} has no "text" field that holds a string')
    return row["text"]


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int: ...
    @property
    def separator(self) -> int | None: ...
    @property
    def key(self) -> str: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: list[int]) -> str: ...


class Bytes:
    """Each byte of the UTF-8 text is a token."""

    vocab_size = 256
    separator = 0
    key = "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode(errors="replace"))

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


def tokenizer_file(path: str) -> Path:
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(
            f"tokenizer {str(path)!r} does not exist; give a tokenizer.json, or none for bytes"
        )
    return file


class FromFile:
    """A `tokenizer.json`, the format of Hugging Face's tokenizers."""

    def __init__(self, path: str) -> None:
        file = tokenizer_file(path)
        try:
            from tokenizers import Tokenizer as HuggingFace
        except ImportError:
            raise ValueError(
                f"tokenizer {path!r} needs the package tokenizers: pip install 'picotron-edu[text]'"
            ) from None
        content = file.read_bytes()
        try:
            self.tokenizer = HuggingFace.from_str(content.decode())
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"tokenizer {path!r} is not a valid tokenizer.json: {error}") from None
        self.vocab_size = 1 + max(self.tokenizer.get_vocab().values())
        ends = (self.tokenizer.token_to_id(name) for name in END_OF_TEXT)
        self.separator = next((token for token in ends if token is not None), None)
        self.key = hashlib.sha256(content).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)


def tokenizer_from(path: str | None) -> Tokenizer:
    return Bytes() if path is None else FromFile(path)
