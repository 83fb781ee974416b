"""A headless Chromium that a test drives: the DevTools protocol over two pipes, without any package."""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def executable() -> str | None:
    """The path of a Chromium, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a headless Chromium, offline. A context manager; `errors` are the scripts' uncaught exceptions."""

    def __init__(self, profile: Path, width: int = 1400, height: int = 900):
        program = executable()
        assert program
        theirs, ours = os.pipe()
        answers, sent = os.pipe()
        # Chromium reads commands from file 3 and writes answers to file 4.
        command = [
            "bash",
            "-c",
            f'exec "$@" 3<&{theirs} 4>&{sent}',
            "-",
            program,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            "--no-first-run",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
        ]
        self._process = subprocess.Popen(
            command, pass_fds=(theirs, sent), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs)
        os.close(sent)
        self._in, self._out = os.fdopen(ours, "wb", buffering=0), os.fdopen(answers, "rb")
        self._count = 0
        self._held = b""
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", {"url": "about:blank"})
        attached = self.send("Target.attachToTarget", {"targetId": target["targetId"], "flatten": True})
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._session = None
        try:
            self.send("Browser.close")
            self._process.wait(20)
        except (OSError, AssertionError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        for file in (self._in, self._out):
            file.close()

    def send(self, method: str, parameters: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The result of one command of the DevTools protocol."""
        self._count += 1
        number = self._count
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters or {}}
        if self._session:
            message["sessionId"] = self._session
        self._in.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        """The next message; each ends with a zero byte."""
        while b"\0" not in self._held:
            piece = self._out.read1(1 << 20)
            assert piece, "the browser has ended"
            self._held += piece
        data, _, self._held = self._held.partition(b"\0")
        message = json.loads(data)
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(message["params"]["exceptionDetails"]))
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        return message

    def open(self, url: str) -> None:
        """Goes to the page."""
        self.send("Page.navigate", {"url": url})

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited when it is a promise."""
        asked = {"expression": script, "awaitPromise": True, "returnByValue": True}
        answer = self.send("Runtime.evaluate", asked)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 60) -> Any:
        """The value of a JavaScript expression as soon as it is true."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(condition)):
            assert time.monotonic() < deadline, f"{condition} was not true within {seconds} s; errors: {self.errors}"
            time.sleep(0.02)
        return value

    def screenshot(self, path: Path, whole: bool = False) -> Path:
        """The path of a PNG of what is in sight, or of the whole page."""
        shot = self.send("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole})
        path.write_bytes(base64.b64decode(shot["data"]))
        return path
