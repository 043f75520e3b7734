"""The demo: what it compares, what a query reads, the page, and the command."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser

import pytest
import torch

from prescore import Exact, Routed, prescored_attention
from prescore.bench.cli.main import main
from prescore.bench.demo import page, run
from prescore.bench.demo.page import compare, demo_page, headline
from prescore.bench.language.documents import Document
from prescore.bench.language.held_out import TokenizedText
from prescore.bench.language.perplexity import loss_row, measure_loss
from prescore.bench.records import Record, measure


@pytest.fixture(scope="module")
def words(precise):
    sentence = "Some tokens are read by every query, most are read by none at all; number {} is one of them. "
    return TokenizedText.of(precise, Document("words", "".join(sentence.format(n) for n in range(22))))


def test_windows_share_no_token(precise, words):
    first, second = run.demo_windows(words, 256)
    text = precise.tokenizer.decode(words.tokens.tolist())
    places = [text.index(precise.tokenizer.decode(window.tokens.tolist())) for window in (first, second)]
    assert places[1] >= places[0] + 256
    assert [window.document for window in (first, second)] == ["words, window 1", "words, window 2"]
    assert len(run.demo_windows(words, 1024)) == 1  # a second one would overlap
    with pytest.raises(ValueError, match=f"words must have at least 99999 tokens, got {len(words.tokens)}"):
        run.demo_windows(words, 99999)


def test_the_default_is_unchanged_wherever_it_routes():
    assert run.shown_config(8192) == run.shown_config(2049) == Routed()
    for length in (2048, 512, 128):
        config = run.shown_config(length)
        assert config.exact_until == 0
        assert config.sinks + 3 * config.chunk_size < length  # some chunk is far


def record_of(model, window, method):
    return measure("demo", loss_row(model, window, method, segments=4))


def test_other_methods_read_no_less_than_the_default(tiny, words):
    window, methods = run.demo_windows(words, 512)[0], run.first_methods(512)
    assert [method.axes["series"] for method in methods] == ["exact", "default", "local only"]
    default = record_of(tiny, window, methods[1])
    reads = default.results["replaced_reads_per_query"]
    for method in run.matched_methods(default):
        assert reads <= measure_loss(tiny, window, method)["reads_per_query"] < 1.15 * reads
        assert method.config.to_dict()["sinks"] == run.shown_config(512).sinks


CONFIG = Routed(min_weight=1 / 32, cluster_size=16, chunk_size=32, sinks=4, exact_until=0)


@pytest.fixture(scope="module")
def inputs():
    """Queries that look for single keys more than a model of random weights does."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((4, 24), (2, 512), (2, 512))
    return run.LayerInputs(*(2 * torch.randn(heads, n, 16, generator=generator) for heads, n in sizes), None)


def test_reads_and_errors_are_those_of_the_engine(inputs):
    tensors = (inputs.query[None], inputs.key[None], inputs.value[None])
    output, aux = prescored_attention(*tensors, CONFIG, is_causal=True, return_aux=True)
    exact = prescored_attention(*tensors, Exact(), is_causal=True)
    error = (output - exact).norm(dim=-1) / exact.norm(dim=-1)
    reads = run.layer_reads(inputs, CONFIG)
    assert list(reads) == [0, 1, 2, 3]
    every = [query for head in reads.values() for query in head]
    assert sum(query.counts[1] for query in every) / len(every) == pytest.approx(aux.stats.far_keys_read, rel=0.02)
    assert aux.stats.far_keys_read > 1
    shown = torch.tensor([[query.error for query in head] for head in reads.values()]) / 10_000
    torch.testing.assert_close(shown, error[0], atol=1e-3, rtol=0.02)
    assert error.max() > 0.002  # there is an error to be shown
    for query in every:
        assert sum(query[:4]) == pytest.approx(10_000, abs=3)
        assert sum(query.chunks) == pytest.approx(query.centroids, abs=len(query.chunks))
        assert len(query.heaviest) == 2 * min(run.MOST_LISTED, query.counts[1])
        assert query.heaviest[1::2] == sorted(query.heaviest[1::2], reverse=True)
        # a far key is neither a sink nor local
        assert all(CONFIG.sinks <= key < 512 - 24 - CONFIG.chunk_size for key in query.heaviest[::2])


