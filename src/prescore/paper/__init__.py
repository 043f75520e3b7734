"""Everything that reproduces the paper, one item of the paper at a time: `prescore paper`."""
