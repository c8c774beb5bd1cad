"""Answers on the web page in a real browser: their text, how they are kept, and how they are read without eyes."""

import itertools

from browsing import DESKTOP, PHONE, a_round, a_tree, answering, ask, setting, wait_for_the_end

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


def test_conversations_are_kept_in_the_browser_and_one_click_forgets_them(browser, page_url):
    context = browser.new_context(viewport=DESKTOP, reduced_motion="reduce")
    page = context.new_page()
    page.goto(page_url)
    assert page.locator("#kept").is_hidden()
    for question in ("first?", "second?"):
        answering(page, a_tree(question))
        ask(page, question)
        wait_for_the_end(page)
        page.click("#clear")
    assert "2 chats kept in this browser" in page.locator("#kept").inner_text()
    other = context.new_page()  # later, in another tab
    other.goto(page_url)
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
