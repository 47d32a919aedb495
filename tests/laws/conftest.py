"""The laws work on small matrices: one thread is faster than two and reproducible."""

import pytest
import torch

from surefoot.linalg import device as device_module


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def accelerator(monkeypatch):
    """Tensors count as an accelerator's."""
    monkeypatch.setattr(device_module, "on_cpu", lambda x: False)


@pytest.fixture(params=["cpu", "accelerator"])
def device(request):
    """Both kinds of device, one after the other."""
    if request.param == "accelerator":
        request.getfixturevalue("accelerator")
