"""What commands refuse: one sentence, exit code 2, and no record."""

import re
import shlex

import pytest

from prescore.bench.cli.main import main

REFUSALS = {
    "perplexity": [
        ("--document missing.txt", r"document must be a readable file, got missing.txt \(No such file"),
        ("-d /dev/zero", r"document must be a readable file, got /dev/zero \(a device, which may have no end\)"),
        ("-d ' '", "document must name a file"),
        ("-n 4096", "document text.txt must have at least 4096 tokens, got"),
        ("-n 64 --windows 40", "document text.txt must have at least 2560 tokens, got"),
        ("-n 64 --first 200", "first position must lie between 1 and"),
        ("--model no/such/model", "model must be 'smollm2', a directory"),
        ("--min-weight 0.1", r"No such option: --min-weight .*--set min_weight=VALUE\)"),
        ("--block-size=4", r"--set (inner|lsh)\.block_size=VALUE\)"),
        ("--method peak", "got 'peak'; one that a file of yours registers needs --import FILE"),
        ("--method defalt", r"method must be one of .*\(did you mean 'default'\?\)"),
        ("--top-k many", "top_k must be a count or a fraction, got 'many'"),
        ("--top-k 1.5", r"top_k must be a fraction in \(0, 1\] when it is a float, got 1.5"),
        ("--method streaming --top-k -3", "top_k must be at least 0, got -3"),
        ("--set sinks", "set must be FIELD=VALUE, got 'sinks'"),
        ("--set colour=red", "Hyper or Selected or Routed must have fields among lsh, lsh.block_size, "),
        ("--set min_weigth=3", r"\(did you mean 'min_weight'\?\)"),
        ("--method paper:kmeans --set inner=Exact --set inner.block_size=4", "got 'inner.block_size'"),
        ("--method kmeans --set min_weight=3", "Selected must have fields among scorer, "),
        ("--method kmeans --set top_k=5", "set must leave top_k to --top-k"),
        ("--dtype int8", "dtype must be one of"),
        ("--weights int4", "weights must be one of 'int8', 'bfloat16', 'float32', got 'int4'"),
        ("--device nowhere", "device must be usable, got 'nowhere'"),
        ("--layers last:9", "layers must ask for at most the model's 2 layers, got 'last:9'"),
        ("--out ''", "--out must name a directory, got ''"),
        ("--held-out --windows 1", "got --windows too"),  # even where it is the default
        ("--tuning", "tuning must come with --held-out, got --tuning alone"),
    ],
    "retrieval": [
        ("--task many-needles -n 600", "length must leave room for the facts, the questions and 512 tokens"),
        ("--task single-needle -n 4", "length must leave room for the facts, the questions, at least"),
        ("--task some-needles", "task must be one of"),
        ("--task single-needle --depth 1.5", "depth must lie between 0 and 1, got 1.5"),
        ("--task many-needles --depth 0.5 --depth 0.5", r"depths must differ from each other, got \[0.5, 0.5\]"),
        (f"--task many-needles {' '.join(f'--depth .{n}' for n in range(9))}", "depths must be 1 to 8 .* got 9"),
    ],
    "generate": [
        ("--model no/such-model --prompt a", "no/such-model"),
        ("--model missing.gguf --prompt a", "missing.gguf"),
        ("", "exactly one of --prompt and --document"),
        ("-d /dev/zero", r"document must be a readable file, got /dev/zero \(a device"),
        ("--prompt a --method kmeans --set topk=3", r"got 'topk' \(did you mean 'top_k'\?\)"),
        ("--prompt a --method kmeans --set scorer.name=kmedian", "got 'scorer.name'"),
        ("--prompt a --method kmeans --set inner=exact", "inner type must be one of .* got 'exact'"),
        ("--prompt a --method hyper --set lsh.block_size=many", "block_size must be an int, got str 'many'"),
        ("--prompt a --set sinks=-1", "sinks must be at least 0, got -1"),
        ("--prompt a --method key-dif", r"method must be one of 'exact', 'default', .*did you mean 'key-diff'\?"),
        ("--prompt a --top-k 12", "--top-k must come with a scorer as --method, got 12 for 'default'"),
        ("--prompt a --set top_k=12", "Routed must have fields among min_weight, "),
        ("--prompt a --agreement --no-exact", "--agreement must come with --exact and one beam"),
        ("--prompt a --prefill-chunk-size 8 --beams 2", "prefill_chunk_size must come with one beam, got 2 beams"),
        ("--prompt a --ignore-end --beams 2", "ignore_end must come with one beam, got 2 beams"),
        ("--prompt a --evict", "evict must come with a Selected that leaves keys out, got Routed"),
        ("--prompt a --method key-diff --top-k 1.0 --refresh-every 4", "leaves keys out, got Selected"),
    ],
    "speed": [
        ("--study lenghts", r"\(did you mean 'lengths'\?\)"),
        ("--method magic", "method must be one of 'exact', 'default', .* got 'magic'"),
        ("--method paper:magic", "method must be one of .* got 'paper:magic'"),
        ("--method local", "--method must be a configuration of the library, got 'local'"),
        ("--study heads", "--heads must be a directory of saved heads for --study heads, got none"),
    ],
    "save-heads": [
        ("-d text.txt -n 8", "'-n': "),
        ("-d missing.txt", "document must be a readable file, got missing.txt"),
        ("--model no/such-model -d python-reference", "no/such-model"),
    ],
    "vision": [
        ("--resolution 16", "resolution must be given with a model and images, got resolution 16"),
        ("--arch vit", "arch must be given with a model"),
        ("--labels labels.json", "labels must be given with a model"),
        ("--model vit", "images must be given together with model"),
        ("--prefix none", "got 'none'"),
    ],
}


@pytest.mark.parametrize(
    ("command", "options", "sentence"), [(c, *row) for c, rows in REFUSALS.items() for row in rows]
)
def test_refusals_are_one_sentence(command, options, sentence, saved, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    given = {"perplexity": ["-d", text, "-n", "64"], "retrieval": ["-d", text], "generate": []}
    language = ["--model", saved, *given[command]] if command in given else []
    assert main([command, "--out", "run", *language, *shlex.split(options)]) == 2
    printed = capsys.readouterr()
    assert re.search(sentence, printed.err)
    assert (printed.err.strip().count("\n"), printed.out) == (0, "")
    assert not [path for path in tmp_path.rglob("*.jsonl") if path.read_text()]
    loads_model = language and re.search(r"-n |--model|--dtype|--weights|--device|--layers", options)
    assert loads_model or not (tmp_path / "run").exists()