def test_reads_in_plain_numbers():
    weights = torch.tensor([0.1, 0.2, 0.0, 0.05, 0.3])
    always = torch.tensor([True, False, False, False, True])
    read = torch.tensor([True, True, False, True, True])
    reads = run.query_reads(weights, always, read, torch.tensor([0.25, 0.1]), torch.tensor(0.01), sinks=1)
    assert reads == run.QueryReads(1000, 3000, 2500, 3500, 100, [1, 2], [2500, 1000], [1, 2000, 3, 500])


def test_inputs_are_recorded_while_the_default_runs(tiny, words):
    """What a layer is given depends on the attention of those before it."""
    window = run.demo_windows(words, 512)[0]
    configs = (CONFIG, CONFIG.replace(min_weight=1e-6))
    first, second = (run.layer_inputs(tiny, window, config, [0, 1], 24, 0) for config in configs)
    assert (list(first), first[0].query.shape, first[0].key.shape) == ([0, 1], (4, 24, 16), (2, 512, 16))
    assert torch.equal(first[0].key, second[0].key)
    assert not torch.equal(first[1].key, second[1].key)


def test_the_reads_row_holds_what_the_page_shows(precise, words):
    window = run.demo_windows(words, 512)[0]
    before = precise.hidden(window.tokens)
    row = run.reads_row(precise, window, CONFIG, layers=[0, 1])
    results = row.measure()
    assert "".join(results["tokens"]) == precise.tokenizer.decode(window.tokens.tolist())
    assert (results["first"], results["sinks"], results["chunk"]) == (512 - 96, 4, 32)
    assert results["heads"] == [[layer, head] for layer in (0, 1) for head in range(4)]
    weights = [[sum(query[kind] for query in head) for head in results["reads"]] for kind in (2, 3)]
    assert weights[0][results["searching"]] == max(weights[0])
    assert weights[1][results["smooth"]] == max(weights[1])
    assert row.config["part"] == "reads"
    assert torch.equal(precise.hidden(window.tokens), before)  # the model is as it was


# The page, from records alone.

TYPES = {"exact": "Exact", "local only": "Local"}


def loss_record(label, loss, reads, seconds, *, window=1, series=None):
    """Sixteen segments, half of them a little harder."""
    spread = 0.01 * (label != "exact")
    config = {"type": TYPES.get(label, "Routed"), "exact_until": 2048, "label": label}
    axes = {"series": series or label}
    described = {"part": "loss", "model": "tiny", "dtype": "float32", "document": f"a <b> & c, window {window}"}
    described |= {"digest": "00", "n_tokens": 4096, "layers": "all"}
    described["method"] = {"label": label, "config": config, "axes": axes}
    results = {"loss": loss, "segment_losses": [loss + (spread if part % 2 else -spread) for part in range(16)]}
    results |= {"reads_per_query": reads, "attention_seconds": seconds, "forward_seconds": 2 * seconds}
    run = {"argv": ["prescore", "demo", "--out", "a b"], "versions": {"python": "3.11", "torch": "2.13"}}
    run |= {"threads": 2, "created": "2026-01-01T00:00:00Z"}
    return Record("demo", f"demo-{label}-{window}", described, 0, results, 3 * seconds, **run)


def reads_record():
    """Twelve tokens, the last four of which can be picked, and two heads: one reads far keys, one reads none."""
    words = ["<b>", " the", " cat", " sat", " on", "</script>", " mat", "\n", " and", " a", " dog", " came"]
    searching = [[500, 2500, 6000, 1000, 120, [3, 1], [1000], [5, 6000]] for _ in range(4)]
    searching[3] = [100, 1900, 7000, 1000, 40, [4, 2], [1000], [2, 4000, 5, 3000]]
    smooth = [[500, 2500, 0, 7000, 310, [3, 0], [7000], []] for _ in range(4)]
    results = {"tokens": words, "first": 8, "sinks": 1, "chunk": 4, "heads": [[0, 0], [1, 3]]}
    results |= {"searching": 0, "smooth": 1, "reads": [searching, smooth]}
    return Record("demo", "demo-reads", {"part": "reads", "layers": [0, 1]}, 0, results, 1.0)


