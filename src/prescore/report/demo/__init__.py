"""The report of `prescore demo`: one self-contained page."""
