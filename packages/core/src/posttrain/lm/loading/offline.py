"""What is read from the Hub's cache where its host cannot be found."""

from __future__ import annotations

import contextlib
import os
import socket
import urllib.request
from urllib.parse import urlsplit

from posttrain.core.models.wrapping import replaced


def cache_where_unknown(name: str) -> contextlib.AbstractContextManager[None]:
    """A context in which `name`, unless it is a folder or file, is read from the Hub's cache alone if this machine does
    not know the Hub's host. huggingface_hub tries each request again, for half a minute, before it reads its cache.
    """
    from huggingface_hub import constants

    offline = constants.HF_HUB_OFFLINE or not (os.path.exists(name) or _finds(constants.ENDPOINT))
    return replaced(constants, "HF_HUB_OFFLINE", offline)


def _finds(endpoint: str) -> bool:
    """Whether this machine knows the host of `endpoint`, or has a proxy that may."""
    try:
        return bool(urllib.request.getproxies() or socket.getaddrinfo(urlsplit(endpoint).hostname, None))
    except OSError:
        return False