@pytest.fixture
def records():
    sliding, selection = "sliding window + sinks", "selection + sinks"
    equal = [
        *(
            ("exact", 2.0, 2048.5, 4.0, None),
            ("default", 2.1, 512.0, 1.0, None),
            ("local only", 3.0, 384.0, 0.5, None),
        ),
        *(("sliding window, 500", 2.4, 513.0, 1.2, sliding), ("selection, top 99", 9.0, 514.0, 1.3, selection)),
    ]
    made = [loss_record(*values, window=n, series=series) for n in (1, 2) for *values, series in equal]
    return [*made, reads_record()]


class Reader(HTMLParser):
    """Tags must nest."""

    VOID = ("meta", "link", "br", "img")

    def handle_starttag(self, tag, attributes):
        self.open = [*getattr(self, "open", []), *([tag] if tag not in self.VOID else [])]

    def handle_endtag(self, tag):
        assert tag in self.VOID or self.open.pop() == tag


def test_the_page_is_complete_and_fetches_nothing(records):
    text = demo_page(records)
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert re.findall(r"""\b(?:src|href)=["'](?!#)([^"']*)""", text) == ["data:,"]
    assert "http" not in text
    assert not re.search(r"\$[a-z]+", text)
    with pytest.raises(AssertionError):  # the reader would notice
        Reader().feed(text.replace("</section>", "", 1))


def test_the_headline_has_reads_loss_and_time(records):
    said = headline(compare(records)).replace("\N{NO-BREAK SPACE}", " ")
    # 32 segments are 0.01 above or below; times are 1 s and 4 s
    for words in ("512 keys and centroids of 2048 keys", "0.1000 ± 0.0037 nats", "<strong>4.0 times as fast"):
        assert words in said
    others = [r for r in records if r.config["part"] != "loss" or r.config["method"]["label"] != "exact"]
    assert not re.search(r"\d", headline(compare(others)))


def test_the_page_shows_the_results_of_the_records(records, tmp_path):
    text = page.write_page(records, tmp_path / "report").read_text(encoding="utf-8")
    for words in ("prescore demo --out &#x27;a b&#x27;", "torch 2.13", "a &lt;b&gt; &amp; c", "over 32 segments"):
        assert words in text
    figures = re.findall(r"<figure class='measure'>.*?</figure>", text)
    bars = [re.findall(r"class='name'>([^<]*)<.*?class='fill' style='width:([\d.]+)%", f) for f in figures]
    loss, seconds, _ = (dict(own) for own in bars)
    # bars are as long as their values; far too much is cut off
    assert (seconds["exact"], seconds["default"], loss["selection + sinks"]) == ("100.0", "25.0", "100.0")
    assert float(loss["default"]) == pytest.approx(100 * 0.1 / 1.3, abs=0.1)
    assert "bar-row cut'><span class='name'>selection" in figures[0]
    table = page.comparison_table(records)
    names = ["exact", "default", "local only", "sliding window + sinks", "selection + sinks"]
    assert [row[0] for row in table.rows] == names
    assert table.rows[1][1:8] == ("2", "2.1000", "8.166", "0.1000 ± 0.0037", "90 %", "512", "1.00 s")


def test_sections_can_hold_any_text(records):
    record = next(record for record in records if record.config["part"] == "reads")
    section = page.reads_section(record)
    assert section.count("</script>") == 1
    data = json.loads(section[section.index('json">') + 6 : section.index("</script>")])
    assert data["tokens"][5] == "</script>"
    assert "What does a token read?" in demo_page(records)
    record.results["heads"] = []  # every layer has a sliding window
    assert page.reads_section(record) == ""
    assert "What does a token read?" not in demo_page(records)


