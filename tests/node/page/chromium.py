"""Chromium without a window, driven through a pipe: it shows a page, and reports the errors of its console."""

import json
import os
import select
import shutil
import signal
import subprocess
import time

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions",
    "--remote-debugging-pipe",
)  # fmt: skip


def found():
    """Return the path of Chromium, or None if it is not installed."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Browser:
    """A browser with one page. ``evaluate`` runs a script in the page; ``complaints`` has the errors of its console."""

    def __init__(self, folder, width=1200, height=1300, dark=False):
        (theirs_in, self.out), (self.into, theirs_out) = os.pipe(), os.pipe()

        # The protocol needs descriptors 3 and 4: a shell puts the pipes there, whatever numbers they have.
        line = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self.process = subprocess.Popen(
            ["bash", "-c", line, found(), *FLAGS, f"--user-data-dir={folder}", f"--window-size={width},{height}"],
            pass_fds=(theirs_in, theirs_out), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, process_group=0,
        )  # fmt: skip
        os.close(theirs_in), os.close(theirs_out)
        self.rest, self.count, self.session, self.complaints = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def call(self, method, **params):
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + 60
        while True:
            *whole, self.rest = self.rest.split(b"\0")
            for number, one in enumerate(whole):
                got = json.loads(one)
                if got.get("id") == self.count:
                    self.rest = b"\0".join([*whole[number + 1 :], self.rest])
                    assert "error" not in got, got
                    return got["result"]
                self.heard(got)
            assert select.select([self.into], [], [], max(0.0, end - time.monotonic()))[0], f"{method}: no answer"
            data = os.read(self.into, 1 << 20)
            assert data, "Chromium ended"
            self.rest += data

    def heard(self, event):
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"].get("exception", {}).get("description", str(params)))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])

    def open(self, url):
        self.call("Page.navigate", url=url)

    def evaluate(self, script):
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def screenshot(self):
        return self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]

    def close(self):
        os.killpg(self.process.pid, signal.SIGKILL)  # The process leads a group of its own.
        self.process.wait()
        os.close(self.out), os.close(self.into)
