from pathlib import Path

import pytest

from serving.describe import client as describe_client
from tests.serving.describe.fake import Fake


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
def server(fake: Fake):
    with fake.running() as address:
        yield address


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    return tmp_path / "images"


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch):
    monkeypatch.setattr(describe_client, "FIRST_BACKOFF", 0.0)