def test_on_a_busy_machine_the_headline_has_no_times(records):
    loads = [{"processor_seconds": 1.0, "cores": 2, "others": others} for others in (0.2, 1.4)]
    idle, busy = ([replace(record, seconds=9.0, load=load) for record in records] for load in loads)
    assert "times as fast" in demo_page(idle)
    assert "busy machine" not in demo_page(idle)
    text = demo_page(busy)
    assert "Busy machine: other processes had up to 1.4 cores; times are not comparable." in text
    assert "times as fast" not in text


PICK = """<script>
const words = (name) => [...document.querySelectorAll(name)].map((node) => node.textContent);
const state = () => [".token.picked", ".weights", ".far-keys li"].map(words);
const states = [state()];
document.querySelectorAll(".token")[1].click();
states.push(state());
const right = new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true });
document.querySelector(".token.picked").dispatchEvent(right);
document.body.dataset.states = JSON.stringify([...states, state()]);
</script>"""


@pytest.mark.slow
def test_a_browser_shows_what_the_picked_token_reads(records, tmp_path):
    browser = shutil.which("chromium") or pytest.skip("no Chromium on this machine: apt-get install chromium")
    file = tmp_path / "index.html"
    file.write_text(demo_page(records).replace("</body>", f"{PICK}</body>"), encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    document = subprocess.run(
        [*command, "--dump-dom", file.as_uri()], check=True, capture_output=True, timeout=300, text=True
    ).stdout
    states = json.loads(
        unescape(re.search(r'data-states="([^"]*)"', document)[1]).replace("\N{NO-BREAK SPACE}", " ")
    )
    assert [picked for picked, _, _ in states] == [[" came"], [" a"], [" dog"]]
    assert states[0][2][0] == "40.0 %9 before<b> the cat sat on</script> mat⏎ and a"
    weights = (
        "Weight: first tokens 5 %, local 25 % (3 keys), far 60 % (1 keys), centroids 10 % (of 5 unread keys)."
    )
    assert states[1][1][0] == weights


def demo(model, text, *options):
    return main(["demo", "--model", model, "--document", text, *options])


def test_the_command_writes_table_and_page(saved, text, lines, tmp_path, capsys):
    out = tmp_path / "report"
    assert demo(saved, text, "-n", "256", "--out", str(out)) == 0
    printed = capsys.readouterr().out
    names = ("exact", "local only", "sliding window + sinks", "selection + sinks", "default")
    assert all(name in printed for name in (*names, "speed-up"))
    found = [line["config"] for line in lines(out)]
    assert [config["part"] for config in found if config["part"] != "loss"] == ["reads"]
    series = [config["method"]["axes"]["series"] for config in found if config["part"] == "loss"]
    assert sorted(series) == sorted(names)
    assert all(name in (out / "index.html").read_text(encoding="utf-8") for name in names)


def test_the_page_is_whole_at_once_and_more_is_offered(saved, text, lines, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("prescore.bench.cli.options._LINE_EVERY", 0.0)
    assert demo(saved, text, "-n", "128") == 0
    (run,) = (tmp_path / "runs" / "demo").iterdir()
    assert len(lines(run)) == 5 + 1
    said = capsys.readouterr().err
    shares = [int(share) for share in re.findall(r"demo: (\d+) %", said)]
    assert shares == [17, 33, 50, 67, 83, 100]  # one bar
    more = re.search(r"more: +(prescore .*--full --resume)  \(a second window, about \d+ s\)", said)[1]
    file = tmp_path / "report" / "index.html"
    first = file.read_text(encoding="utf-8")
    assert "over 16 segments" in first
    assert demo(saved, text, "-n", "128", "--resume") == 0
    assert file.read_text(encoding="utf-8") == first
    capsys.readouterr()
    assert main(more.split()[1:]) == 0
    said = capsys.readouterr().err
    assert [int(share) for share in re.findall(r"demo: (\d+) %", said)] == [20, 40, 60, 80, 100]
    assert "more:" not in said
    assert len({line["key"] for line in lines(run)}) == len(lines(run)) == 2 * 5 + 1
    assert "over 32 segments" in file.read_text(encoding="utf-8")
