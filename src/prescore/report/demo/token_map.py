"""A picture of which tokens were kept: bars over the whole text, and the words themselves."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from prescore.records import Record
from prescore.values import Values

PASSAGE = 420
"""Tokens shown as text; the bars show all."""
_STRONG = 4
_BAR_WIDTH, _BAR_HEIGHT = 1000, 14


def token_map(record: Record) -> str:
    """HTML of one `tokens` record: choices, a bar per head, and a passage with the kept words marked."""
    figures = record.figures
    methods, layers = list(figures["kept"]), [str(layer) for layer in record.config["layers"]]
    choices = [
        _choice("method", "Keys chosen by", methods, methods),
        _choice("layer", "in", [f"layer {int(layer) + 1}" for layer in layers], layers),
    ]
    views = [
        _view(figures, method, layer, first=(method, layer) == (methods[0], layers[0]))
        for method in methods
        for layer in layers
    ]
    shown = (
        f'<div class="tokens">\n<div class="choices">{"".join(choices)}</div>\n' + "\n".join(views) + "\n</div>"
    )
    return shown + _mass_table(figures["mass"], methods, layers)


def _mass_table(mass: dict[str, dict[str, float]], methods: Sequence[str], layers: Sequence[str]) -> str:
    """The share of attention on kept keys, all methods and layers beside one another."""
    head = "".join(f"<th scope='col'>layer {int(layer) + 1}</th>" for layer in layers)
    lines = []
    for method in methods:
        cells = "".join(f"<td>{100 * mass[method][layer]:.0f} %</td>" for layer in layers)
        lines.append(f"<tr><th scope='row'>{escape(method)}</th>{cells}</tr>")
    table = (
        f"<thead><tr><th scope='col'>attention on kept keys</th>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    )
    return f"<div class='scroll'><table class='plain mass-table'>{table}</table></div>"


def _choice(name: str, words: str, labels: Sequence[str], values: Sequence[str]) -> str:
    options = "".join(
        f'<option value="{escape(value)}">{escape(label)}</option>'
        for label, value in zip(labels, values, strict=True)
    )
    return f'<label>{words} <select data-choice="{name}">{options}</select></label>'


def _view(figures: Values, method: str, layer: str, *, first: bool) -> str:
    heads: list[list[int]] = figures["kept"][method][layer]
    pieces: list[str] = figures["pieces"]
    mass = figures["mass"][method][layer]
    shown = "" if first else " hidden"
    counts = [len(head) for head in heads]
    kept = str(counts[0]) if len(set(counts)) == 1 else ", ".join(map(str, counts))
    bars = "".join(_bar(head, len(pieces), number) for number, head in enumerate(heads))
    return (
        f'<div class="view" data-method="{escape(method)}" data-layer="{escape(layer)}"{shown}>'
        f'<p class="mass">{kept} of {len(pieces)} keys kept per head; they receive '
        f"<strong>{100 * mass:.0f} %</strong> of the attention that the second half gives to these keys.</p>"
        f'<div class="bars">{bars}</div>'
        f'<p class="text">{_text(pieces, heads)}</p></div>'
    )


def _bar(head: Sequence[int], length: int, number: int) -> str:
    step = _BAR_WIDTH / length
    marks = "".join(f"M{position * step:.1f} 0v{_BAR_HEIGHT}" for position in head)
    return (
        f'<svg class="bar" viewBox="0 0 {_BAR_WIDTH} {_BAR_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="positions kept by head {number + 1}"><path d="{marks}"/></svg>'
    )


def _text(pieces: Sequence[str], heads: Sequence[Sequence[int]]) -> str:
    """The passage; a token kept by more heads is marked more strongly."""
    votes = [0] * len(pieces)
    for head in heads:
        for position in head:
            votes[position] += 1
    parts: list[str] = []
    plain: list[str] = []
    for piece, count in zip(pieces[:PASSAGE], votes, strict=False):
        if count == 0:
            plain.append(piece)
            continue
        parts.append(escape("".join(plain)))
        plain.clear()
        strength = max(1, round(_STRONG * count / len(heads)))
        parts.append(f'<mark class="s{strength}">{escape(_visible(piece))}</mark>')
    parts.append(escape("".join(plain)))
    return "".join(parts)


def _visible(piece: str) -> str:
    """A kept line end must be seen, and still end the line."""
    return piece if piece.strip("\n") else "⏎" * max(1, piece.count("\n")) + piece
