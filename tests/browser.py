"""A browser without a window, driven as a person would: chromedriver's protocol over HTTP."""

from __future__ import annotations

import base64
import http.client
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DRIVER = shutil.which("chromedriver")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
MISSING = None if DRIVER and BROWSER else "neither Chromium nor its driver is installed"

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    """A Chromium of its own, with an empty profile; a context manager."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._log = (folder / "chromedriver.log").open("wb")
        self._driver = subprocess.Popen(
            [str(DRIVER), f"--port={self._port}"], stdout=self._log, stderr=self._log
        )
        self._session = ""
        try:
            self.until(self._answers, 120)
            # Root, in a container: neither a sandbox nor shared memory of a size is to be had.
            args = ["--headless=new", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
            args += ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
            options = {"goog:chromeOptions": {"binary": BROWSER, "args": args}}
            options["goog:loggingPrefs"] = {"browser": "ALL"}
            found = self._call("POST", "/session", {"capabilities": {"alwaysMatch": options}})
            self._session = f"/session/{found['sessionId']}"
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the browser and its driver."""
        if self._session:
            self._call("DELETE", self._session)
            self._session = ""
        self._driver.terminate()
        self._driver.wait(60)
        self._log.close()

    # -- the page --

    def show(self, address: str, width: int, scheme: str) -> None:
        """Open a page in a viewport of a width, in a scheme of colours, light or dark."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.tell("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.tell("Emulation.setEmulatedMedia", features=[feature])
        self._call("POST", f"{self._session}/url", {"url": address})

    def run(self, script: str, *args: Any) -> Any:
        """What a function body in JavaScript returns."""
        asked = {"script": script, "args": list(args)}
        return self._call("POST", f"{self._session}/execute/sync", asked)

    def click(self, selector: str) -> None:
        """Click on an element as a pointer does; it is scrolled to, and must not be covered."""
        asked = {"using": "css selector", "value": selector}

        def clicked() -> bool:
            found = self._call("POST", f"{self._session}/element", asked)
            try:
                self._call("POST", f"{self._session}/element/{found[_ELEMENT]}/click", {})
            except AssertionError as error:
                if "stale element" not in str(error):
                    raise
                return False  # the page was drawn anew meanwhile
            return True

        self.until(clicked, 120)

    def text(self, selector: str) -> str:
        """The visible text of an element; empty where there is none."""
        script = "return document.querySelector(arguments[0])?.innerText ?? ''"
        return str(self.run(script, selector))

    def wait(self, script: str, *args: Any) -> Any:
        """Run a function body until it returns something true."""
        return self.until(lambda: self.run(script, *args), 120)

    def screenshot(self) -> bytes:
        """The whole page as PNG."""
        found = self.tell("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(found["data"])

    def complaints(self) -> list[str]:
        """The console's errors since the last call."""
        found = self._call("POST", f"{self._session}/se/log", {"type": "browser"})
        return [each["message"] for each in found if each["level"] == "SEVERE"]

    # -- the driver --

    def tell(self, command: str, **parameters: Any) -> Any:
        """Call a command of the DevTools protocol."""
        asked = {"cmd": command, "params": parameters}
        return self._call("POST", f"{self._session}/goog/cdp/execute", asked)

    def until(self, done: Callable[[], Any], seconds: float) -> Any:
        """Ask until the answer is true."""
        end = time.monotonic() + seconds
        while not (found := done()):
            assert time.monotonic() < end, f"not so after {seconds} s: {done}"
            time.sleep(0.05)
        return found

    def _answers(self) -> bool:
        assert self._driver.poll() is None, "the driver ended"
        try:
            return bool(self._call("GET", "/status")["ready"])
        except OSError:
            return False

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"content-type": "application/json"})
            found = json.loads(connection.getresponse().read())["value"]
        finally:
            connection.close()
        if isinstance(found, dict) and "error" in found:
            raise AssertionError(f"{found['error']}: {found['message'].splitlines()[0]}")
        return found
