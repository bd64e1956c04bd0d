"""The picture of a node's page: python docs/pictures/page.py, about a minute and a half; needs Chromium.

Four nodes learn digits in processes of this machine, one of them is killed, and the page of the first is drawn as a
browser shows it then. The seconds are chosen so that the lines have something to show.
"""

from __future__ import annotations

import base64
import socket
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from node.local import LocalSwarm  # noqa: E402 - of this checkout
from tests.node.page.chromium import Browser, found  # noqa: E402

WIDTH = 1400  # pixels: all figures in one row, and the addresses in the table
JOINING_S, TRAINING_S, DEAD_S = 3.0, 30.0, 30.0
ARGUMENTS = ["--samples", 10**7, "--step-delay", 0.02]
COLOURS = 128  # Enough for text and lines, and the file has a third of the size.


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def watch(swarm: LocalSwarm, seconds: float) -> None:
    """Let the nodes train for so long. Raises LocalError if one ends by itself."""
    end = time.monotonic() + seconds
    swarm.wait(lambda: time.monotonic() > end)


def main() -> None:
    if found() is None:
        sys.exit("There is no Chromium here: install one, or leave the picture as it is.")
    page = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as folder, LocalSwarm(ROOT / "examples" / "digits.py", ARGUMENTS) as swarm:
        swarm.add(page=page)
        browser = Browser(folder, width=WIDTH, height=1300)
        try:
            for _ in range(3):
                watch(swarm, JOINING_S)
                swarm.add()
                if len(swarm.children) == 2:
                    browser.open(f"http://{page}/")
            watch(swarm, TRAINING_S)
            swarm.kill(2)
            watch(swarm, DEAD_S)
            height = browser.evaluate("document.documentElement.scrollHeight")
            picture = Path(folder) / "page.png"
            browser.call(
                "Emulation.setDeviceMetricsOverride", width=WIDTH, height=height, deviceScaleFactor=1, mobile=False
            )
            time.sleep(2.0)  # the page draws itself anew once a second
            picture.write_bytes(base64.b64decode(browser.screenshot()))
            assert not browser.complaints, browser.complaints
        finally:
            browser.close()
        with Image.open(picture) as drawn:
            drawn.convert("RGB").quantize(COLOURS).save(ROOT / "docs" / "pictures" / "page.png", optimize=True)


if __name__ == "__main__":
    main()
