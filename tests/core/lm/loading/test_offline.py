"""A machine that does not know the Hub's host."""

from __future__ import annotations

import socket
import time

import pytest
from huggingface_hub import constants

from posttrain.cli import source
from posttrain.core.errors import DataError, MissingModelError
from posttrain.lm.loading.loading import load_causal_lm, load_tokenizer
from posttrain.lm.loading.offline import cache_where_unknown


@pytest.fixture
def asked(monkeypatch):
    """The hosts that are looked up, none of which is known; no proxy, and no environment that says offline."""
    found = []

    def unknown(host, *args, **kwargs):
        found.append(host)
        raise socket.gaierror("Name or service not known")

    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.example:8443/hf")
    return found


def test_the_cache_alone_is_read_where_the_host_is_unknown(asked, tmp_path, monkeypatch):
    with pytest.raises(ZeroDivisionError), cache_where_unknown("org/model"):
        assert constants.is_offline_mode() and asked == ["hub.example"]
        raise ZeroDivisionError
    assert not constants.is_offline_mode()  # a later upload is tried
    with cache_where_unknown(str(tmp_path)):
        assert not constants.is_offline_mode() and len(asked) == 1
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    with cache_where_unknown("org/model"):
        assert not constants.is_offline_mode() and len(asked) == 1


def test_an_unknown_name_is_refused_without_a_wait(asked, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"waited for {seconds} s"))
    for load, what in ((load_tokenizer, "tokenizer"), (load_causal_lm, "model")):
        with pytest.raises(MissingModelError, match=f"'org/none' is not a folder here .* gave no {what}"):
            load("org/none")
    with pytest.raises(DataError, match="org/none cannot be read: .* It is no file or folder here"):
        source.read("org/none", None, streaming=False)
