"""Everything that measures, draws or prints; the rest of the package never imports it."""
