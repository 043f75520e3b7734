"""`pytest --device cuda`: where the tests that follow it put their tensors; `make test-gpu` runs them."""

import pytest
import torch

from prescore import checks


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="Device of the tests that follow it, such as cuda.")


@pytest.fixture(scope="session")
def device(request):
    """The chosen device; tests are skipped where there is no GPU, any other that torch cannot use is refused."""
    name = request.config.getoption("--device")
    if name.startswith("cuda") and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    checks.device("--device", name)
    return torch.device(name)
