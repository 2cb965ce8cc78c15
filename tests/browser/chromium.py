"""A headless Chromium that opens pages and tells what a visitor would see; spoken to by its DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --hide-scrollbars --allow-file-access-from-files --remote-debugging-port=0
""".split()
#: What a published site has, and one that is built here lacks: mike's list of versions, GitHub's facts.
ABSENT = re.compile(r"/versions\.json$|^https://api\.github\.com/")
#: Elements that are wider than the page and that no ancestor scrolls or clips, by tag, class and beginning of text.
WIDE = """
(() => {
  const found = [], width = document.documentElement.clientWidth;
  for (const element of document.querySelectorAll('body *')) {
    const box = element.getBoundingClientRect();
    if (box.width === 0 || box.height === 0 || box.right <= width + 1 || box.left >= width) continue;
    let held = false;
    for (let parent = element; parent && parent !== document.documentElement; parent = parent.parentElement) {
      const style = getComputedStyle(parent);
      if (parent !== element && style.overflowX !== 'visible' || style.position === 'fixed') held = true;
    }
    if (!held) found.push(`${element.tagName}.${element.className}: ${element.textContent.trim().slice(0, 60)}`);
  }
  return found.slice(0, 5);
})()
"""


@dataclass(frozen=True)
class Seen:
    """A page at one width: `errors` of its console, elements that run off it (`wide`), and by how many pixels."""

    errors: list[str]
    wide: list[str]
    overflow: int
    screenshot: bytes


class Chromium:
    """One browser with one tab, for use in a ``with`` statement."""

    def __enter__(self) -> Chromium:
        from websockets.sync.client import connect

        self._folder = tempfile.TemporaryDirectory()
        command = [str(PROGRAM), *QUIET, f"--user-data-dir={self._folder.name}", "about:blank"]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if found := re.search(r"ws://127\.0\.0\.1:(\d+)/", line):
                break
        else:
            raise RuntimeError("Chromium ended before it listened")
        with urlopen(f"http://127.0.0.1:{found[1]}/json/list", timeout=30) as answer:
            tab = next(one for one in json.load(answer) if one["type"] == "page")
        self._open = contextlib.ExitStack()
        self._socket = self._open.enter_context(connect(tab["webSocketDebuggerUrl"], max_size=None))
        self._number, self._events = 0, []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self._process.terminate()
        self._process.wait(30)
        self._folder.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command; events that arrive meanwhile are kept."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == self._number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self._events.append(message)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page; of a promise, what it resolves to."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def open(self, page: Path | str, width: int, height: int = 900) -> Seen:
        """What is seen of a file or address in a window of that many pixels, once it has loaded."""
        self._events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=page.resolve().as_uri() if isinstance(page, Path) else page)
        limit = time.monotonic() + 60
        while self.evaluate("document.readyState") != "complete":
            assert time.monotonic() < limit, f"{page} has not loaded"
            time.sleep(0.02)
        overflow = self.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        shot = base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        return Seen(self._errors(), self.evaluate(WIDE), overflow, shot)

    def _errors(self) -> list[str]:
        found = []
        for event in self._events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"].get("exception", {}).get("description")))
            elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
                if not ABSENT.search(params["entry"].get("url", "")):
                    found.append(f"{params['entry']['text']}: {params['entry'].get('url')}")
            elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":
                found.append(str([one.get("value") for one in params["args"]]))
        return found
