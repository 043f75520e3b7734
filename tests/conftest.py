"""`pytest --device cuda`: where the tests that follow it put their tensors (`tests/test_devices.py`)."""

import pytest
import torch

from prescore import checks


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="Device of the tests that follow it, such as cuda.")


@pytest.fixture(scope="session")
def device(request):
    """The chosen device; one that torch cannot use is refused."""
    name = request.config.getoption("--device")
    checks.device("--device", name)
    return torch.device(name)
