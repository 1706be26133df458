"""`make test-asan` must not test the ordinary extension by mistake."""

import os
from pathlib import Path

import pytest

from ckpt_ops import native


@pytest.mark.skipif(not os.environ.get("CKPT_OPS_SANITIZE"), reason="only where a sanitizer build is under test")
def test_the_library_under_test_is_instrumented():
    assert native.extension() is not None, native.status()
    assert b"__asan_init" in Path(native.extension().__file__).read_bytes()
