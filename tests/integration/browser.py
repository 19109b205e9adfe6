"""A headless Chromium, driven over its DevTools protocol: as much as the dashboard's test needs."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import signal
import subprocess
from contextlib import asynccontextmanager

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE_S = 120.0
CODES = {"Enter": 13, "Escape": 27}  # of keys that mean more than their text


def binary():
    """Where a Chromium is, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab."""

    def __init__(self, socket):
        self._socket = socket
        self._count = 0
        self.troubles = []
        """What the page's console and the policy of its content complained of."""

    async def send(self, method, **params):
        self._count += 1
        wanted = self._count
        await self._socket.send_json({"id": wanted, "method": method, "params": params})
        async with asyncio.timeout(PATIENCE_S):
            while True:
                told = await self._socket.receive_json()
                self._note(told)
                if told.get("id") == wanted:
                    assert "error" not in told, told
                    return told["result"]

    def _note(self, told):
        params = told.get("params", {})
        if told.get("method") == "Runtime.exceptionThrown":
            self.troubles.append(json.dumps(params["exceptionDetails"])[:500])
        if told.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.troubles.append(params["entry"]["text"])
        if told.get("method") == "Page.javascriptDialogOpening":
            self.troubles.append(f"a dialog: {params['message']}")

    async def start(self):
        for domain in ("Page", "Runtime", "Log"):
            await self.send(f"{domain}.enable")

    async def look_as(self, *, width, height, dark=False, scale=1):
        """A window of that size, in that colour scheme."""
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        await self.send("Emulation.setEmulatedMedia", features=features)

    async def go(self, url):
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def run(self, script):
        """What a JavaScript expression comes to."""
        answer = await self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, script):
        """Wait until an expression is true; the last thing it came to is in the failure."""
        found = None
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not (found := await self.run(script)):
                    await asyncio.sleep(0.1)
        except TimeoutError:
            text = await self.run("document.body.innerText")
            msg = f"{script} stayed {found!r}; the page says: {text[:2000]}; {self.troubles}"
            raise AssertionError(msg) from None
        return found

    async def press(self, key, text=""):
        """A key, as a person presses it."""
        for kind in ("keyDown", "keyUp"):
            extra = {"text": text or key} if kind == "keyDown" and len(text or key) == 1 else {}
            if key in CODES:
                extra["windowsVirtualKeyCode"] = CODES[key]
            await self.send("Input.dispatchKeyEvent", type=kind, key=key, **extra)

    async def type(self, text):
        await self.send("Input.insertText", text=text)

    async def shot(self, path, *, whole=False):
        """A screenshot, of the window or of the whole page."""
        answer = await self.send(
            "Page.captureScreenshot", format="png", captureBeyondViewport=whole
        )
        path.write_bytes(base64.b64decode(answer["data"]))


@asynccontextmanager
async def page(folder):
    """A tab of a browser of its own, which is ended with the block."""
    command = [binary(), "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += [
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-extensions",
    ]
    command += ["--remote-debugging-port=0", f"--user-data-dir={folder / 'profile'}", "about:blank"]
    with (folder / "browser.log").open("wb") as log:
        process = _started(command, log)
    try:
        async with aiohttp.ClientSession() as http:
            address = await _address(folder, process)
            async with http.get(f"http://{address}/json/list") as answer:
                tabs = await answer.json()
            url = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
            async with http.ws_connect(url, max_msg_size=0) as socket:
                tab = Page(socket)
                await tab.start()
                yield tab
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def _started(command, log):
    return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


async def _address(folder, process):
    """Where the browser listens, as it writes it into its profile."""
    port = folder / "profile" / "DevToolsActivePort"
    async with asyncio.timeout(PATIENCE_S):
        while not port.exists() or not port.read_text().strip():
            assert process.poll() is None, (folder / "browser.log").read_text()[-2000:]
            await asyncio.sleep(0.1)
    return f"127.0.0.1:{port.read_text().split()[0]}"
