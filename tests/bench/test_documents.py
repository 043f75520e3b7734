"""Documents: every kind of source, and refusals that name what is wrong."""

import json

import pytest

from prescore.bench.language.documents import DEFAULT_MODULES, TOPICS, Document, load_documents


def test_default_corpus_is_long_and_needs_no_network():
    documents = load_documents()
    assert [document.name for document in documents] == [TOPICS, *(f"{name}.py" for name in DEFAULT_MODULES)]
    assert len(documents[0].text) > 300_000
    assert "def ArgumentParser" not in documents[0].text
    assert "class ArgumentParser" in documents[1].text
    assert load_documents(limit=2) == documents[:2]
    assert load_documents(["argparse"]) == documents[1:2]


def test_encodings_and_line_ends(tmp_path):
    text = "caf\u00e9\r\nna\u00efve\rend"  # as on Windows and on old Macs
    for content in (text.encode("latin-1"), f"\ufeff{text}".encode()):
        (tmp_path / "text.txt").write_bytes(content)
        assert load_documents([tmp_path / "text.txt"])[0].text == "caf\u00e9\nna\u00efve\nend"


def test_directory_in_order_of_names_without_other_files(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "c.bin").write_bytes(b"\0\1")
    assert load_documents([tmp_path]) == [Document("a.md", "first"), Document("b.txt", "second")]


def test_longbench_version_1_and_2(tmp_path):
    one = {"context": "A long story.", "input": "Who?", "answers": ["me"], "_id": "x1"}
    two = {"context": "Another.", "question": "What?", "choice_A": "this", "choice_B": "that", "answer": "A"}
    lines = tmp_path / "bench.jsonl"
    lines.write_text(json.dumps(one) + "\n\n" + json.dumps(two) + "\n")
    first, second = load_documents([lines])
    assert first == Document("bench.jsonl#x1", "A long story.")
    assert second == Document("bench.jsonl#2", "Another.")
    for content, texts in ((one, [first.text]), ([one, two], [first.text, second.text])):
        (tmp_path / "bench.json").write_text(json.dumps(content, indent=1))
        assert [document.text for document in load_documents([tmp_path / "bench.json"])] == texts


@pytest.mark.parametrize(
    ("name", "content", "error", "refusal"),
    [
        ("image.txt", "\x89PNG\0\0", OSError, r"document image\.txt must be text, got a binary file"),
        ("bad.jsonl", '{"context": "ok"}\n{"context": ', ValueError, r"document bad\.jsonl .* a damaged line 2"),
        ("other.jsonl", '{"text": "ok"}', ValueError, "a text 'context' in every record, got none in record 1"),
        (
            "list.json",
            '{"context": ["ok"]}',
            ValueError,
            "a text 'context' in every record, got list in record 1",
        ),
        ("list.jsonl", "3", ValueError, "must hold JSON objects, got int in line 1"),
        ("lines.jsonl", '{"context": "ok"}\n\nnull', ValueError, "JSON objects, got NoneType in line 3"),
        ("", None, ValueError, "at least one text, got none in"),
    ],
)
def test_refusals_name_the_file_and_the_place(tmp_path, name, content, error, refusal):
    if content is not None:
        (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(error, match=refusal):
        load_documents([tmp_path / name])
