"""The hub's client is not called where there is no way to the hub, and is where there may be."""

import errno
import socket
import ssl
import urllib.error
from typing import Any

import pytest

from xgpt.core.errors import XgptError
from xrunner.checkpoint import hub, source

UNKNOWN = socket.gaierror(-2, "Name or service not known")


@pytest.fixture
def failing(monkeypatch):
    def ask(error: Exception) -> None:
        def open_(request: Any, timeout: float) -> Any:
            raise error
        monkeypatch.setattr(hub.urllib.request, "urlopen", open_)

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/")
    return ask


@pytest.mark.parametrize(("cause", "is_vain"), [
    (UNKNOWN, True), (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), True),
    (TimeoutError("timed out"), True), (OSError(errno.ENETUNREACH, "Network is unreachable"), True),
    (ssl.SSLError(1, "certificate verify failed"), False), ("unknown url type", False)])
def test_only_what_no_client_gets_round_is_in_vain(failing, cause, is_vain):
    failing(urllib.error.URLError(cause))
    said = hub.why_in_vain(1.0)
    assert (said is not None) == is_vain
    if is_vain:
        assert f"https://mirror.example cannot be reached: {cause.strerror or cause}" == said


def test_an_answer_of_any_kind_is_one(failing, monkeypatch):
    failing(urllib.error.HTTPError("https://mirror.example", 405, "no", {}, None))  # type: ignore[arg-type]
    assert hub.why_silent(1.0) is None and hub.why_in_vain(1.0) is None
    failing(urllib.error.URLError(UNKNOWN))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub.why_in_vain(1.0) is None  # the client says so itself, at once


def test_without_a_network_nothing_is_tried_six_times(failing, monkeypatch, tmp_path):
    client = pytest.importorskip("huggingface_hub")
    calls = []

    def ask(*arguments: Any, local_files_only: bool, **_: Any) -> str:
        calls.append(local_files_only)
        raise FileNotFoundError(errno.ENOENT, "not kept")

    for name in ("hf_hub_download", "snapshot_download"):
        monkeypatch.setattr(client, name, ask)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    failing(urllib.error.URLError(UNKNOWN))
    assert source.config_from_hub("a/b") == (
        None, "https://mirror.example cannot be reached: Name or service not known")
    with pytest.raises(XgptError, match="no local directory of that name; https://mirror.example "
                                        "cannot be reached: Name or service not known"):
        source.find_model("a/b", lambda message: None)
    assert calls == [True]
