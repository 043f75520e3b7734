"""Deliberate breaks: change some text inside a function of the package, and run the changed function."""

import importlib
import inspect
from pathlib import Path
from typing import NamedTuple


class Break(NamedTuple):
    """A change of text that occurs once in a module below `prescore`, inside a function or method."""

    module: str
    old: str
    new: str

    def apply(self, monkeypatch):
        """Change the code of function objects that stay the same, so that all who imported them run the change."""
        module = importlib.import_module(f"prescore.{self.module}")
        source = Path(module.__file__).read_text()
        before, after = (compile(text, module.__file__, "exec") for text in (source, self.replaced(source)))
        changed = [pair for pair in _functions(module, before, after) if pair[0].__code__ != pair[1]]
        assert changed, f"{self.module}: {self.old!r} must be part of a function"
        for function, code in changed:
            monkeypatch.setattr(function, "__code__", code)

    def replaced(self, source):
        """The changed source of the module."""
        found = source.count(self.old)
        assert found == 1, f"{self.module}: the text must occur once, got {found} times: {self.old!r}"
        return source.replace(self.old, self.new)


def _functions(owner, before, after):
    """Live functions of a module or class, each with its code after the change."""
    for old, new in zip(_codes(before), _codes(after), strict=True):
        held = inspect.getattr_static(owner, old.co_name, None)
        if inspect.isclass(held):
            yield from _functions(held, old, new)
            continue
        while held is not None and not hasattr(held, "__code__"):
            held = next(filter(None, (getattr(held, n, None) for n in ("__func__", "fget", "__wrapped__"))), None)
        held = inspect.unwrap(held) if held is not None else None
        if held is not None and held.__code__.co_firstlineno == old.co_firstlineno:
            yield held, new


def _codes(code):
    return [inner for inner in code.co_consts if inspect.iscode(inner)]
