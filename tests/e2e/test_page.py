"""The page at / in headless Chromium, against kimi-nano and against an engine that plays a script."""

import contextlib
import json
import shutil
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from perilune.text.chat import template_for
from perilune.text.tokenizer import Tokenizer
from runs.docs.browser import Browser, browsing
from tests.e2e.server import NANO, Server, needs_nano

CHROMIUM = shutil.which("chromium")
pytestmark = [
    needs_nano,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium in PATH (Debian: apt install chromium)"),
]
LONG_WORDS = 40_000  # 40 s, of which a busy machine may need several to stop it
DESKTOP, PHONE = (1000, 700), (360, 640)
HOSTILE = (
    '<img src="x" onerror="hit=1"><script>hit=1</script> **<b onclick="hit=1">bold</b>** '
    "[click](javascript:hit=1) `<i>code</i>`\n\n```html\n<script>hit=1</script>\n```\n\n"
    "# <svg onload=hit=1>\n\n- <iframe srcdoc='<script>parent.hit=1</script>'>\n\n"
    "| <u>a</u> | b |\n|---|---|\n| <u>c</u> | d |"
)
ANSWERS = {
    "hostile": f"<u>thought</u></think>{HOSTILE}",
    "first": "a</think>one",
    "second": "b</think>two",
    "long": "c</think>" + "word " * LONG_WORDS,
    "marks": "d</think># Title\n\nSome *slanted* and **bold** `code`.\n\n1. one\n2. two\n   - inner\n\n> quoted\n\n"
    "```python\nprint(1)\n```\n\n[name](https://example.org/a)\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n" + "x" * 300,
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM is not None
    with browsing(CHROMIUM) as found:
        yield found


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer, template = Tokenizer.from_directory(NANO), template_for(NANO)
    lines = [
        {
            "after": template.render_ids(tokenizer, [{"role": "user", "content": question}]),
            "tokens": tokenizer.encode(answer + "<|im_end|>", allow_special=True),
        }
        for question, answer in ANSWERS.items()
    ]
    file = tmp_path_factory.mktemp("page") / "script.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture(scope="module")
def scripted(script: Path) -> Iterator[Server]:
    running = Server(command=command(script))
    yield running
    running.kill()


def command(script: Path) -> list[str]:
    options = ("--script", str(script), "--step-ms", "4", "--width", "4")
    return [sys.executable, "-m", "tests.scripted_engine", *options, "serve", "kimi-nano", "--port", "0"]


class Page:
    """The page of a server, new and with nothing kept; what a user does with it."""

    def __init__(self, browser: Browser, server: Server, size: tuple[int, int] = DESKTOP) -> None:
        self.browser, self.value, self.wait = browser, browser.value, browser.wait
        browser.open(f"{server.url}/", size)
        self.wait("document.readyState === 'complete' && !!document.getElementById('status')")
        self.value("localStorage.clear(); sessionStorage.clear()")
        self.reload()

    def reload(self) -> None:
        self.value("window.old = 1; location.reload()")
        self.wait("!window.old && document.readyState === 'complete' && !!document.querySelector('main > .empty')")

    @contextlib.contextmanager
    def other_tab(self) -> Iterator[None]:
        """Within it, a second tab with the page: all calls go there."""
        browser, url = self.browser, self.value("location.href")
        before = browser._session, browser._target
        browser._target = ""  # else it would be closed
        browser.open(url, DESKTOP)
        self.wait("document.readyState === 'complete' && !!document.querySelector('main > .empty')")
        yield
        browser._session = ""
        browser.call("Target.closeTarget", targetId=browser._target)
        browser._session, browser._target = before

    def key(self, name: str, **more: Any) -> None:
        code = {"Enter": 13, "Escape": 27}[name]
        text = {"text": "\r"} if name == "Enter" else {}
        self.browser.call(
            "Input.dispatchKeyEvent", type="keyDown", key=name, windowsVirtualKeyCode=code, **text, **more
        )
        self.browser.call("Input.dispatchKeyEvent", type="keyUp", key=name, windowsVirtualKeyCode=code)

    def fill(self, selector: str, text: str) -> None:
        field = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{field}.focus(); {field}.value = {json.dumps(text)}")

    def cpu_seconds(self) -> float:
        """Of the page's thread so far; after Performance.enable."""
        metrics = self.browser.call("Performance.getMetrics")["metrics"]
        return next(float(m["value"]) for m in metrics if m["name"] == "ThreadTime")

    def press(self, name: str) -> None:
        """The last button of that name."""
        self.value(
            f"[...document.querySelectorAll('button')].filter(b => b.textContent === {json.dumps(name)}).at(-1).click()"
        )

    def text(self, selector: str) -> str:
        return str(self.value(f"document.querySelector({json.dumps(selector)}).textContent"))

    def click(self, selector: str) -> None:
        self.value(f"document.querySelector({json.dumps(selector)}).click()")

    def count(self, selector: str) -> int:
        return int(self.value(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def focus(self) -> str:
        return str(self.value("document.activeElement.id"))

    def send(self, text: str) -> None:
        self.fill("#text", text)
        self.key("Enter")

    def begin_long_answer(self) -> None:
        self.send("long")
        self.wait("document.querySelector('.assistant .said')?.textContent.includes('word word')")

    def ask(self, text: str) -> str:
        """Types a question; the answer's text."""
        self.send(text)
        return self.answer()

    def answer(self) -> str:
        """The text of the answer when it is complete."""
        self.wait("send.textContent === 'send'")
        assert self.value("document.querySelector('main > .error')?.textContent ?? ''") == ""
        return str(self.value("[...document.querySelectorAll('.assistant .said')].at(-1).innerText"))

    def said(self, kind: str) -> list[str]:
        return list(self.value(f"[...document.querySelectorAll('.{kind} .said')].map(e => e.innerText)"))


def test_a_real_answer(browser: Browser, server: Server) -> None:
    page = Page(browser, server)
    empty = page.value("document.querySelector('.empty').innerText")
    assert "Talk with kimi-nano" in empty and "JSON schema" in empty and "tools" in empty
    assert page.value("temperature.placeholder") == "0" and page.value("top_p.placeholder") == "0.95"
    assert "936" in page.ask("What is 347 + 589?")
    assert page.value("document.querySelector('details').open") is False
    assert page.text("summary").startswith("thought for ")
    note = page.text(".assistant .note")
    assert "tokens/s" in note and "first after" in note  # and drafts, where they pay by the steps that were measured
    page.value("think.click()")
    page.ask("What is 2 + 2?")
    assert page.count("details:not([hidden])") == 1


def test_a_call_is_answered_by_hand(browser: Browser, server: Server) -> None:
    page = Page(browser, server)
    page.press("Please get the current weather for the city Oslo.")
    page.answer()
    assert page.value("document.querySelector('.assistant .call').innerText").startswith("call: get_weather")
    assert json.loads(page.text(".assistant .call code")) == {"city": "Oslo"}
    page.send("and now?")
    assert page.value("document.activeElement.matches('.results textarea')"), "calls are answered first"
    page.fill(".results textarea", '{"sky": "sunny"}')
    page.press("send results")
    assert "sunny" in page.answer()
    kept = page.value("JSON.parse(localStorage['perilune.chats'])[0].messages")
    assert [m["role"] for m in kept] == ["user", "assistant", "tool", "assistant"]
    assert kept[2]["tool_call_id"] == kept[1]["tool_calls"][0]["id"] and kept[2]["content"] == '{"sky": "sunny"}'


def test_an_example_keeps_what_the_user_wrote(browser: Browser, scripted: Server) -> None:
    page = Page(browser, scripted)
    own = '[{"name": "f"}]'
    page.fill("#max_tokens", "32")
    for before, example, after in ((own, 0, own), (own, 1, own), (" ", 1, "get_weather"), (None, 2, "")):
        if before:  # else the field has example 1: get_weather
            page.fill("#tools", before)
        page.press("new chat")
        page.value(f"document.querySelectorAll('.tries button')[{example}].click()")
        page.answer()
        found = page.value("$('tools').value")
        assert "get_weather" in found if after == "get_weather" else found == after
        assert bool(page.value("$('schema').value")) == (example == 2)


def test_calls_wait_in_a_chat_that_is_opened_during_an_answer(browser: Browser, scripted: Server) -> None:
    page = Page(browser, scripted)
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    page.value(f"localStorage['perilune.chats'] = JSON.stringify({json.dumps([{'id': 'a', 'messages': messages}])})")
    page.reload()
    page.begin_long_answer()
    page.value("document.querySelectorAll('#history button')[2].click()")
    page.wait("send.textContent === 'send'")
    assert page.said("user") == ["q"]
    assert page.count(".results textarea") == 1
    page.send("and now?")
    assert page.value("document.activeElement.matches('.results textarea')")


def test_a_chat_that_went_on_in_another_tab(browser: Browser, scripted: Server) -> None:
    page = Page(browser, scripted)
    assert page.ask("first") == "one"
    page.press("new chat")
    with page.other_tab():
        page.click("#history button")
        assert page.ask("second") == "two"
    page.click("#history button")
    assert page.said("assistant") == ["one", "two"]
    assert page.ask("first") == "one"
    assert page.said("user") == ["first", "second", "first"]


def test_a_chat_that_two_tabs_show(browser: Browser, scripted: Server) -> None:
    page = Page(browser, scripted)
    assert page.ask("first") == "one"
    page.fill("#text", "a draft")
    with page.other_tab():
        page.click("#history button")
        assert page.ask("second") == "two"
    page.wait("document.querySelectorAll('.assistant').length === 2")
    assert page.value("text.value") == "a draft"
    assert page.ask("first") == "one"
    kept = page.value("JSON.parse(localStorage['perilune.chats'])[0].messages.map(m => m.content)")
    assert kept == ["first", "one", "second", "two", "first", "one"]
    page.press("new chat")
    page.press("settings")
    page.value("{ const button = document.querySelectorAll('#history button')[1]; button.focus(); button.click() }")
    assert page.focus() == "text", "the keyboard's focus is not lost with a deleted chat"


def test_an_answer_follows_a_pasted_schema(browser: Browser, server: Server) -> None:
    page = Page(browser, server)
    page.fill("#schema", "{")
    page.send("Extract name, age and city as JSON from: Emma is 34 years old and lives in Oslo.")
    assert page.text("#schema-fault").startswith("schema: ")
    assert page.focus() == "schema", "the panel opens at the fault"
    properties = {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    page.fill("#schema", json.dumps(schema))
    page.value("$('schema').dispatchEvent(new Event('change', {bubbles: true}))")
    assert page.count("article") == 0
    page.value("ask.requestSubmit()")
    assert json.loads(page.answer()) == {"name": "Emma", "age": 34, "city": "Oslo"}
    assert page.text("#schema-fault") == ""
    assert page.text("#open") == "settings: schema"


def test_stop_edit_and_regenerate(browser: Browser, scripted: Server) -> None:
    page = Page(browser, scripted)
    page.fill("#text", "long")
    page.key("Enter", modifiers=8)
    assert page.count("article") == 0, "Shift+Enter does not send"
    page.begin_long_answer()
    assert page.value("send.textContent") == "stop" and page.value("talk.getAttribute('aria-busy')") == "true"
    assert "tokens/s" in page.wait("document.querySelector('.assistant .note').textContent"), "while it runs"
    page.key("Escape")
    assert page.answer().count("word") < LONG_WORDS
    note = page.text(".assistant .note")
    assert "4.00 tokens per drafted step, 100 % of drafts accepted" in note and note.endswith("stopped")
    assert page.text("#status") == "stopped"
    page.click(".user button:nth-child(2)")
    page.fill(".user textarea", "first")
    page.press("ask")
    assert page.answer() == "one" and page.said("user") == ["first"]
    assert page.ask("second") == "two"
    page.click(".assistant button:last-child")  # regenerates the first answer
    assert page.answer() == "one" and page.said("assistant") == ["one"] and page.said("user") == ["first"]
    page.fill("#tools", "[5]")
    page.press("regenerate")
    assert page.said("assistant") == ["one"], "an answer goes only when another can be asked for"
    page.reload()
    page.click("#history button")
    assert page.said("assistant") == ["one"], "kept by the browser"
    page.press("delete all")
    assert page.value("localStorage['perilune.chats']") == "[]" and page.said("assistant") == []


def test_escape_within_an_input_method_is_the_input_methods(browser: Browser, scripted: Server) -> None:
    """It ends a composition, as of Japanese: an answer goes on, and an edit is kept."""
    page = Page(browser, scripted)
    pressed = "dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape', isComposing: true, bubbles: true}))"
    page.begin_long_answer()
    page.value(f"text.{pressed}")
    assert page.value("running.signal.aborted") is False
    page.value("key.value = '\u2026'; models()")
    assert page.count(".live") == 1, "a wrong key takes no answer from the page"
    page.key("Escape")
    page.answer()
    page.click(".user button:nth-child(2)")
    page.fill(".user textarea", "changed")
    page.value(f"document.querySelector('.user textarea').{pressed}")
    assert page.value("document.querySelector('.user textarea')?.value") == "changed"


def test_words_of_a_model_are_never_markup(browser: Browser, scripted: Server) -> None:
    page = Page(browser, scripted)
    bad = (
        "[...document.querySelectorAll('main *')].filter(e => /^(IMG|SCRIPT|B|I|U|SVG|IFRAME)$/i.test(e.tagName)"
        " || [...e.attributes].some(a => /^on|^src/.test(a.name)) || /^javascript/.test(e.getAttribute('href'))).length"
    )

    def harmless(text: str) -> None:
        assert '<img src="x" onerror="hit=1"><script>hit=1</script> <b onclick="hit=1">bold</b>' in text
        assert page.value(bad) == 0 and page.value("window.hit ?? null") is None

    harmless(page.ask("hostile"))
    assert page.text("details > div") == "<u>thought</u>"
    messages = [
        {"role": "user", "content": HOSTILE},
        {"role": "assistant", "content": HOSTILE, "reasoning_content": HOSTILE, "note": HOSTILE, "thought": HOSTILE,
         "tool_calls": [{"id": HOSTILE, "function": {"name": HOSTILE, "arguments": HOSTILE}}, 7]},
        {"role": "system", "content": "x"}, None, {"role": "user", "content": {}},
    ]  # fmt: skip
    for kept in ([{"id": "a", "messages": messages}, 5, {"id": {}}], {"no": "list"}, 3):
        page.value(f"localStorage['perilune.chats'] = JSON.stringify({json.dumps(kept)})")
        page.value('localStorage[\'perilune.settings\'] = \'{"system": 3, "think": "<b>"}\'')
        page.reload()
        if isinstance(kept, list):
            page.click("#history button")
            harmless(page.said("assistant")[0])
            assert page.count("article") == 2
            assert page.count("#panel li :not(button)") == 0
    page.value("localStorage['perilune.chats'] = '['")
    page.reload()
    assert page.ask("first") == "one"
    refused = "(() => { try { document.body.innerHTML = '<b>x</b>'; return false; } catch { return true; } })()"
    assert page.value(refused), "the browser refuses strings as markup"


def test_markdown(browser: Browser, scripted: Server) -> None:
    page = Page(browser, scripted, PHONE)
    page.ask("marks")
    tags = page.value("[...document.querySelectorAll('.assistant .said > *')].map(e => e.tagName).join(' ')")
    assert tags == "H1 P OL BLOCKQUOTE DIV P DIV P"
    for selector, text in (
        ("p em", "slanted"), ("p strong", "bold"), ("p code", "code"), ("ol > li > ul > li", "inner"),
        ("blockquote p", "quoted"), (".code pre code", "print(1)"), ("td", "1"), ("a", "name (example.org)"),
    ):  # fmt: skip
        assert page.text(f".said {selector}") == text
    assert page.value("markdown('# Using C# #')[0].textContent") == "Using C#"
    assert page.value(r"make('p', {}, ...markdown('these:\n|a|b|\n|-|-|\n|`x \\|`|')).textContent") == "these:abx |"
    for marked, shown in (
        ("***a***", "<p><em><strong>a</strong></em></p>"), ("***a* b**", "<p><strong><em>a</em> b</strong></p>"),
        ("***a** b*", "<p><em><strong>a</strong> b</em></p>"), ("**a *b***", "<p><strong>a <em>b</em></strong></p>"),
        ("*a **b** c*", "<p><em>a <strong>b</strong> c</em></p>"),
        ("a\n===\nb\nc\n--- ", "<h1>a</h1><h2>b\nc</h2>"), ("a\n\n---\n- b", "<p>a</p><hr><ul><li>b</li></ul>"),
        ("- a\n---", "<ul><li>a</li></ul><hr>"), ("---\n===", "<hr><p>===</p>"), ("a\n-", "<p>a\n-</p>"),
        ("__a *b_c*__, (__d__).", "<p><strong>a <em>b_c</em></strong>, (<strong>d</strong>).</p>"),
        *((t, f"<p>{t}</p>") for t in ("a__b__c __d__e", "x.__init__() __init__.py __init__()", "__ a__ __a __ ____")),
    ):  # fmt: skip
        html = page.value(f"make('p', {{}}, ...markdown({json.dumps(marked)})).innerHTML")
        assert html.replace(' dir="auto"', "") == shown
    assert page.value(r"markdown('|a|\n|---|\n|b|\n---').map(node => node.className)") == ["wide", ""]
    links = page.value("inline('[b](https://a.test/b_(c)), https://a.test/d_(e).').map(node => node.title)")
    assert links == ["https://a.test/b_(c)", None, "https://a.test/d_(e)", None]
    page.value("document.querySelector('.said').prepend('\u05d0'); 0")
    directions = "['.said', '.said code'].map(s => getComputedStyle(document.querySelector(s)).direction)"
    assert page.value(directions) == ["rtl", "ltr"], "Hebrew"
    page.browser.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    # It says so for 1.5 s, which a busy machine may take to be asked.
    page.value(
        "{ const b = document.querySelector('.code button'); window.copied = 0; b.click();"
        " new MutationObserver(() => { window.copied ||= b.textContent === 'copied'; }).observe(b, {childList: true}) }"
    )
    page.wait("window.copied")
    for opened in (False, True):  # a phone has no horizontal scroll
        if opened:
            page.press("settings")
        assert page.value("document.documentElement.scrollWidth") <= PHONE[0]
        assert page.value("talk.scrollWidth <= talk.clientWidth && panel.scrollWidth <= panel.clientWidth")
    page.key("Escape")
    assert page.value("panel.hidden") and page.focus() == "open"
    for shown in ("#history button", "#send"):
        page.press("settings")
        page.fill("#text", "first")
        page.click(shown)
        assert page.value("panel.hidden")
    page.answer()
    marks = ("*", "`", "[", "_", "~~", " __a", " __a_b", "**a", "](", "*a ", "***a", "*a**b** ", "a***")
    hostile = [mark * (19_000 // len(mark)) + "x" for mark in marks]
    hostile += [mark * 50_000 + "x" for mark in ("> ", "- ", "|-", " ", "#", "- a\n\n", "a\n--")]
    hostile += ["# " + "# " * 25_000 + "x", "```" + " " * 50_000 + "`", "|a|\n|-" + " " * 50_000 + "x|"]
    hostile += [("# a" + " " * 990 + "b\n") * 20, "# " + " " * 400 + "a\u2028b", "- " + " " * 50_000 + "a\u2028b"]
    hostile += [("~" * 995 + "`\n") * 20]
    page.value(f"window.hostile = {json.dumps(hostile)}")
    # CPU seconds of the page's thread: by the clock a text took 2 s on a busy machine.
    page.browser.call("Performance.enable")
    at = [page.cpu_seconds()]
    for number in range(len(hostile)):
        page.value(f"show(document.createElement('div'), hostile[{number}])")
        at.append(page.cpu_seconds())
    took = [round(after - before, 3) for before, after in pairwise(at)]
    assert 0 < max(took) < 2, f"CPU seconds for each hostile text: {took}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(browser: Browser, scripted: Server, scheme: str) -> None:
    page = Page(browser, scripted)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    color = "getComputedStyle(document.body).color.match(/\\d+/g).map(Number)[0]"
    assert (page.value(color) > 127) == (scheme == "dark")
    faint = page.value("getComputedStyle(keys).color.match(/\\d+/g).map(Number)[0]")
    assert (faint > 127) == (scheme == "dark")
    unnamed = "[...document.querySelectorAll('input, select, textarea')].filter(e => !e.labels.length).length"
    assert page.value(unnamed) == 0, "each field has a label"


def test_the_key_stays_in_the_tab(browser: Browser, script: Path) -> None:
    file = script.with_name("key")
    file.write_text("hidden-key\n")
    file.chmod(0o600)
    server = Server("--api-key-file", str(file), command=command(script))
    try:
        page = Page(browser, server)
        assert page.focus() == "key" and "key" in page.value("talk.innerText")
        page.fill("#key", "hidden-key\u2026")  # as copied from a shortened display
        page.value("key.dispatchEvent(new Event('change'))")
        page.wait("document.querySelector('main > .error')?.textContent.startsWith('the API key has a character')")
        page.fill("#key", "hidden-key")
        page.value("key.dispatchEvent(new Event('change'))")
        page.wait("document.querySelector('.empty h1')?.textContent === 'Talk with kimi-nano'")
        assert page.ask("first") == "one"
        page.reload()
        assert page.value("key.value") == "hidden-key"
        assert not page.value("JSON.stringify({...localStorage}).includes('hidden-key')")
        assert not page.value(
            "[location.href, ...performance.getEntries().map(e => e.name)].join().includes('hidden-key')"
        )
        assert not any("hidden-key" in line for line in server.lines)
        server.kill()
        page.send("second")
        assert "cannot be reached" in page.wait("document.querySelector('main > .error')?.textContent")
        assert page.said("user")[-1] == "second", "a question without an answer stays"
    finally:
        server.kill()


def test_a_page_of_a_rebound_name_gets_nothing(browser: Browser, scripted: Server) -> None:
    """A foreign name that has become 127.0.0.1: the page's scripts then are of the server's own origin."""
    ask = """(async () => {
        const models = await fetch("/v1/models"), files = await fetch("/v1/files", {referrerPolicy: "no-referrer"});
        const hidden = await fetch("/metrics", {headers: {"accept-language": "*", "user-agent": "curl/8"}});
        const post = {method: "POST", headers: {"content-type": "application/json"}, body: BODY};
        const chat = await fetch("/v1/chat/completions", post);
        return [models.status, files.status, hidden.status, chat.status, await chat.text()];
    })()""".replace("BODY", json.dumps(json.dumps({"messages": [{"role": "user", "content": "first"}]})))
    port = scripted.url.rpartition(":")[2]
    for name in ("evil.test", "127.0.0.1", "localhost"):
        browser.open(f"http://{name}:{port}/v1/models", DESKTOP)
        browser.call("Page.setBypassCSP", enabled=True)  # the attacker's page was loaded before, from elsewhere
        browser.wait("document.readyState === 'complete'")
        browser.value("window.old = 1; location.reload()")
        browser.wait(f"!window.old && location.hostname === '{name}' && document.readyState === 'complete'")
        *statuses, text = browser.value(ask)
        if name == "evil.test":
            assert statuses == [403, 403, 403, 403] and "--cors-origins" in text
        else:
            assert statuses == [200, 404, 200, 200] and "one" in text  # 404: files are not served
