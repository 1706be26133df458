"""Each test of this folder runs with both engines."""

from types import SimpleNamespace

import pytest

import ckpt_ops.saved.engine
from ckpt_ops import native


@pytest.fixture(params=["C++", "python"], autouse=True)
def engine_kind(request, monkeypatch):
    """Which engine forwards get: that of csrc/saved, or its Python twin."""
    if request.param == "python":
        monkeypatch.setattr(ckpt_ops.saved.engine, "native", SimpleNamespace(loaded=lambda: None))
    elif native.extension() is None:
        pytest.skip(f"no extension: {native.why_not()}")
    return request.param
