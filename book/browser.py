"""Chromium, driven through pipes by its own DevTools protocol.

https://chromedevtools.github.io/devtools-protocol lists the methods and
events; both pipes carry JSON, a NUL after each message.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",  # root has none
    "--no-first-run",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
]
# Chromium reads descriptor 3 and writes 4.
START = 'exec "$0" "$@" 3<&{} 4>&{} 2>/dev/null'
PATIENCE = 120  # seconds


class Browser:
    """A browser with a new profile; it ends with its pipe."""

    def __init__(self) -> None:
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        their_in, ours_out = os.pipe()
        self.answers, their_out = os.pipe()
        profile = f"--user-data-dir={self.profile.name}"
        start = ["bash", "-c", START.format(their_in, their_out)]
        self.process = subprocess.Popen(
            [*start, CHROMIUM, *FLAGS, profile], pass_fds=(their_in, their_out)
        )
        os.close(their_in)
        os.close(their_out)
        self.commands = os.fdopen(ours_out, "wb")
        self.numbers = itertools.count(1)
        self.events: list[dict[str, Any]] = []
        self.unread = b""

    def close(self) -> None:
        self.commands.close()
        self.process.wait(PATIENCE)
        os.close(self.answers)
        self.profile.cleanup()

    def call(self, method: str, session: str | None, **params: Any) -> Any:
        """The result of one command; the events before it are kept."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params}
        message |= {"sessionId": session} if session else {}
        self.commands.write(json.dumps(message).encode() + b"\0")
        self.commands.flush()
        while (answer := self.read()).get("id") != number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def read(self) -> dict[str, Any]:
        """The next message."""
        parts = [self.unread]
        while b"\0" not in parts[-1]:
            if not select.select([self.answers], [], [], PATIENCE)[0]:
                raise TimeoutError("Chromium does not answer")
            parts.append(os.read(self.answers, 1 << 16))
            if not parts[-1]:
                raise EOFError("Chromium has ended")
        message, _, self.unread = b"".join(parts).partition(b"\0")
        return json.loads(message)


class Tab:
    """One page in the browser, from its address until it is closed."""

    def __init__(self, browser: Browser, *domains: str) -> None:
        self.browser = browser
        browser.events.clear()
        made = browser.call("Target.createTarget", None, url="about:blank")
        self.target = made["targetId"]
        attached = browser.call(
            "Target.attachToTarget", None, targetId=self.target, flatten=True
        )
        self.session = attached["sessionId"]
        for domain in ("Page", *domains):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """The result of a command that is about this page."""
        return self.browser.call(method, self.session, **params)

    def close(self) -> None:
        self.browser.call("Target.closeTarget", None, targetId=self.target)

    def open(self, address: str) -> None:
        """Go there, and wait until all has loaded."""
        self.call("Page.navigate", url=address)
        while self.run("document.readyState") != "complete":
            time.sleep(0.05)

    def run(self, script: str) -> Any:
        """What a script evaluates to; of a promise, what it resolves to."""
        answer = self.call(
            "Runtime.evaluate",
            expression=script,
            awaitPromise=True,
            returnByValue=True,
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def size(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 768,
        )

    def media(self, medium: str) -> None:
        """Show the page on a screen or in print, with nothing that moves."""
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.call("Emulation.setEmulatedMedia", media=medium, features=[still])

    def seen(self, method: str) -> list[dict[str, Any]]:
        """The events of that name since the tab was made."""
        return [
            e["params"] for e in self.browser.events if e["method"] == method
        ]
