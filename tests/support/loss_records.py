"""Records of `prescore perplexity`, made up; and pictures that are drawn from them."""

from prescore.bench.records import Record


def record(label, loss, document="a", n_tokens=4096, config=None, seed=0, **axes):
    kind = {"exact": "Exact", "local only": "Local"}.get(label, "Selected")
    method = {"label": label, "config": {"type": kind, **(config or {})}, "axes": axes}
    where = {"model": "tiny", "dtype": "float32", "document": document, "digest": "0", "n_tokens": n_tokens}
    results = {"loss": loss, "reads_per_query": 10.0, "attention_seconds": 0.5, "forward_seconds": 1.0}
    config = {"part": "loss", **where, "layers": "all", "method": method}
    return Record("perplexity", f"{label}-{document}-{n_tokens}-{seed}", config, seed, results, 1.0)


def references(exact=2.0, local=3.0, **options):
    return [record("exact", exact, **options), record("local only", local, **options)]


def draw(monkeypatch, path, plot, *arguments):
    """The axes of the picture that `plot` saves."""
    from matplotlib.figure import Figure

    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: (figures.append(figure), save(figure, path)))
    plot(*arguments, path, "title")
    assert path.read_bytes()[:4] == b"\x89PNG"
    return figures[-1].axes
