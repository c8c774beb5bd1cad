"""How the server starts and stops, and what an operator sees of it: progress, log lines, metrics."""

import json
import logging
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from gates import PATIENCE, Gate
from graft.engine.scheduler import Scheduler
from graft.errors import GraftError
from graft.progress import Report
from graft.server.app import make_app
from graft.server.connection import make_server
from graft.server.gateway import Gateway
from graft.server.logs import JsonLines
from graft.server.settings import ServeSettings
from graft.server.startup import listen
from served import A_LETTER, GREEDY, new_engine, post, running, until

DOCS = Path(__file__).parent.parent / "docs"

# Nothing waits for torch


def test_importing_graft_needs_no_torch_and_dir_lists_its_names():
    script = "import graft, sys; assert {'load', 'decode', 'Engine'} <= set(dir(graft)); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "False\n"


# Start and stop


def test_a_server_answers_that_it_loads_until_the_model_is_there():
    settings = ServeSettings(port=0, api_keys=("k",), shutdown_timeout=1.0)
    may_load, engine = threading.Event(), new_engine()

    def load(startup, metrics):
        startup.show(Report("reading weights", 2, 5, ""))
        assert may_load.wait(PATIENCE)
        return make_app(engine, settings, "tiny", startup, metrics)

    with served(Gateway(settings, "tiny", load), settings) as (url, _):
        key = {"authorization": "Bearer k"}
        until(lambda: "reading weights" in httpx.get(f"{url}/health").text)
        assert httpx.get(f"{url}/live").json() == {"status": "loading"}
        health = httpx.get(f"{url}/health")
        assert health.status_code == 503 and health.headers["retry-after"] == "1"
        assert health.json().items() >= {"status": "loading", "stage": "reading weights"}.items()
        assert health.json()["seconds"] >= 0 and "reading weights" in health.json()["error"]["message"]
        page = httpx.get(url)
        assert page.status_code == 503 and page.headers["content-type"].startswith("text/html")
        assert "Graft is loading tiny" in page.text and "reading weights, 2 of 5" in page.text
        assert re.search('http-equiv="refresh"', page.text) and '<progress value="2" max="5">' in page.text
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, headers=key)
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "server_error")
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 401, "keys are asked for"
        assert 'reason="busy"' in httpx.get(f"{url}/metrics", headers=key).text
        may_load.set()
        until(lambda: httpx.get(f"{url}/health").status_code == 200)
        assert httpx.get(url).status_code == 200 and "refresh" not in httpx.get(url).text, "the chat"
        asked = httpx.post(f"{url}/v1/completions", json={"prompt": "x", **GREEDY}, headers=key, timeout=PATIENCE)
        assert asked.status_code == 200 and httpx.get(f"{url}/live").json() == {"status": "ok"}
        assert 'reason="busy"' in httpx.get(f"{url}/metrics", headers=key).text, "counts of the start are kept"


def test_without_its_page_a_loading_server_answers_in_json_there_too():
    settings, may_load = ServeSettings(port=0, page=False), threading.Event()

    def load(startup, metrics):
        assert may_load.wait(PATIENCE)
        return make_app(new_engine(), settings, "tiny", startup, metrics)

    with served(Gateway(settings, "tiny", load), settings) as (url, _):
        assert httpx.get(url).json()["status"] == "loading"
        may_load.set()


def test_a_model_that_cannot_be_loaded_ends_the_server():
    settings = ServeSettings(port=0)

    def load(startup, metrics):
        raise GraftError("no such model")

    gateway = Gateway(settings, "tiny", load)
    with served(gateway, settings) as (_, thread):
        thread.join(PATIENCE)
        assert not thread.is_alive() and str(gateway.failure) == "no such model"


def test_a_server_can_be_stopped_while_it_loads():
    settings, may_load = ServeSettings(port=0), threading.Event()

    def load(startup, metrics):
        assert may_load.wait(PATIENCE)
        raise GraftError("too late to matter")

    gateway = Gateway(settings, "tiny", load)
    with served(gateway, settings) as (url, _):
        assert httpx.get(f"{url}/live").json() == {"status": "loading"}
    may_load.set()
    until(lambda: not gateway.is_loading)
    assert gateway.failure is None


