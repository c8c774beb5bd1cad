"""The web page in a real browser: what a user sees and does, in light and dark mode, on a desktop and on a phone."""

import itertools
import json
import os
import shutil

import httpx
import pytest

from graft import Engine
from served import running
from tiny import BYTE_VOCAB, byte_tokenizer, tiny_model

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 800}
CHAT = "**/v1/chat/completions"


@pytest.fixture(scope="module")
def browser():
    """Chromium: the one that GRAFT_CHROMIUM names, or else the system's."""
    named = os.environ.get("GRAFT_CHROMIUM")
    path = named or shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium: install Debian's package chromium, or name a browser in GRAFT_CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except sync_api.Error as error:
            if named:
                raise
            pytest.skip(f"{path} does not start here: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def url():
    model = tiny_model(vocab_size=BYTE_VOCAB, max_position_embeddings=1024)  # two layers: one copies too little
    with running(Engine(model, byte_tokenizer(), budget=12, isolated=True)) as url:
        yield url


@pytest.fixture
def open_page(browser, url):
    """Opens the page; nothing may go wrong on it."""
    pages = []

    def open_one(at=url, **options):
        page, troubles = browser.new_page(**{"viewport": DESKTOP, "reduced_motion": "reduce", **options}), []
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda message: troubles.append(message.text) if _is_trouble(message) else None)
        page.goto(at)
        pages.append((page, troubles))
        return page

    yield open_one
    for page, troubles in pages:
        page.close()
        assert troubles == []


def _is_trouble(message):
    # What could not be loaded is shown on the page.
    return message.type == "error" and "Failed to load resource" not in message.text


def ask(page, text, longest=30, temperature=0):
    if page.locator("#max-tokens").input_value() != str(longest):
        setting(page, max_tokens=longest, temperature=temperature)
    page.fill("#prompt", text)
    page.keyboard.press("Enter")


def setting(page, **values):
    page.click("#open-settings")
    for name, value in values.items():
        page.fill(f"#{name.replace('_', '-')}", str(value))
    page.keyboard.press("Escape")
    page.locator("#settings").wait_for(state="hidden")


def wait_for_the_end(page):
    page.locator(".ending > *").last.wait_for(timeout=60_000)
    page.get_by_role("button", name="Send").wait_for(timeout=60_000)


def a_round(*pieces):
    """A round as the server tells of it, that only shows text: (text, origin) for each token."""
    new = [{"id": 5, "text": text, "origin": origin} for text, origin in pieces]
    return {
        "tokens": ["a"], "parents": [0], "probabilities": [1.0], "sources": ["root"], "accepted": [], "num_pruned": 0,
        "num_hidden": 0, "new": new,
    }  # fmt: skip


def answering(page, *rounds, reason="stop", is_whole=True, path=CHAT):
    """Has the next answer be this: chunks of rounds, then the end, or none. Returns the requests that it answers."""
    body = events_of(*rounds, reason=reason, is_whole=is_whole)
    requests = []

    def answer(route):
        requests.append(route.request.post_data_json)
        route.fulfill(body=body, content_type="text/event-stream")

    page.route(path, answer, times=1)
    return requests


def events_of(*rounds, reason="stop", is_whole=True):
    """An answer as the server streams it."""
    chunks = [{"delta": {"content": "".join(piece["text"] for piece in one["new"])}, "rounds": [one]} for one in rounds]
    chunks.append({"delta": {}, "finish_reason": reason, "speculation": {"decode_seconds": 0.5}})
    events = [f"data: {json.dumps({'choices': [chunk]})}\n\n" for chunk in (chunks if is_whole else chunks[:-1])]
    return "".join([*events, "data: [DONE]\n\n"] if is_whole else events)


def a_tree(text, guess="guess", wrong="wrong"):
    """A round with one right guess, one wrong one and one that was not checked, then a token of the model."""
    new = [{"id": 5, "text": f" {guess}", "origin": "drafted"}, {"id": 6, "text": f" {text}", "origin": "model"}]
    return {
        "tokens": ["root", f" {guess}", f" {wrong}", " pruned"], "parents": [0, 0, 0, 1], "accepted": [1],
        "probabilities": [1.0, 0.6, 0.3, 0.1], "sources": ["root", "drafted", "trigram", "suffix"], "num_pruned": 1,
        "num_hidden": 0, "new": new,
    }  # fmt: skip


