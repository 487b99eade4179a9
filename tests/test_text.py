"""Where text comes from: every kind of source and tokenizer, and clear errors for wrong ones."""

import json
import sys
import types

import pytest

from picotron_edu.data import TextData
from picotron_edu.text import documents


def test_a_folder_is_read_in_order_of_names_through_all_kinds_of_files(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.txt").write_text("from txt")
    (folder / "a.jsonl").write_text(json.dumps({"text": "from jsonl"}))
    (folder / "notes.md").write_text("not read")
    parquet.write_table(
        pyarrow.table({"text": ["p one", "p two"], "id": [1, 2]}), folder / "deep/c.parquet"
    )
    assert list(documents(str(folder))) == ["from jsonl", "from txt", "p one", "p two"]


def test_hf_streams_with_the_datasets_package_and_names_it_when_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'picotron-edu\[datasets\]'"):
        list(documents("hf:owner/name"))
    asked = []

    def load_dataset(name, config, split, streaming):
        asked.append((name, config, split, streaming))
        return iter([{"text": "page one"}, {"text": "page two"}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert list(documents("hf:owner/name:small")) == ["page one", "page two"]
    assert asked == [("owner/name", "small", "train", True)]


def test_a_tokenizer_file_is_used_and_its_cache_is_another(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"a": 0, "b": 1, "c": 2, "[UNK]": 3, "<|endoftext|>": 4}
    model = tokenizers.models.WordLevel(words, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("a b c " * 40)
    settings = {"sequence_length": 4, "global_batch_size": 2, "cache": tmp_path / "cache"}
    by_word = TextData(
        str(tmp_path / "text.txt"), tokenizer=str(tmp_path / "tokenizer.json"), **settings
    )
    assert by_word.vocab_size == 5
    assert len(by_word.tokens) == 109  # nine tenths of 120 words and a separator
    assert by_word.encode("c a zzz") == [2, 0, 3]
    assert by_word.decode([2, 0]) == "c a"
    by_byte = TextData(str(tmp_path / "text.txt"), **settings)
    assert by_byte.vocab_size == 256 and len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.txt", None, "does not exist; allowed are 'manual', a .txt, .jsonl or .parquet file"),
        ("empty.txt", b"", "holds no text"),
        ("blank.txt", b" \n\n", "holds no text"),
        ("short.txt", b"too short a text", "is too short: its 15 train tokens make 3 samples"),
        ("a.csv", b"a,b", r"ends in '.csv'; allowed are .txt, .jsonl, .parquet"),
        ("a.txt", b"\xff\xfe", "is not UTF-8 text"),
        ("a.jsonl", b'{"text": "x"}\n{"text', "line 2 is not JSON"),
        ("a.jsonl", b'{"text": "\xff"}', r"a\.jsonl, line 1 is not UTF-8 text"),
        ("a.jsonl", b'{"body": "x"}', 'line 1 has no "text" field'),
        ("a.jsonl", b'{"text": 3}', 'line 1 has no "text" field'),
        ("folder/", None, "holds no file that ends in .txt, .jsonl, .parquet"),
    ],
)
def test_wrong_data_is_refused_with_a_reason(tmp_path, name, content, message):
    if name.endswith("/"):
        (tmp_path / name).mkdir()
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        TextData(str(tmp_path / name), 4, 4, cache=tmp_path / "cache")


def test_capital_suffixes_and_the_mark_of_windows_are_read(tmp_path):
    (tmp_path / "A.TXT").write_bytes(b"\xef\xbb\xbfone")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "two"}')
    assert list(documents(str(tmp_path))) == ["one", "two"]
    assert list(documents(str(tmp_path / "A.TXT"))) == ["one"]


def test_a_broken_parquet_file_is_named(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"no parquet at all")
    with pytest.raises(ValueError, match=r"a\.parquet is not a valid parquet file"):
        list(documents(str(tmp_path / "a.parquet")))


def test_a_parquet_file_without_text_column_is_refused_with_its_columns(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"body": ["x"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="no column 'text', only body, id"):
        list(documents(str(tmp_path / "a.parquet")))


def test_a_wrong_tokenizer_is_refused_with_a_reason(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"tokenizer 'nowhere\.json' does not exist"):
        TextData(tokenizer="nowhere.json", cache=tmp_path)
    pytest.importorskip("tokenizers")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad\.json' is not a valid tokenizer.json"):
        TextData(tokenizer=str(tmp_path / "bad.json"), cache=tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"needs the package tokenizers: pip install"):
        TextData(tokenizer=str(tmp_path / "bad.json"), cache=tmp_path)