class served:
    """A gateway on a free port: its address, and the thread of its server."""

    def __init__(self, gateway, settings):
        self.server = make_server(gateway, settings, gateway.drain, log_level="warning", loop="asyncio")
        gateway.on_failure = self.stop
        self.sockets = listen(settings)
        self.thread = threading.Thread(target=self.server.run, args=(self.sockets,), daemon=True)

    def stop(self):
        self.server.should_exit = True

    def __enter__(self):
        port = self.sockets[0].getsockname()[1]
        self.thread.start()
        return f"http://127.0.0.1:{port}", self.thread

    def __exit__(self, *error):
        self.stop()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


def test_all_addresses_of_a_host_get_the_same_free_port():
    sockets = listen(ServeSettings(host="localhost", port=0))
    assert len({made.getsockname()[1] for made in sockets}) == 1
    for made in sockets:
        made.close()


def test_while_it_drains_new_requests_are_told_to_come_back_and_live_says_stopping(monkeypatch):
    """A request is held in decoding when the server begins to stop."""
    engine, close, seen = new_engine(), Scheduler.close, {}
    with ThreadPoolExecutor(2) as pool:
        with running(engine, shutdown_timeout=PATIENCE) as url:
            gate = Gate(engine.target)

            def ask_and_close(scheduler, *given):
                if seen:
                    return close(scheduler, *given)
                closing = pool.submit(close, scheduler, *given)
                until(lambda: scheduler.is_closing)
                seen["live"], seen["health"] = httpx.get(f"{url}/live"), httpx.get(f"{url}/health")
                seen["new"] = post(url, prompt="x", **GREEDY)
                gate.open()
                return closing.result()

            monkeypatch.setattr(Scheduler, "close", ask_and_close)
            answer = pool.submit(post, url, prompt="abc", max_tokens=20, ignore_eos=True, speculate=False)
            gate.wait()
        assert answer.result().status_code == 200 and answer.result().json()["usage"]["completion_tokens"] == 20
    assert seen["live"].status_code == 200 and seen["live"].json() == {"status": "stopping"}
    for what in ("health", "new"):
        assert seen[what].status_code == 503 and seen[what].headers["retry-after"] == "1"
        assert "shutting down" in seen[what].json()["error"]["message"]


# What an operator sees


@pytest.fixture
def lines(caplog):
    """Messages of the server's log, once there are so many."""
    caplog.set_level(logging.INFO, "graft.server")

    def wait_for(count, start="id-"):
        found = []

        def is_there():
            found[:] = [record for record in caplog.records if record.getMessage().startswith(start)]
            return len(found) >= count

        until(is_there)
        return found

    return wait_for


def test_every_refusal_and_failure_has_one_log_line_without_text(lines, monkeypatch):
    keys = {"api_keys": ("a", "b"), "api_key_names": ("alice", "bob")}
    secret = "my-secret-words"
    with running(max_body_bytes=2000, **keys) as url:

        def ask(number, key="b", path="/v1/completions", **body):
            headers = {"authorization": f"Bearer {key}", "x-request-id": f"id-{number}"}
            return httpx.post(url + path, json=body, headers=headers, timeout=PATIENCE).status_code

        assert ask(1, key=secret, prompt="x") == 401
        assert ask(2, prompt="x", **{secret: 1}) == 400
        assert ask(3, prompt="x", temperature=secret) == 400
        assert ask(4, prompt="x", model=secret) == 404
        assert ask(5, prompt=secret * 200) == 413
        assert ask(6, path=f"/{secret}") == 404
        assert ask(7, prompt=secret, max_tokens=5000) == 400
        assert ask(8, prompt="x", logit_bias={secret: 1}) == 400
        assert ask(9, prompt=secret, max_tokens=1023) == 400, "it does not fit the context"
        assert ask(10, "a", prompt=secret, max_tokens=2) == 200
        found = [record.getMessage() for record in lines(10)]
    told = [re.sub(r"\d+\.\d+ s", "0 s", message) for message in found]
    assert told[:9] == [
        "id-1 - 401 POST /v1/completions 0 s: key",
        "id-2 bob 400 POST /v1/completions 0 s: request, extra_forbidden",
        "id-3 bob 400 POST /v1/completions 0 s: request, float_type, field temperature",
        "id-4 bob 404 POST /v1/completions 0 s: model, field model",
        "id-5 bob 413 POST /v1/completions 0 s: the body is larger than the 2000 bytes allowed here",
        "id-6 bob 404 POST other 0 s: no such path",
        "id-7 bob 400 POST /v1/completions 0 s: request, field max_tokens",
        "id-8 bob 400 POST /v1/completions 0 s: request, string_pattern_mismatch, field logit_bias",
        "id-9 bob 400 POST /v1/completions 0 s: request, field max_tokens",
    ]
    assert told[9].startswith("id-10 alice 200 cmpl-") and len(told) == 10
    assert secret not in "".join(found)


