"""Documents: every kind of source, and refusals that name what is wrong."""

import json

import pytest

from prescore.bench.language.documents import DEFAULT_MODULES, TOPICS, Document, decode, load_documents


def test_default_corpus_is_long_and_needs_no_network():
    documents = load_documents()
    assert [document.name for document in documents] == [TOPICS, *(f"{name}.py" for name in DEFAULT_MODULES)]
    assert len(documents[0].text) > 300_000
    assert "def ArgumentParser" not in documents[0].text
    assert "class ArgumentParser" in documents[1].text
    assert load_documents(limit=2) == documents[:2]


def test_a_module_of_the_corpus_can_be_asked_for_by_name():
    assert load_documents(["argparse"])[0].name == "argparse.py"


def test_encodings_and_line_ends(tmp_path):
    (tmp_path / "latin.txt").write_bytes("caf\u00e9\r\nna\u00efve".encode("latin-1"))
    (tmp_path / "utf8.txt").write_bytes("\ufeffcaf\u00e9\r\nna\u00efve".encode())
    texts = [load_documents([tmp_path / name])[0].text for name in ("latin.txt", "utf8.txt")]
    assert texts == ["caf\u00e9\nna\u00efve"] * 2


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
    assert first == Document("bench.jsonl#x1", "A long story.\n\nWho?")
    assert second == Document("bench.jsonl#2", "Another.\n\nWhat?\n\nA. this\n\nB. that")
    spread = tmp_path / "one.json"
    spread.write_text(json.dumps(one, indent=1))
    assert load_documents([spread]) == [Document("one.json#x1", first.text)]
    array = tmp_path / "bench.json"
    array.write_text(json.dumps([one, two]))
    assert [document.text for document in load_documents([array])] == [first.text, second.text]


def test_refusals_name_the_file_and_the_place(tmp_path):
    with pytest.raises(OSError, match=r"document must be a readable file, got .*missing.txt \(No such file"):
        load_documents([tmp_path / "missing.txt"])
    (tmp_path / "image.txt").write_bytes(b"\x89PNG\0\0")
    with pytest.raises(OSError, match=r"document image\.txt must be text, got a binary file"):
        load_documents([tmp_path / "image.txt"])
    (tmp_path / "bad.jsonl").write_text('{"context": "ok"}\n{"context": ')
    with pytest.raises(ValueError, match=r"document bad\.jsonl must hold JSON, got a damaged line 2"):
        load_documents([tmp_path / "bad.jsonl"])
    (tmp_path / "other.jsonl").write_text('{"text": "ok"}')
    with pytest.raises(ValueError, match="must have a field 'context' in every record, got none in record 1"):
        load_documents([tmp_path / "other.jsonl"])
    (tmp_path / "asked.jsonl").write_text('{"context": "ok", "input": ["a"]}')
    with pytest.raises(ValueError, match=r"asked\.jsonl must have text in 'input' .*, got list in record 1"):
        load_documents([tmp_path / "asked.jsonl"])
    (tmp_path / "list.jsonl").write_text("3")
    with pytest.raises(ValueError, match="must hold JSON objects, got int in line 1"):
        load_documents([tmp_path / "list.jsonl"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"at least one text, got none in .*empty"):
        load_documents([tmp_path / "empty"])


def test_decode_keeps_old_mac_line_ends():
    assert decode(b"a\rb", "x") == "a\nb"
