"""The web page in a real browser: what a user sees and does, in light and dark mode, on a desktop and on a phone."""

import shutil

import pytest

from test_server import running

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        try:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"no Chromium to run the page in: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def url():
    with running() as url:
        yield url


@pytest.fixture
def open_page(browser, url):
    """Opens the page; nothing may go wrong on it."""
    pages = []

    def open_one(**options):
        page, troubles = browser.new_page(**options), []
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda message: troubles.append(message.text) if _is_trouble(message) else None)
        page.goto(url)
        pages.append((page, troubles))
        return page

    yield open_one
    for page, troubles in pages:
        page.close()
        assert troubles == []


def _is_trouble(message):
    return message.type == "error" and "status of 400" not in message.text  # a refusal is shown on the page


def ask(page, text, longest=30):
    if page.locator("#max-tokens").input_value() != str(longest):
        page.locator("#settings summary").click()
        page.fill("#max-tokens", str(longest))
        page.locator("#settings summary").click()
    page.fill("#prompt", text)
    page.keyboard.press("Enter")


def wait_for_the_end(page):
    page.locator(".round").first.wait_for(timeout=30_000)
    page.get_by_role("button", name="Send").wait_for(timeout=60_000)


def test_a_chat_shows_who_proposed_what(open_page):
    page = open_page()
    ask(page, "abcabcabc", longest=60)
    wait_for_the_end(page)
    assert page.locator("#model").inner_text() == "tiny"
    assert page.locator(".message.user").inner_text() == "abcabcabc"
    assert page.locator(".answers .token").count() > 10 and page.locator(".token.grafted").count() > 0
    assert float(page.locator("#accepted").inner_text()) > 1 and float(page.locator("#speed").inner_text()) > 0
    counts = [int(row.split(" · ")[0]) for row in page.locator("#shares li:not(.sub) .count").all_inner_texts()]
    assert sum(counts) == page.locator(".round i").count() > 20


def test_a_round_shows_its_tree_by_mouse_and_by_keyboard(open_page):
    page = open_page()
    ask(page, "abcabcabc", longest=60)
    wait_for_the_end(page)
    last = page.locator(".round").count() - 1
    page.locator(".round").nth(last).click()
    assert f"Round {last + 1}:" in page.locator("#tree-words").inner_text()
    page.keyboard.press("ArrowLeft")
    assert f"Round {last}:" in page.locator("#tree-words").inner_text()
    page.locator(".token.grafted").first.click()
    assert page.locator("#tree svg g.grafted.taken").count() > 0 and page.locator(".token.chosen").count() > 0


def test_plain_decoding_and_graft_race_to_the_same_text(open_page):
    page = open_page()
    page.check("#race")
    ask(page, "abcabcabc", longest=40)
    page.locator("#verdict").wait_for(timeout=60_000)
    plain, graft = page.locator(".lane .message").all_inner_texts()
    assert plain == graft and "The same text" in page.locator("#verdict").inner_text()
    assert page.locator(".lane").first.locator(".token.grafted").count() == 0


def test_an_answer_can_be_stopped(open_page):
    page = open_page()
    ask(page, "go on and on", longest=900)
    page.locator(".round").nth(2).wait_for(timeout=30_000)
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Send").wait_for(timeout=5_000)
    ask(page, "again")
    wait_for_the_end(page)
    assert page.locator(".message.user").count() == 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_can_be_read(open_page, scheme):
    page = open_page(viewport={"width": 360, "height": 740}, color_scheme=scheme)
    page.check("#race")
    ask(page, "x" * 200)
    page.locator("#verdict").wait_for(timeout=60_000)
    page.locator(".round").first.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    ink, ground = (
        page.evaluate(f"getComputedStyle(document.body).{what}.match(/\\d+/g).map(Number)")
        for what in ("color", "backgroundColor")
    )
    assert (sum(ink) > sum(ground)) == (scheme == "dark") and abs(sum(ink) - sum(ground)) > 380


def test_errors_are_said_in_words(open_page):
    page = open_page()
    ask(page, "y" * 1500)
    page.locator(".error").wait_for(timeout=10_000)
    assert "context" in page.locator(".error").inner_text()