def held(page, path=CHAT):
    """Holds the next request back. Returns the list where its route will be: `fulfill` lets it go on."""
    routes = []
    page.route(path, lambda route: routes.append(route), times=1)
    return routes


def failing(page, status, message="no", **headers):
    body = json.dumps({"error": {"message": message}})
    page.route(CHAT, lambda route: route.fulfill(status=status, body=body, headers=headers), times=1)


def racing(page, *graft):
    """Has the next race be between these rounds and other, plain ones."""
    answering(page, a_round(("plain", "model")))
    answering(page, *graft)  # the route that was added last is the first to answer


def brightness(page, selector, what):
    """The relative luminance of an element's colour, or of its background, as WCAG has it."""
    style = f"getComputedStyle(document.querySelector('{selector}')).{what}"
    channels = page.evaluate(f"{style}.match(/[\\d.]+/g).map(Number)")
    if len(channels) == 4 and channels[3] == 0:  # transparent: the body's
        return brightness(page, "body", what)
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (one / 255 for one in channels[:3])]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(page, ink, ground):
    light, dark = sorted((brightness(page, ink, "color"), brightness(page, ground, "backgroundColor")), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def sides(page):
    return page.evaluate(
        """[...document.querySelectorAll("button, input, summary, textarea")].filter((one) => one.checkVisibility())
        .map((one) => [one.id || one.className || one.textContent, one.getBoundingClientRect()])
        .map(([name, { width, height }]) => [name, width, height])"""
    )


def in_view(page, selector):
    """Whether the top of an element is on the screen, below the header."""
    top = page.locator(selector).bounding_box()["y"]
    return page.locator("header").bounding_box()["height"] - 1 <= top < page.viewport_size["height"] - 50


def test_the_pages_files_are_all_that_is_served_whatever_the_query_asks_for(url):
    for path in ("/", "/page.css", "/page.js", "/answer.js", "/chats.js", "/vendor/marked.js"):
        plain = httpx.get(url + path)
        assert plain.status_code == 200 and plain.headers["content-security-policy"].startswith("default-src 'self'")
        assert httpx.get(url + path, params={"file": __file__}).content == plain.content


# On a phone


@pytest.mark.parametrize(
    ("size", "scheme"),
    [
        (PHONE, "dark"),
        (DESKTOP, "light"),
        pytest.param(PHONE, "light", marks=pytest.mark.slow),
        pytest.param(DESKTOP, "dark", marks=pytest.mark.slow),
    ],
    ids=["phone-dark", "desktop-light", "phone-light", "desktop-dark"],
)
def test_it_fits_and_can_be_read(open_page, size, scheme):
    page = open_page(viewport=size, color_scheme=scheme)
    page.check("#race")
    racing(page, a_round(*((f"{origin} " * 9, origin) for origin in ("drafted", "suffix", "trigram", "model"))))
    ask(page, "x" * 200)
    wait_for_the_end(page)
    page.locator(".round").first.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    assert [one for one in sides(page) if min(one[1:]) < 24] == []
    grounds = [("body", "body"), *(("body", f"#legend .{kind}") for kind in ("drafted", "copied", "seen", "model"))]
    quiet = [("#legend", "#foot"), ("#legend", "body"), ("#rounds-hint", "aside"), (".verdict .note", ".verdict")]
    assert [pair for pair in grounds + quiet if contrast(page, *pair) < 4.5] == []
    assert (brightness(page, "body", "color") > 0.5) == (scheme == "dark")


def test_on_a_phone_the_document_follows_the_stream_unless_the_reader_leaves_it(open_page):
    page = open_page(viewport=PHONE)
    lines = [a_round((f"line {number}\n\n", "drafted")) for number in range(60)]
    answering(page, *lines)
    ask(page, "count")
    wait_for_the_end(page)
    end, foot = page.locator(".ending").bounding_box(), page.locator("#foot").bounding_box()
    assert page.evaluate("scrollY") > 500 and end["y"] + end["height"] <= foot["y"] + 1
    answering(page, *lines)
    page.fill("#prompt", "again")
    page.evaluate("addEventListener('scroll', () => scrollTo({top: 0, behavior: 'instant'}))")
    page.keyboard.press("Enter")
    page.locator(".turn").nth(1).locator(".copy").wait_for()
    assert page.evaluate("scrollY") == 0


def test_on_a_phone_a_tapped_round_brings_its_tree_into_view_and_there_is_a_way_back(open_page):
    page = open_page(viewport=PHONE)
    answering(page, *[a_round((f"line {number}\n\n", "drafted")) for number in range(40)])
    ask(page, "count")
    wait_for_the_end(page)
    page.locator(".token").nth(2).click()
    assert in_view(page, "#tree") and page.locator("#step").inner_text() == "Round 3 of 40"
    page.click("#back")
    assert in_view(page, ".token.chosen") and not in_view(page, "#tree")


# The first visit


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_the_first_screen_shows_a_tree_and_says_what_it_is(open_page, size):
    page = open_page(viewport=size)
    svg, caption = page.locator("#sample svg"), page.locator("#sample figcaption")
    assert in_view(page, "#sample svg") and "tree of guesses" in caption.inner_text()
    assert caption.bounding_box()["y"] + caption.bounding_box()["height"] < page.locator("#foot").bounding_box()["y"]
    shown = svg.locator("g:not(.root)").evaluate_all("all => all.map((one) => one.classList[0])")
    assert set(shown) == {"drafted", "copied", "seen", "model"}, "every kind of guess that the legend names"
    spoken = page.locator("#sample ul.unseen").inner_text()
    assert "blue: guessed by a small network, 62% likely: right" in spoken
    assert "clear: seen before, 21% likely: wrong" in spoken


def test_the_first_visit_offers_examples_a_race_and_the_legend(open_page):
    page = open_page()
    assert page.locator("#examples button").count() == 3 and page.locator(".lead").inner_text().count(".") == 1
    legend = page.locator("#legend li").all_inner_texts()
    assert legend == ["guessed by a small network", "copied from earlier text", "seen before", "written by the model"]
    answering(page, a_round(("Light.", "model")))
    page.locator("#examples button").first.click()
    wait_for_the_end(page)
    assert page.locator(".user").inner_text() == "Why is the sky blue?" and page.locator("#legend").is_visible()
    assert not page.locator("#welcome").is_visible()
    page.click("#clear")
    racing(page, a_round(("fib", "drafted")))
    page.click("#demo")
    page.locator(".headline b").wait_for()
    assert page.locator(".lane").count() == 2


# A chat and its rounds


def test_a_chat_shows_who_proposed_what_in_the_same_words_and_colours_everywhere(open_page):
    page = open_page()
    ask(page, "abcabcabc", longest=60)
    wait_for_the_end(page)
    assert page.locator("#model").inner_text() == "tiny"
    assert page.locator(".user").inner_text() == "abcabcabc"
    assert page.locator(".answers .token").count() > 10 and page.locator(".token.copied").count() > 0
    assert float(page.locator("#accepted").inner_text()) > 1 and float(page.locator("#speed").inner_text()) > 0
    counts = [int(row.split(" · ")[0]) for row in page.locator("#shares .count").all_inner_texts()]
    assert sum(counts) == page.locator(".round i").count() > 20
    assert "copied from this chat" in page.locator("#shares").inner_text()
    page.locator(".token.copied").first.click()
    assert page.locator("#tree svg g.copied.taken title").first.text_content().startswith("copied from this chat")
    colours = page.evaluate(
        """[".token.copied", ".swatch.copied", "#bar .copied", ".round .copied", "svg .copied rect"]
        .map((one) => getComputedStyle(document.querySelector(one)))
        .map((style, place) => (place === 4 ? style.fill : style.backgroundColor))"""
    )
    assert len(set(colours)) == 1


def test_a_round_shows_its_tree_by_mouse_and_by_keyboard_which_never_leaves_what_is_typed(open_page):
    page = open_page()
    ask(page, "abcabcabc", longest=60)
    wait_for_the_end(page)
    last = page.locator(".round").count() - 1
    page.locator(".round").nth(last).click()
    assert page.locator("#step").inner_text() == f"Round {last + 1} of {last + 1}"
    page.keyboard.press("ArrowLeft")
    assert page.locator("#step").inner_text() == f"Round {last} of {last + 1}"
    page.keyboard.press("Home")
    assert page.locator("#step").inner_text() == f"Round 1 of {last + 1}"
    page.focus("#prompt")
    page.keyboard.press("ArrowRight")
    page.keyboard.type("typed")
    assert page.locator("#step").inner_text() == f"Round 1 of {last + 1}" and page.input_value("#prompt") == "typed"


def test_the_newest_tree_is_shown_without_a_click_until_the_reader_chooses_another(open_page):
    page = open_page()
    rounds = [a_round(("plain", "model")), a_tree("one"), a_tree("two", guess="better"), a_round((".", "model"))]
    answering(page, *rounds)
    ask(page, "trees")
    wait_for_the_end(page)
    assert page.locator("#step").inner_text() == "Round 3 of 4" and page.locator("#newest").is_hidden()
    assert page.locator("#tree-words").inner_text() == (
        "The model checked 2 guesses in one step: 1 was right, and it wrote the next token itself."
    )
    assert page.locator("#tree svg .taken text:first-of-type").all_text_contents() == ["root", "✓ better", "two"]
    assert page.locator(".token.chosen").all_inner_texts() == [" better", " two"], "marked in the text"
    page.click("#earlier")
    assert page.locator("#step").inner_text() == "Round 2 of 4"
    answering(page, a_tree("three"), path="**/v1/completions")
    page.click("#newest")
    assert page.locator("#step").inner_text() == "Round 3 of 4" and page.locator("#newest").is_hidden()
    assert page.locator("#tree ul.unseen li").count() == 5, "the same as a list, for screen readers"


def test_it_says_that_it_thinks_until_the_first_token(open_page):
    page = open_page()
    routes = held(page)
    ask(page, "slow")
    page.locator(".message .placeholder").wait_for()
    assert page.locator(".message").inner_text() == "Thinking…" == page.locator("#spoken").inner_text()
    routes[0].fulfill(body=events_of(a_round(("Well.", "model"))), content_type="text/event-stream")
    wait_for_the_end(page)
    assert page.locator(".message").inner_text() == "Well." == page.locator("#spoken").inner_text()


# Settings


def test_the_system_prompt_and_sampling_go_with_the_question_and_stay_for_the_next_visit(open_page):
    page = open_page()
    setting(page, system="Be brief.", temperature=0.7, top_p=0.9, seed=5)
    asked = answering(page, a_round(("Yes", "model")), reason="length")
    ask(page, "really?", longest=256)
    wait_for_the_end(page)
    assert asked[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (asked[0]["temperature"], asked[0]["top_p"], asked[0]["seed"]) == (0.7, 0.9, 5)
    page.reload()
    assert page.input_value("#system") == "Be brief." and page.input_value("#top-p") == "0.9"
    setting(page, system="Be long.", temperature=0)
    tokenized = []
    page.on("request", lambda one: tokenized.append(one.post_data_json) if one.url.endswith("/tokenize") else None)
    asked = answering(page, a_round((" indeed", "model")), path="**/v1/completions")
    page.get_by_role("button", name="Go on").click()
    page.locator("#messages").get_by_text("Yes indeed").wait_for()
    assert asked[0]["temperature"] == 0.7, "a cut answer goes on as it began"
    assert tokenized[0]["messages"][0]["content"] == "Be brief."
    wait_for_the_end(page)


def test_escape_closes_the_settings_and_does_not_stop_the_answer(open_page):
    page = open_page()
    routes = held(page)
    ask(page, "slow")
    page.locator(".placeholder").wait_for()
    page.click("#open-settings")
    page.keyboard.press("Escape")
    page.locator("#settings").wait_for(state="hidden")
    assert page.locator("#send").inner_text() == "Stop"
    routes[0].fulfill(body=events_of(a_round(("Done.", "model"))), content_type="text/event-stream")
    wait_for_the_end(page)
    assert page.locator(".message").inner_text() == "Done."


# The race


def test_a_race_ends_with_a_headline_two_bars_and_the_same_text(open_page):
    page = open_page()
    page.check("#race")
    ask(page, "abcabcabc", longest=40)
    page.locator(".headline b").wait_for(timeout=60_000)
    graft, plain = page.locator(".lane .message").all_inner_texts()
    assert plain == graft and page.locator(".verdict .same").count() == 1
    assert float(page.locator(".headline b").inner_text()) > 0 and page.locator(".lap .fill").count() == 2
    assert page.locator(".lane").nth(1).locator(".token:not(.model)").count() == 0
    assert in_view(page, ".verdict")


def test_a_race_says_what_its_figure_is_worth(open_page):
    page = open_page()
    page.check("#race")
    warnings = {"past": "was copied from an earlier one", "model": "difference is chance", "suffix": None}
    for origin, said in warnings.items():
        racing(page, a_round(("Graft's", origin)))
        ask(page, "race")
        page.locator(".headline b").wait_for()
        note = page.locator(".verdict .note").inner_text()
        assert said in note if said else "chance" not in note and "earlier" not in note
        assert "differ" in page.locator(".verdict .differs").inner_text()
        page.click("#clear")


# How an answer ends


def test_an_answer_that_was_cut_goes_on_to_what_it_would_have_been(open_page):
    page = open_page()
    ask(page, "tell me", longest=40, temperature=1)
    wait_for_the_end(page)
    whole = page.locator(".message").inner_text()
    page.click("#clear")
    ask(page, "tell me", longest=12, temperature=1)
    wait_for_the_end(page)
    assert "Cut at 12 tokens" in page.locator(".ending").inner_text()
    first = page.locator(".message").inner_text()
    page.get_by_role("button", name="Go on").click()
    page.locator("#talk > :not(#spoken)").get_by_text("Cut at 2").first.wait_for(
        timeout=30_000
    )  # 24, or less by what was half a character
    both = page.locator(".message").inner_text()
    assert len(whole) > len(both) > len(first) > 0 and whole.startswith(both) and both.startswith(first)


def test_an_answer_can_be_stopped_and_goes_on(open_page):
    page = open_page()
    ask(page, "tell me", longest=500, temperature=1)  # 360 tokens, when nobody stops it
    page.locator(".round").nth(2).wait_for(timeout=30_000)
    page.keyboard.press("Escape")
    wait_for_the_end(page)
    assert "Stopped after" in page.locator(".ending").inner_text()
    before = page.locator(".round").count()
    page.get_by_role("button", name="Go on").click()
    page.locator(".round").nth(before + 3).wait_for(timeout=30_000)
    page.get_by_role("button", name="Stop").click()
    wait_for_the_end(page)


def test_an_answer_can_be_had_again_with_another_seed(open_page):
    page = open_page()
    first = answering(page, a_round(("One.", "model")))
    ask(page, "a number?", temperature=1)
    wait_for_the_end(page)
    second = answering(page, a_round(("Two.", "model")))
    page.get_by_role("button", name="Regenerate").click()
    page.locator(".message").get_by_text("Two.").wait_for()
    wait_for_the_end(page)
    assert page.locator(".user").count() == 1 and first[0]["messages"] == second[0]["messages"]
    assert second[0]["seed"] == first[0]["seed"] + 1 and "always the same" not in page.locator(".ending").inner_text()
    setting(page, temperature=0)
    answering(page, a_round(("Three.", "model")))
    page.get_by_role("button", name="Regenerate").click()
    page.locator(".message").get_by_text("Three.").wait_for()
    wait_for_the_end(page)
    assert "At temperature 0 the answer is always the same" in page.locator(".ending").inner_text()
    answering(page, a_round(("Four.", "model")))
    ask(page, "and?")
    page.locator(".turn").nth(1).locator(".copy").wait_for()
    visible = page.locator(".regenerate").evaluate_all("all => all.map((one) => one.checkVisibility())")
    assert visible == [False, True], "what later turns build on stays"


@pytest.mark.parametrize("has_clipboard", [True, False])
def test_an_answer_is_copied_as_it_was_written(open_page, has_clipboard):
    page = open_page()
    if not has_clipboard:  # as where the page does not come over HTTPS
        page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.evaluate(
        """document.addEventListener("copy", () => { window.copied = document.activeElement.value; });
        if (navigator.clipboard) navigator.clipboard.writeText = async (text) => { window.copied = text; };"""
    )
    answering(page, a_round(("**Bold** and <b>\n\n- one", "model")))
    ask(page, "copy")
    wait_for_the_end(page)
    page.get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("window.copied") == "**Bold** and <b>\n\n- one"


def test_errors_are_said_in_human_words_and_the_prompt_is_kept(open_page):
    page = open_page()
    ask(page, "y" * 1500)
    page.locator(".error").wait_for(timeout=60_000)
    assert "longer than the model can read" in page.locator(".error").inner_text()
    assert page.get_by_role("button", name="Retry").count() == 0  # it would fail again
    page.get_by_role("button", name="Edit the message").click()
    assert page.input_value("#prompt") == "y" * 1500 and page.locator(".turn").count() == 0
    failing(page, 429, **{"retry-after": "7", "x-request-id": "req-1"})
    ask(page, "short")
    page.locator(".error").wait_for()
    assert "busy. Try again in 7 seconds" in page.locator(".error").inner_text()
    assert "req-1" in page.locator(".ending").inner_text()
    page.route(CHAT, lambda route: route.abort(), times=1)
    page.get_by_role("button", name="Retry").click()
    page.locator("#talk > :not(#spoken)").get_by_text("cannot be reached").first.wait_for()
    answering(page, a_round(("half", "model")), is_whole=False)
    page.get_by_role("button", name="Retry").click()
    page.locator("#talk > :not(#spoken)").get_by_text("broke off").first.wait_for()
    assert page.locator(".message").inner_text() == "half"
    answering(page, a_round(("whole", "model")))
    page.get_by_role("button", name="Retry").click()
    page.locator("#talk > :not(#spoken)").get_by_text("whole").first.wait_for()
    assert page.locator(".user").all_inner_texts() == ["short"] and page.locator(".error").count() == 0


def test_a_key_is_asked_for_where_one_is_needed_and_the_question_waits_for_it(open_page):
    with running(api_keys=("sesame",)) as locked:
        page = open_page(at=locked)
        page.locator("#key-form").wait_for()
        ask(page, "open", longest=5)
        page.locator(".error").wait_for()
        page.fill("#key", "wrong")
        page.get_by_role("button", name="Use this key").click()
        page.locator("#talk > :not(#spoken)").get_by_text("was not taken").first.wait_for()
        page.fill("#key", "sesame")
        page.get_by_role("button", name="Use this key").click()
        page.locator(".inspect").wait_for(timeout=30_000)
        assert not page.locator("#key-form").is_visible() and page.locator("#model").inner_text() == "tiny"
        page.close()


# The text of an answer

MARKDOWN = """<think>
So it **is**.
</think>
## A title

A **bold _word_**, `co*de*` and *more*, but 2 * 3 * 4 and a_b_c.
See [this](https://example.com/a) or [that](javascript:alert(1)).

```python
for i in range(3):
    print("**not bold**")  # a line that is so long that it does not fit on any telephone whatsoever
```

1. one
   - under it
2. two

> said <img src=x onerror="document.title='broken'">

| a | b |
|---|---|
| 1 | **2** |
"""


def in_pieces(text, size=3):
    """Rounds of two tokens, of a few characters each."""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return [
        a_round(*((piece, ("drafted", "suffix", "model")[(at + place) % 3]) for place, piece in enumerate(pair)))
        for at in range(0, len(pieces), 2)
        if (pair := pieces[at : at + 2])
    ]


def test_markdown_is_shown_as_elements_and_nothing_in_it_is_run(open_page):
    page = open_page(viewport=PHONE)
    answering(page, *in_pieces(MARKDOWN))
    ask(page, "markdown <b>please</b>")
    wait_for_the_end(page)
    assert page.locator(".user").inner_text() == "markdown <b>please</b>"
    message = page.locator(".message")
    assert message.locator("h4").inner_text() == "A title"  # the headings go on from the page's own
    assert message.locator("strong").nth(1).inner_text() == "bold word" and message.locator("strong em").count() == 1
    assert message.locator("p code").inner_text() == "co*de*" and message.locator("em").last.inner_text() == "more"
    assert "2 * 3 * 4 and a_b_c." in message.inner_text() and "[that](javascript:alert(1))" in message.inner_text()
    assert message.locator("a").evaluate_all("all => all.map((one) => one.href)") == ["https://example.com/a"]
    code = message.locator("pre")
    assert code.inner_text().startswith('for i in range(3):\n    print("**not bold**")')
    assert "mono" in code.locator("code").evaluate("one => getComputedStyle(one).fontFamily")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert message.locator("ol > li").count() == 2 and message.locator("ol ul > li").inner_text() == "under it"
    thought, quote = message.locator("blockquote").all_inner_texts()
    assert "So it is." in thought and "<img src=x" in quote and page.title() == "Graft"
    assert message.locator("td").all_inner_texts() == ["1", "2"]
    levels = page.evaluate(
        """[...document.querySelectorAll("h1, h2, h3, h4, h5, h6")].filter((one) => one.checkVisibility())
        .map((one) => Number(one.tagName[1]))"""
    )
    assert levels[0] == 1 and all(after <= before + 1 for before, after in itertools.pairwise(levels))
    deep = """async () => {
        const box = document.createElement("div");
        (await import("./markdown.js")).showMarkdown(box, ">".repeat(10000), (text) => [text]);
        return box.textContent.length;
    }"""
    assert page.evaluate(deep) == 10_000, "what is nested too deeply is shown as it is spelt"


def test_every_character_keeps_the_colour_of_its_token(open_page):
    page = open_page()
    text = "one **two** `three`\n\n- four\n- five"
    answering(page, *in_pieces(text))
    ask(page, "colours")
    wait_for_the_end(page)
    shown = page.locator(".token").evaluate_all("all => all.map((one) => [one.textContent, one.className])")
    kinds = ("drafted", "copied", "model")
    expected = [kinds[(place // 3 // 2 * 2 + place // 3 % 2) % 3] for place in range(len(text))]
    spelt = [(letter, kind.removesuffix(" chosen")) for letters, kind in shown for letter in letters]
    wanted = [
        (letter, f"token {kind}")
        for place, (letter, kind) in enumerate(zip(text, expected, strict=True))
        if letter not in "*`\n" and not text.startswith("- ", place) and not text.startswith("- ", place - 1)
    ]
    assert spelt == wanted


def test_a_conversation_is_kept_over_a_reload_and_every_answer_can_be_inspected(open_page):
    page = open_page()
    answering(page, a_round(("Three.", "drafted")), a_round((" Or more", "model")), reason="length")
    ask(page, "how many?")
    wait_for_the_end(page)
    asked = answering(page, a_round(("Two.", "drafted")))
    ask(page, "and?")
    page.locator("#talk > :not(#spoken)").get_by_text("Two.").first.wait_for()
    wait_for_the_end(page)
    before = page.locator(".turn").all_inner_texts()
    assert [message["content"] for message in asked[0]["messages"]] == ["how many?", "Three. Or more", "and?"]
    page.reload()
    assert page.locator(".turn").all_inner_texts() == before and not page.locator("#welcome").is_visible()
    assert page.locator("#rounds-count").inner_text() == "1"
    page.locator(".inspect").first.click()
    assert page.locator("#rounds-count").inner_text() == "2"
    assert page.locator(".inspect").first.get_attribute("aria-pressed") == "true"
    page.locator(".turn").nth(1).locator(".token").click()
    assert page.locator("#rounds-count").inner_text() == "1" and page.locator("#tree").is_visible()
    asked = answering(page, a_round((" to come.", "model")), path="**/v1/completions")
    page.get_by_role("button", name="Go on").click()
    page.locator("#messages").get_by_text("Three. Or more to come.").wait_for()
    assert asked[0]["prompt"][-2:] == [5, 5]  # it still knows the tokens
    wait_for_the_end(page)
    page.click("#clear")
    page.reload()
    assert page.locator(".turn").count() == 0 and page.locator("#welcome").is_visible()


def test_conversations_are_kept_in_the_browser_and_one_click_forgets_them(browser, url):
    context = browser.new_context(viewport=DESKTOP, reduced_motion="reduce")
    page = context.new_page()
    page.goto(url)
    assert page.locator("#kept").is_hidden()
    for question in ("first?", "second?"):
        answering(page, a_tree(question))
        ask(page, question)
        wait_for_the_end(page)
        page.click("#clear")
    assert "2 chats kept in this browser" in page.locator("#kept").inner_text()
    other = context.new_page()  # later, in another tab
    other.goto(url)
    other.click("#open-chats")
    assert other.locator(".open-chat .title").all_inner_texts() == ["second?", "first?"]
    other.locator(".open-chat").nth(1).click()
    other.locator(".user").wait_for()
    assert other.locator(".user").inner_text() == "first?" and other.locator("#tree svg").count() == 1
    other.click("#open-chats")
    other.get_by_role("button", name="Forget the chat: second?").click()
    assert other.locator(".open-chat .title").all_inner_texts() == ["first?"]
    other.keyboard.press("Escape")
    other.click("#clear")
    setting(other, system="secret")
    other.locator("#kept .forget-all").click()
    other.locator("#kept").wait_for(state="hidden")
    kept = other.evaluate("JSON.stringify({ ...localStorage })")
    assert "first" not in kept and "secret" not in kept and other.input_value("#system") == ""
    context.close()


def test_a_full_browser_storage_drops_the_oldest_chat_and_damaged_chats_are_ignored(open_page):
    page = open_page()
    answering(page, a_tree("old"))
    ask(page, "old?")
    wait_for_the_end(page)
    page.click("#clear")
    page.evaluate(
        """() => {
            localStorage.setItem("graft.chat.broken", "{");
            localStorage.setItem("graft.chat.other", JSON.stringify({ when: 1, turns: [{ prompt: "odd" }] }));
            const put = Storage.prototype.setItem; // a browser with room for 1,500 characters of chats
            Storage.prototype.setItem = function (name, value) {
                const others = Object.entries(localStorage).filter(([one]) => one !== name);
                const size = others.reduce((sum, [, one]) => sum + one.length, value.length);
                if (name.startsWith("graft.chat.") && size > 1500) throw new DOMException("full", "QuotaExceededError");
                put.call(this, name, value);
            };
        }"""
    )
    answering(page, *[a_tree(f"{number}") for number in range(4)])
    ask(page, "new?")
    wait_for_the_end(page)
    page.click("#open-chats")
    assert page.locator(".open-chat .title").all_inner_texts() == ["new?"], "the oldest went"
    page.reload()
    assert page.locator(".message").inner_text().endswith("guess 3"), "all of its text is there"
    page.evaluate("sessionStorage.setItem('graft.current', 'other')")
    page.evaluate("localStorage.setItem('graft.chat.other', JSON.stringify({ when: 1, turns: [{ prompt: 'odd' }] }))")
    page.reload()
    assert page.locator("#welcome").is_visible() and page.locator(".turn").count() == 0


def test_everything_has_a_name_and_can_be_reached_by_keyboard(open_page):
    page = open_page()
    answering(page, *[a_tree(f"{number}") for number in range(3)])
    page.focus("#prompt")
    page.keyboard.type("keys")
    page.keyboard.press("Enter")
    wait_for_the_end(page)
    names = """[...document.querySelectorAll("button, input, textarea, [tabindex='0'], [role]")]
        .filter((one) => one.checkVisibility())
        .filter((one) => !(one.ariaLabel || one.labels?.length || one.textContent.trim()
            || one.getAttribute("aria-labelledby") || one.id === "spoken"))
        .map((one) => one.outerHTML)"""
    assert page.evaluate(names) == []
    bar = page.locator(".round").nth(2).get_attribute("aria-label")
    assert bar == "Round 3, 2 tokens: 1 guessed by a small network, 1 written by the model"
    reached, page_of = [], "document.activeElement.id || document.activeElement.className"
    page.focus("#clear")
    for _ in range(20):
        reached.append(page.evaluate(page_of))
        page.keyboard.press("Tab")
    wanted = [
        "clear", "race", "open-chats", "open-settings", "inspect", "regenerate", "copy", "prompt", "send", "round",
        "earlier", "tree-scroll",
    ]  # fmt: skip
    assert list(dict.fromkeys(one for one in reached if one in wanted)) == wanted
    page.focus("#open-settings")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate(page_of) == "system", "an open box comes right after its button"


def test_screen_readers_get_whole_sentences(open_page):
    page = open_page()
    assert page.locator("[aria-live], [role=log]").count() == 1
    answering(page, *in_pieces("It is **blue**. Light scatters! And so on", size=2))
    ask(page, "why?")
    wait_for_the_end(page)
    said = page.locator("#spoken p").all_inner_texts()
    assert "".join(said).replace(" ", "") == "Itisblue.Lightscatters!Andsoon" and said[-1].endswith("And so on")
    assert all(one.rstrip()[-1] in ".!" for one in said[:-1])
