"""The chat page in Debian's chromium, as a person uses it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fake_chat_server import FakeChat
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

CHROMIUM = Path("/usr/bin/chromium")
DRIVER = Path("/usr/bin/chromedriver")
MOST_SECONDS = 60.0  # only a failure waits for it; a loaded machine may need half of it
T = TypeVar("T")


def start_browser(downloads: Path) -> webdriver.Chrome:
    """Start a browser without a window, which puts downloads into a folder."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))


def until(found: Callable[[], T], what: str) -> T:
    """Wait for something that is true, and return it."""
    deadline = time.monotonic() + MOST_SECONDS
    while not (value := found()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {MOST_SECONDS:g} s")
        time.sleep(0.02)
    return value


class Page:
    """The page of one server, opened in a browser whose storage for it is empty."""

    def __init__(self, browser: webdriver.Chrome, chat: FakeChat) -> None:
        self.browser = browser
        self.chat = chat

    def open(self, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        """Load the page at a size, in light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.browser.get(self.chat.url)

    def one(self, selector: str) -> WebElement:
        """The element that a selector finds, once it is there."""
        return until(lambda: self.all(selector), selector)[0]

    def all(self, selector: str) -> list[WebElement]:
        """Every element that a selector finds."""
        return list(self.browser.find_elements(By.CSS_SELECTOR, selector))

    def click(self, selector: str) -> None:
        """Click an element."""
        self.one(selector).click()

    def run(self, script: str, *args: object) -> Any:
        """Run JavaScript and return its value."""
        return self.browser.execute_script(script, *args)

    def keys(self, *keys: str) -> None:
        """Press keys where the focus is."""
        webdriver.ActionChains(self.browser).send_keys(*keys).perform()

    def shift(self, key: str) -> None:
        """Press a key while Shift is held."""
        chain = webdriver.ActionChains(self.browser).key_down(Keys.SHIFT)
        chain.send_keys(key).key_up(Keys.SHIFT).perform()

    def send(self, text: str, *, wait: bool = True) -> None:
        """Send a message, and wait until its answer has ended."""
        self.one("#prompt").send_keys(text, Keys.ENTER)
        if wait:
            self.ended()

    def ended(self) -> None:
        """Wait until no answer is being written."""
        until(lambda: self.all(".messages > :last-child .foot > *"), "the end of the answer")

    def text(self, selector: str) -> str:
        """What an element shows."""
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))

    def shows(self, selector: str, text: str) -> None:
        """Wait until an element shows a text."""
        until(lambda: self.all(selector) and text in self.text(selector), f"{text!r} in {selector}")

    def texts(self, selector: str) -> list[str]:
        """What every element that a selector finds shows."""
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.innerText)"
        return list(self.run(script, selector))

    def said(self) -> list[str]:
        """The texts of all messages shown."""
        return self.texts(".message .body")

    def problems(self) -> list[str]:
        """What the console said since the last call, violations of the policy included."""
        return [entry["message"] for entry in self.browser.get_log("browser")]

    def names(self) -> list[tuple[str, str]]:
        """Role and name of every control that a screen reader finds."""
        self.browser.execute_cdp_cmd("Accessibility.enable", {})
        nodes = self.browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        self.browser.execute_cdp_cmd("Accessibility.disable", {})
        roles = (
            (n["role"]["value"], n.get("name", {}).get("value", ""))
            for n in nodes
            if not n["ignored"]
        )
        return [(role, name) for role, name in roles if role in CONTROLS]


CONTROLS = (
    "button", "textbox", "searchbox", "spinbutton", "link", "dialog", "image", "meter", "navigation",
    "complementary", "region", "heading", "DisclosureTriangle", "article",
)  # fmt: skip
