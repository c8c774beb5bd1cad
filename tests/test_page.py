"""The web page in a real browser: what a user sees and does, in light and dark mode, on a desktop and on a phone."""

import httpx
import pytest

from browsing import (
    CHAT,
    DESKTOP,
    PHONE,
    a_round,
    a_tree,
    answering,
    ask,
    brightness,
    contrast,
    events_of,
    failing,
    held,
    in_view,
    racing,
    setting,
    sides,
    wait_for_the_end,
)
from served import running


def test_the_pages_files_are_all_that_is_served_whatever_the_query_asks_for(page_url):
    for path in ("/", "/page.css", "/page.js", "/answer.js", "/chats.js", "/vendor/marked.js"):
        plain = httpx.get(page_url + path)
        assert plain.status_code == 200 and plain.headers["content-security-policy"].startswith("default-src 'self'")
        assert httpx.get(page_url + path, params={"file": __file__}).content == plain.content


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
        page.locator("#talk > :not(#spoken)").get_by_text("was not accepted").first.wait_for()
        page.fill("#key", "sesame")
        page.get_by_role("button", name="Use this key").click()
        page.locator(".inspect").wait_for(timeout=30_000)
        assert not page.locator("#key-form").is_visible() and page.locator("#model").inner_text() == "tiny"
        page.close()
