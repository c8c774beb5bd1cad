"""What tests of the web page do in a browser, and answers that they have the server give."""

import json

PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 800}
CHAT = "**/v1/chat/completions"


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
