"""What the default reads for a token that the reader picks: a passage to click in, and the data behind it."""

from __future__ import annotations

import json
from html import escape

from prescore.records import Record

BEFORE = 48
"""Tokens shown before those that can be picked."""
_FOUND = 2
"""Place in a look, as `prescore.evaluation.demo.reading.QueryReading` has it."""


def reading_section(record: Record) -> str:
    """HTML of a `reading` record; `templates/reading.js` fills it in."""
    figures = record.figures
    if not figures["heads"]:
        return "<p>The layers that were looked at are local by design, and do not search.</p>"
    pieces: list[str] = figures["pieces"]
    first: int = figures["first"]
    before = escape("".join(pieces[max(0, first - BEFORE) : first]))
    tokens = "".join(_token(piece, number) for number, piece in enumerate(pieces[first:]))
    data = json.dumps({**figures, "start": telling(figures["looks"][figures["searching"]], pieces[first:])})
    return (
        '<div class="reading">\n'
        f'<p class="text passage"><span class="before">{before}</span>{tokens}</p>\n'
        '<p class="asked" aria-live="polite"><noscript>Picking a token needs JavaScript.</noscript></p>\n'
        f"{_legend()}\n"
        '<div class="cards"><div class="card"></div><div class="card"></div></div>\n'
        '<h3>Every head for this token: layer.head, weights, rows found</h3>\n<div class="heads"></div>\n'
        # a text may hold what ends a script
        f'<script type="application/json">{data.replace("<", chr(92) + "u003c")}</script>\n</div>'
    )


def telling(looks: list[list[int]], pieces: list[str]) -> int:
    """The query to begin with: of those that are words, the one that gives most weight to rows it found."""
    words = [number for number, piece in enumerate(pieces) if sum(map(str.isalpha, piece)) > 2]
    return max(words or range(len(pieces)), key=lambda number: looks[number][_FOUND])


def _token(piece: str, number: int) -> str:
    shown = piece if piece.strip("\n") else "⏎" * max(1, piece.count("\n")) + piece
    return f'<span class="token" role="button" tabindex="0" data-query="{number}">{escape(shown)}</span>'


def _legend() -> str:
    words = {
        "sinks": "first tokens",
        "near": "local part: own and previous chunk",
        "found": "rows found far away",
        "stands": "stand-ins for the rest",
    }
    items = "".join(f'<li><span class="swatch {kind}"></span>{text}</li>' for kind, text in words.items())
    return f'<ul class="legend">{items}</ul>'
