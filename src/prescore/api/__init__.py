"""The public functions on tensors: check, make a `Call`, let the configuration's engine run it, put back."""