def test_a_failure_after_decoding_began_is_logged_once_with_its_status(lines):
    with running(timeout=1e-3) as url:
        refused = post_with_id(url, "id-late", prompt="abc", max_tokens=900, logit_bias=A_LETTER)
        assert refused.status_code == 504
        (line,) = lines(1)
        assert line.getMessage().startswith("id-late - 504 cmpl-") and "timeout" in line.getMessage()
        assert line.levelno == logging.WARNING
        post_with_id(url, "id-last", nonsense=1)
        assert len(lines(2)) == 2, "no second line came before this one"


def test_the_access_log_has_every_request_and_the_usual_log_only_refusals(lines, caplog):
    for all_of_them in (False, True):
        caplog.clear()
        with running(access_log=all_of_them) as url:
            httpx.get(f"{url}/version", headers={"x-request-id": "id-version"})
            httpx.get(f"{url}/nowhere", headers={"x-request-id": "id-nowhere"})
            found = [record.getMessage() for record in lines(1 + all_of_them)]
        assert ["id-version - 200 GET /version" in line for line in found] == [True, False][not all_of_them :]


def test_json_lines_hold_what_text_lines_say():
    made = logging.LogRecord("graft.server", logging.INFO, "", 0, "%s refused", ("id-1",), None)
    made.fields = {"request_id": "id-1", "status": 400}
    read = json.loads(JsonLines().format(made))
    assert read.pop("time").endswith("+00:00")
    assert read == {"level": "INFO", "message": "id-1 refused", "request_id": "id-1", "status": 400}


@pytest.mark.parametrize("names", [("one",), ("one", "two", "three"), ("one", ""), ("one", "two\nlines")])
def test_key_names_are_as_many_as_keys_and_printable(names):
    with pytest.raises(GraftError, match="name"):
        ServeSettings(api_keys=("a", "b"), api_key_names=names)


def test_metrics_count_http_statuses_and_the_process():
    with running() as url:
        post(url, nonsense=1)
        httpx.get(f"{url}/any/../where?x=1")
        text = httpx.get(f"{url}/metrics").text
    labels = 'method="POST",model_name="tiny",path="/v1/completions",status="400"'
    assert f"graft:http_requests_total{{{labels}}} 1.0" in text
    assert 'path="other",status="404"' in text and "where" not in text, "paths that clients invent share one label"
    if sys.platform == "linux":
        assert "process_resident_memory_bytes" in text and "process_open_fds" in text


def test_the_dashboard_asks_for_metrics_that_the_server_has():
    dashboard = json.loads((DOCS / "deploy" / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    asked = {name for query in queries for name in re.findall(r"(?:graft:|process_)\w+", query)}
    with running() as url:
        post(url, prompt="abcabcabc", **GREEDY)
        post(url, nonsense=1)
        shown = set(re.findall(r"^(?:# TYPE )?([\w:]+)", httpx.get(f"{url}/metrics").text, re.MULTILINE))
    known = shown | {name + "_total" for name in shown}  # a counter without values yet has only its name
    assert len(asked) > 10 and not asked - known - (
        set() if sys.platform == "linux" else {name for name in asked if name.startswith("process_")}
    )


def post_with_id(url, name, **body):
    return httpx.post(f"{url}/v1/completions", json=body, headers={"x-request-id": name}, timeout=PATIENCE)
