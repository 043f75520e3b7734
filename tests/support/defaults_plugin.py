"""A pytest plugin: the library runs under another default dtype or default device, the tests do not.

    pytest -p defaults_plugin --default bfloat16 tests/routed

`--default` is a dtype of torch, or `meta`, the device without memory. What allocates without naming dtype and
device then fails, or gives other numbers.
"""

import functools
import inspect

import torch

import prescore
from prescore import attention
from prescore.routed import attention as routed
from prescore.routed import decode, native, plain


def pytest_addoption(parser):
    parser.addoption("--default", default="float32")


def pytest_configure(config):
    default = config.getoption("--default")

    def wrap(function):
        @functools.wraps(function)
        def under_default(*args, **kwargs):
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.float32 if default == "meta" else getattr(torch, default))
            try:
                with torch.device("meta" if default == "meta" else "cpu"):
                    return function(*args, **kwargs)
            finally:
                torch.set_default_dtype(before)

        return under_default

    def wrap_all(owner):
        for name, function in list(vars(owner).items()):
            own = inspect.isfunction(function) and function.__module__ == getattr(
                owner, "__module__", owner.__name__
            )
            if own and not name.startswith("__") and not inspect.isgeneratorfunction(function):
                setattr(owner, name, wrap(function))

    for module in (attention, routed, native, plain, decode):
        wrap_all(module)
    for kind in (decode.StepAttention, native.PreparedStep):
        wrap_all(kind)
    routed._RoutedAttention.backward = staticmethod(wrap(routed._RoutedAttention.backward))
    for name in ("prescored_attention", "exact_attention", "hyper_attention", "score", "select"):
        setattr(prescore, name, getattr(attention, name))
