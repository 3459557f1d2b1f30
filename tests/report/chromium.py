"""Headless Chromium without a network, driven through Debian's chromedriver."""

import json
import shutil
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # no name can be looked up: the network is cut
)


def missing() -> str | None:
    """What lacks for a browser to be had, in words."""
    for name in ("chromium", "chromedriver"):
        if shutil.which(name) is None:
            return f"needs {name}: apt-get install chromium chromium-driver"
    return None


class Browser:
    """A window, a page from disk in it, and what can be seen there."""

    def __init__(self, downloads: Path) -> None:
        options = Options()
        options.binary_location = shutil.which("chromium") or ""
        for flag in FLAGS:
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
        self.downloads = downloads
        self._cdp("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(downloads))

    def open(self, page: Path, *, width: int = 1440, dark: bool = False) -> None:
        self._cdp(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        self.emulate(dark=dark)
        self.driver.get_log("browser")
        self.driver.get(page.as_uri())
        ready = "return document.documentElement.dataset.ready === 'yes'"
        WebDriverWait(self.driver, 30).until(lambda _: self.run(ready))

    def emulate(self, *, dark: bool = False, media: str = "") -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._cdp("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def run(self, script: str, *arguments: object):
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def click(self, selector: str) -> None:
        element = self.find(selector)[0]
        self._centre(element)
        element.click()

    def choose(self, selector: str, value: int) -> None:
        self.run(
            "const s = document.querySelector(arguments[0]); s.value = arguments[1];"
            "s.dispatchEvent(new Event('change'))",
            selector,
            str(value),
        )

    def hover(self, element) -> str:
        """Move the pointer onto an element; what the tip then says."""
        self._centre(element)
        place = self.run("return arguments[0].getBoundingClientRect().toJSON()", element)
        x, y = place["x"] + place["width"] / 2, place["y"] + place["height"] / 2
        for dx in (3, 0):
            self._cdp("Input.dispatchMouseEvent", type="mouseMoved", x=x + dx, y=y)
        svg = self.run("return arguments[0].closest('svg')", element)
        said = "return arguments[0].querySelector('g[aria-label=tip]')?.textContent || ''"
        return self.run(said, svg)

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def pdf(self) -> str:
        return self._cdp("Page.printToPDF", printBackground=True)["data"]

    def saved(self, name: str) -> str:
        """The text of a file that the page saved, once all of it is there.

        The browser keeps its name with an empty file first, and may write it in pieces.
        """
        file = self.downloads / name
        self.driver.set_script_timeout(10)
        size = 0
        for _ in range(100):
            before, size = size, file.stat().st_size if file.is_file() else 0
            if size == before > 0:
                text = file.read_bytes().decode("utf-8")
                file.unlink()
                return text
            self.driver.execute_async_script("setTimeout(arguments[0], 50)")
        raise AssertionError(f"{name} was not saved; there is {list(self.downloads.iterdir())}")

    def data(self) -> dict:
        return json.loads(self.run("return document.getElementById('data').textContent"))

    def quit(self) -> None:
        self.driver.quit()

    def _centre(self, element) -> None:
        """Away from the bar at the top, which stays there."""
        self.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)

    def _cdp(self, command: str, **arguments: object) -> dict:
        return self.driver.execute_cdp_cmd(command, arguments)
