from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support import threads, write_tiny_model


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """The tensors here are small: threads would spend their time waiting for each other."""
    with threads(1):
        yield


@pytest.fixture(autouse=True)
def restored_environment():
    """Starting an engine on the CPU sets variables for its children; other tests must not inherit them."""
    variables, path = dict(os.environ), list(sys.path)
    yield
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:] = path


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory) -> Path:
    """Checkpoint directory of a random tiny LLaDA2 with tokenizer."""
    path = tmp_path_factory.mktemp("tiny")
    write_tiny_model(path, layers=2, hidden=64)
    return path
