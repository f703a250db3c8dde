"""The chat page in a real browser, against a server whose answers the tests write."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("selenium", reason="selenium is not installed (extra dev-all)")

from fake_chat_server import FakeChat, serving
from page_browser import CHROMIUM, DRIVER, Page, start_browser, until
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CHROMIUM.exists() and DRIVER.exists()),
        reason="chromium is not installed (apt-get install chromium chromium-driver)",
    ),
]

LONG = " ".join(f"word{i}" for i in range(400))
FRAME = "return getComputedStyle(document.activeElement).outlineStyle"
ATTACKS = """Line<br>

Before <script>window.hurt = 1</script><img src=x onerror="window.hurt = 2">
<a href="javascript:window.hurt = 3">a</a> [b](javascript:window.hurt=4) ![c](https://example.org/c.png)
<p style="position:fixed" onclick="window.hurt = 5" id="prompt" class="note failed">styled</p>
<form action="https://example.org"><input name="q"><button>go</button></form>
<svg><style>@import url(https://example.org/x.css)</style></svg><iframe srcdoc="<script>top.hurt=6</script>"></iframe>
<base href="https://example.org/"><meta http-equiv="refresh" content="0;url=https://example.org">

```"><script>window.hurt=7</script>
<script>window.hurt = 8</script>
```

After [safe](https://example.org/d)"""


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def browser(downloads: Path) -> Iterator[webdriver.Chrome]:
    browser = start_browser(downloads)
    yield browser
    browser.quit()


@pytest.fixture
def page(browser: webdriver.Chrome) -> Iterator[Page]:
    """A page of a server of its own (another port, so storage is empty), without console errors."""
    chat = FakeChat()
    with serving(chat):
        page = Page(browser, chat)
        page.open()
        yield page
        assert page.problems() == []
        browser.get("about:blank")


def test_an_answer_streams_as_markdown_with_its_figures(page: Page) -> None:
    page.chat.answers = ["# Title\n\nSome **bold** text.\n\n```python\nprint(1)\n```\n\n- [x] done"]
    page.send("hello")
    assert page.said()[0] == "hello"
    for selector, text in [
        (".markdown h3", "Title"),
        (".markdown strong", "bold"),
        (".code pre", "print(1)"),
        (".code-head", "python"),
        (".markdown li", "☑ done"),
    ]:
        assert text in page.text(selector)
    figures = page.text(".figures").split()
    assert {"tok/s", "90", "%", "kB", "MB"} <= set(figures)
    assert "600 MB" in (page.one(".chart").get_attribute("aria-label") or "")
    assert " of 4,096 tokens" in page.text("#context")
    assert page.text("#announce").startswith("Answer: # Title")  # once, when it is whole
    assert page.chat.paths == ["/v1/chat/completions"]
    assert page.chat.asked[0]["messages"] == [{"role": "user", "content": "hello"}]
    assert page.chat.asked[0]["stream"] is page.chat.asked[0]["timings_per_token"] is True


def test_thoughts_are_folded_and_sent_back(page: Page) -> None:
    page.chat.thoughts = "Hm, *well*."
    page.send("one")
    assert page.said() == ["one", "Thinking\n\nHello there."]
    page.click(".message.assistant summary")
    assert page.text(".message.assistant details em") == "well"
    page.send("two")
    answer = {"role": "assistant", "content": "Hello *there*.", "reasoning_content": "Hm, *well*."}
    assert page.chat.asked[-1]["messages"][1] == answer


@pytest.mark.parametrize("way", ["button", "escape"])
def test_stop_keeps_what_came_and_ends_the_request(page: Page, way: str) -> None:
    page.chat.answers, page.chat.delay = [LONG], 0.02
    page.send("long", wait=False)
    page.shows(".message.assistant .body", "word3")
    page.click("#send") if way == "button" else page.keys(Keys.ESCAPE)
    page.ended()
    page.shows(".note.stopped", "Stopped.")
    assert "word3" in page.said()[1]
    assert "word399" not in page.said()[1]
    until(lambda: page.chat.cancelled == 1, "the server's broken pipe")


def test_retries_and_edits_are_branches(page: Page) -> None:
    page.chat.answers = ["first", "second", "third", "fourth"]
    page.send("one")
    page.click("[data-action=retry]")
    page.shows(".message.assistant .body", "second")
    page.ended()
    page.click("[data-action=previous]")
    assert page.said() == ["one", "first"]
    page.send("two")  # goes on from the first answer
    assert [m["content"] for m in page.chat.asked[-1]["messages"]] == ["one", "first", "two"]
    page.click("[data-action=edit]")
    page.one(".edit textarea").clear()
    page.one(".edit textarea").send_keys("other", Keys.ENTER)
    page.shows(".message.assistant .body", "fourth")
    page.ended()
    assert page.said() == ["other", "fourth"]
    page.click("[data-action=previous]")
    assert page.said() == ["one", "first", "two", "third"]
    page.browser.refresh()
    page.shows(".message:last-child .body", "third")
    assert page.text(".message.assistant .versions") == "1/2"


def test_conversations_are_kept_named_found_and_deleted(page: Page) -> None:
    page.send("about apples")
    page.click("#new")
    assert page.said() == []
    page.send("about pears")
    page.browser.refresh()
    page.shows("#title", "about pears")
    assert page.texts("#conversations button") == ["about pears", "about apples"]
    page.one("#search").send_keys("apple")
    page.click("#conversations button")
    page.shows(".message.user", "about apples")
    page.click("#menu summary")
    page.click("#rename")
    page.one("dialog input").clear()
    page.one("dialog input").send_keys("Fruit", Keys.ENTER)
    page.shows("#title", "Fruit")
    page.click("#menu summary")
    page.click("#delete")
    page.click("dialog .danger")
    page.shows("#title", "New conversation")
    page.browser.refresh()
    assert until(lambda: page.texts("#conversations button"), "list") == ["about pears"]


def test_settings_reach_the_request(page: Page) -> None:
    page.click("#settings")
    fields = {
        "system": "Be brief.",
        "temperature": "0.5",
        "top_k": "40",
        "seed": "7",
        "stop": "END\nSTOP",
    }
    for name, value in fields.items():
        page.one(f"dialog #{name}").send_keys(value)
    page.click("dialog .primary")
    page.browser.refresh()  # they are kept
    page.send("hi")
    asked = page.chat.asked[0]
    assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (asked["temperature"], asked["top_k"], asked["seed"]) == (0.5, 40, 7)
    assert asked["stop"] == ["END", "STOP"]
    assert "top_p" not in asked


def test_an_exported_conversation_comes_back(page: Page, downloads: Path) -> None:
    page.chat.answers = ["first", "second"]
    page.send("Export me")
    page.click("[data-action=retry]")
    page.shows(".message.assistant .body", "second")
    page.ended()
    for kind in ("markdown", "json"):
        page.click("#menu summary")
        page.click(f"#export-{kind}")
    text = until(lambda: _read(downloads / "export-me.md"), "Markdown")
    assert text == "# Export me\n\n## You\n\nExport me\n\n## Answer\n\nsecond\n"
    until(lambda: _read(downloads / "export-me.json"), "JSON")
    page.one("#import-file").send_keys(str(downloads / "export-me.json"))
    until(lambda: len(page.all("#conversations button")) == 2, "the imported conversation")
    assert page.said() == ["Export me", "second"]
    assert page.text(".versions") == "2/2"
    damaged = json.loads((downloads / "export-me.json").read_text()) | {
        "messages": {"a": {"id": "a"}}
    }
    (downloads / "damaged.json").write_text(json.dumps(damaged))
    page.one("#import-file").send_keys(str(downloads / "damaged.json"))
    page.shows("#file-problem", "Message a is not whole.")


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_key_is_asked_for_and_forgotten_with_the_tab(page: Page) -> None:
    page.chat.key = "secret"
    page.browser.refresh()
    page.shows("dialog", "This server asks for a key")
    page.one("dialog input").send_keys("secret", Keys.ENTER)
    page.shows("#model", "demo-1b-stem")
    page.send("hi")
    assert page.said()[1] == "Hello there."
    page.chat.key = "changed"
    page.send("again", wait=False)
    page.one("dialog input").send_keys("changed", Keys.ENTER)
    page.shows(".message:last-child .body", "Hello")  # the answer was asked for again
    assert page.run("return localStorage.length") == 0
    assert all("401" in problem for problem in page.problems())


def test_a_loading_server_is_waited_for(page: Page) -> None:
    page.chat.loading = True
    page.browser.refresh()
    page.shows("#banner", "loading the model")
    page.chat.loading = False
    until(lambda: not page.text("#banner"), "the end of the banner")
    page.shows("#model", "demo-1b-stem")
    assert all("503" in problem for problem in page.problems())


def test_a_server_that_is_gone_loses_nothing(browser: webdriver.Chrome) -> None:
    chat = FakeChat([LONG, "Hello there."])
    page = Page(browser, chat)
    with serving(chat) as server:
        page.open()
        page.send("kept")
    page.send("lost?")
    page.shows(".note.failed", "cannot be reached")
    page.shows("#banner", "cannot be reached")
    assert page.said()[:3] == ["kept", LONG, "lost?"]
    assert not page.one("#to-end").is_displayed()  # the end stays in sight
    with serving(chat, server.server_port):
        until(lambda: not page.text("#banner"), "the end of the banner")
        page.click(".message:last-child [data-action=retry]")
        page.shows(".message:last-child .body", "Hello there.")
        page.chat.breaks = True
        page.send("cut off")
        page.shows(".note.failed", "ended before the answer was finished")
    browser.get("about:blank")
    page.problems()


def test_answers_go_on_while_another_conversation_is_shown(page: Page) -> None:
    page.chat.answers, page.chat.delay = [LONG, "short"], 0.005
    page.send("slow", wait=False)
    page.shows(".message.assistant .body", "word1")
    page.click("#new")
    page.send("quick")
    assert page.said() == ["quick", "short"]
    page.browser.find_element(By.XPATH, "//nav//button[contains(., 'slow')]").click()
    page.shows(".message.assistant .body", "word399")
    page.ended()
    assert len(page.said()) == 2


def test_answers_can_do_nothing(page: Page) -> None:
    page.chat.answers = [ATTACKS]
    page.send("attack")
    assert page.run("return window.hurt ?? null") is None
    elements, attributes = page.run(
        """const all = [...document.querySelectorAll('.message.assistant .markdown *')];
        const once = (names) => [...new Set(names)].sort();
        return [once(all.map((e) => e.localName)), once(all.flatMap((e) => e.getAttributeNames()))]"""
    )
    assert elements == ["a", "br", "button", "code", "div", "p", "pre", "span"]
    ours = {"aria-label", "class", "role", "tabindex", "type"}
    assert set(attributes) - ours == {"href", "rel", "target"}
    links = page.all(".message.assistant .markdown a")
    hrefs = [link.get_dom_attribute("href") for link in links]
    assert hrefs == [None, "https://example.org/c.png", "https://example.org/d"]
    assert links[-1].get_dom_attribute("rel") == "noopener noreferrer"
    assert "<script>window.hurt" in page.text(".markdown")  # shown as it was written
    assert page.said()[0] == "attack"
    page.send("<img src=x onerror='window.hurt=9'>")
    assert page.run("return window.hurt ?? null") is None


@pytest.mark.parametrize("width", [320, 390, 800, 1000])
def test_nothing_is_wider_than_a_phone(page: Page, width: int) -> None:
    page.chat.answers = [
        f"{'w' * 300}\n\n```\n{'x = 1; ' * 60}\n```\n\n|{'a|' * 30}\n|{'-|' * 30}\n|{'b|' * 30}"
    ]
    page.open(width=width, height=700)
    page.send("y" * 200)
    for button, side in (("#show-sidebar", "#sidebar"), ("#show-panel", "#panel")):
        wide = "return [document.documentElement.scrollWidth, document.querySelector('#thread').scrollWidth]"
        whole, thread = page.run(wide)
        assert whole <= width and thread <= width
        if page.one(side).is_displayed():
            continue
        page.click(button)
        until(page.one(side).is_displayed, side)
        page.keys(Keys.ESCAPE)
        page.one(f"{side}[hidden]")
    send = page.run("return document.querySelector('#send').getBoundingClientRect().right")
    assert send <= width - 10


def test_dark_and_light_can_be_read(page: Page) -> None:
    script = """const style = getComputedStyle(document.documentElement);
    const shown = (name) => { const c = document.createElement('canvas').getContext('2d');
      c.fillStyle = style.getPropertyValue(name).trim(); c.fillRect(0, 0, 1, 1);
      return [...c.getImageData(0, 0, 1, 1).data].slice(0, 3); };
    return ['--text', '--quiet', '--accent', '--danger', '--ground', '--raised', '--sunken', '--tint']
      .map(shown)"""
    for dark in (False, True):
        page.open(dark=dark)
        colours = [_luminance(colour) for colour in page.run(script)]
        assert (colours[4] < 0.1) is dark
        for text in colours[:4]:
            for ground in colours[4:]:
                low, high = sorted((text, ground))
                assert (high + 0.05) / (low + 0.05) >= 4.5  # WCAG's AA


def _luminance(colour: list[int]) -> float:
    parts = [c / 255 for c in colour]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_everything_is_done_by_keyboard(page: Page) -> None:
    page.chat.answers = ["first", "second", "third"]
    page.shows("#model", "demo")
    page.run("document.querySelector('a, button, input').focus()")  # as the first Tab does
    page.keys(Keys.ENTER)  # a link that skips to the field
    page.keys("typed")
    page.shift(Keys.ENTER)
    page.keys("two lines", Keys.ENTER)
    page.ended()
    assert page.chat.asked[0]["messages"][0]["content"] == "typed\ntwo lines"
    _back_to(page, "Retry")
    page.keys(Keys.ENTER)
    page.shows(".message.assistant .body", "second")
    page.ended()
    assert page.run(FRAME) == "none"  # not around all messages
    _back_to(page, "Previous version")
    page.keys(Keys.ENTER)
    assert page.said()[1] == "first"
    assert _focused(page) in ("Retry", "Next version")  # the first has none before it
    _back_to(page, "Edit")
    page.keys(Keys.ENTER)
    page.keys(Keys.ESCAPE)
    assert _focused(page) == "Edit"
    _back_to(page, "Settings")
    page.keys(Keys.ENTER)
    page.shows("dialog", "Temperature")
    page.keys(Keys.ESCAPE)
    until(lambda: _focused(page) == "Settings", "focus where it was")


def _focused(page: Page) -> str:
    return str(page.run("return document.activeElement.getAttribute('aria-label') ?? ''"))


def _back_to(page: Page, name: str) -> None:
    for _ in range(30):
        if _focused(page) == name:
            assert page.run(FRAME) == "solid"  # the focus can be seen
            return
        page.shift(Keys.TAB)
    raise AssertionError(f"{name} is not reached by Shift+Tab")


def test_every_control_has_a_name(page: Page) -> None:
    page.chat.answers = ["Code:\n\n```js\n1\n```\n\n| a |\n|---|\n| b |\n\n<think>", "other"]
    page.send("first")
    page.click("[data-action=retry]")
    page.ended()
    page.click("#menu summary")
    names = page.names()
    page.click("#settings")
    names += page.names()
    assert {("button", "Send"), ("button", "Previous version"), ("button", "Rename"), ("textbox", "Message"),
            ("spinbutton", "Temperature"), ("dialog", "Settings"), ("article", "You"), ("heading", "Answer"),
            ("meter", "Context used"), ("button", "Copy")} <= set(names)  # fmt: skip
    assert not [(role, name) for role, name in names if not name.strip()]
    page.click("dialog .buttons button")
