"""The two pages in a real Chromium, on a running frontend: live numbers, keys, troubles, widths, themes; nothing from outside.

Screenshots are left in the folder that SCREENSHOTS names, else in pytest's temporary one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from browser import Browser, Page, running_browser
from edges.fake_broker import STATE
from edges.frontend_thread import Bench, running_frontend
from packhorse_frontend.api.operations import OPERATIONS
from packhorse_frontend.layers.keys import Keys
from packhorse_shared import metrics
from packhorse_shared.messages import ModelStatus, QueueStatus, RateStatus, StatusReport, WorkerStatus
from packhorse_shared.meter import buckets_of, cell_of
from packhorse_shared.settings import HttpSettings
from waiting import wait_until

WIDTHS = {"phone": 360, "desktop": 1280}
MARKUP = "<img src=x onerror=alert(1)>/a-very-long-name-of-a-model-that-somebody-has-given-it-" + "v2" * 20
ROWS = "document.querySelectorAll('#workers tr').length"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as running:
        yield running


@pytest.fixture(scope="module")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(os.environ.get("SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))


def worker(number: int, state: str = "busy", device: str = "") -> WorkerStatus:
    return WorkerStatus(
        f"worker-{number}", 4000 + number, device or f"cuda:{number}", state, 48, 1200, 38_000, 2_300_000, 0.875, 3 << 30
    )


def report(*workers: WorkerStatus, name: str = "tiny", waiting: int = 120) -> StatusReport:
    return StatusReport(
        "any",
        ModelStatus(name, "embedding", 384, 256, "bfloat16"),
        QueueStatus(waiting, 40, 12.5, 2048),
        list(workers or [worker(number) for number in range(8)]),
        RateStatus(310.0, 2480.0, 148_800.0),
    )


def tell(bench: Bench, status: StatusReport) -> None:
    """Let the fake broker report this from now on."""
    bench.broker.do(lambda: setattr(bench.broker, "_report", lambda: status))


def count_requests(bench: Bench) -> None:
    """Let metrics tell of batches, requests and refusals."""

    def count() -> None:
        meter = bench.broker.meter
        meter.observe(buckets_of(metrics.REQUEST_SECONDS, "embeddings"), 0.02, 100)
        meter.observe(buckets_of(metrics.QUEUE_WAIT_SECONDS), 0.004, 800)
        meter.observe(buckets_of(metrics.BATCH_FILL_RATIO), 0.8, 30)
        meter.observe(buckets_of(metrics.BATCH_INPUTS), 26, 30)
        meter.observe(buckets_of(metrics.BATCH_TOKENS), 1500, 30)
        meter.count(cell_of(metrics.REJECTED, "queue_full"), 7)

    bench.broker.do(count)


def assert_clean(page: Page, bench: Bench, prefix: str = "") -> None:
    """No error, and nothing was asked of anybody but the server."""
    assert page.faults() == []
    assert page.urls()
    assert all(url.startswith(bench.url + prefix) for url in page.urls()), page.urls()


def assert_fits(page: Page, width: int) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.fixture
def bench() -> Iterator[Bench]:
    with running_frontend() as running:
        tell(running, report())
        yield running


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("device", WIDTHS)
def test_numbers_are_live(browser: Browser, bench: Bench, shots: Path, device: str, dark: bool) -> None:
    page = browser.open(f"{bench.url}/", width=WIDTHS[device], dark=dark)
    page.wait_for(f"{ROWS} === 8")
    assert page.text("#state") == "serving"
    assert page.text("#model") == "tiny"
    assert (page.text("#queue"), page.text("#queue-limit")) == ("120", "of 2,048 inputs")
    assert (page.text("#inputs"), page.text("#tokens")) == ("2,480", "148.8K")
    assert page.text("#fill-sub") == "no batch in the last seconds"
    count_requests(bench)
    page.wait_for("document.querySelector('#latency td').innerText === '18\u202fms'")  # half of the bucket from 10 to 25 ms
    page.wait_for("document.querySelector('#fill').innerText === '80\u202f%'")
    assert page.text("#trouble") == "refused: queue full\t7\t7"
    tell(bench, report(worker(0, "gone"), worker(1), waiting=2048))
    page.wait_for(f"{ROWS} === 2 && document.querySelector('#state').innerText === 'queue full'")
    assert "gone" in page.text("#workers tr")
    assert "429" in page.text("#notice")
    assert_fits(page, WIDTHS[device])
    page.screenshot(shots / f"status-{device}-{'dark' if dark else 'light'}.png")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 384) == dark
    assert_clean(page, bench)


@pytest.mark.parametrize("device", WIDTHS)
def test_names_are_text_and_may_be_long(browser: Browser, bench: Bench, shots: Path, device: str) -> None:
    tell(bench, report(worker(0, device=MARKUP), name=MARKUP))
    page = browser.open(f"{bench.url}/", width=WIDTHS[device])
    page.wait_for(f"{ROWS} === 1")
    assert page.text("#model") == MARKUP
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert_fits(page, WIDTHS[device])
    page.screenshot(shots / f"status-long-{device}.png")
    assert_clean(page, bench)


@pytest.mark.parametrize("device", WIDTHS)
def test_names_in_the_api_are_text_and_may_be_long(browser: Browser, bench: Bench, shots: Path, device: str) -> None:
    bench.frontend.state.served_names = (MARKUP, "n" * 256)
    page = browser.open(f"{bench.url}/docs", width=WIDTHS[device])
    page.wait_for("document.querySelectorAll('article').length > 3")
    assert MARKUP in page.text("#createEmbeddings table")
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert_fits(page, WIDTHS[device])
    page.screenshot(shots / f"docs-long-{device}.png")
    assert_clean(page, bench)


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Browser, shots: Path, path: str) -> None:
    with running_frontend(HttpSettings(api_key=("secret",)), keys=Keys(["secret"])) as bench:
        page = browser.open(bench.url + path, width=360)
        is_asked = "!document.querySelector('#key').hidden && document.activeElement.id === 'key-field'"
        page.wait_for(is_asked)
        page.screenshot(shots / f"key{path.replace('/', '-')}.png")
        page.type("wrong")
        page.press("Enter")
        page.wait_for("document.querySelector('#key-note').className === 'wrong'")
        page.wait_for(is_asked)
        page.type("secret")
        page.press("Enter")
        page.wait_for(f"{ROWS} === 1" if path == "/" else "document.querySelectorAll('article').length > 3")
        assert page.evaluate("document.querySelector('#key').hidden")
        assert page.evaluate("Object.values(sessionStorage).join() + localStorage.length + document.cookie") == "secret0"
        assert_clean(page, bench)
        assert not any("secret" in url for url in page.urls())


def test_troubles_are_told(browser: Browser, bench: Bench, shots: Path) -> None:
    page = browser.open(f"{bench.url}/")
    page.wait_for(f"{ROWS} === 8")

    def see(word: str, name: str, **state: Any) -> None:
        bench.broker.change(**state)
        page.wait_for(f"document.querySelector('#state').innerText === {json.dumps(word)}")
        page.screenshot(shots / f"status-{name}.png")

    see("loading", "loading", ready_workers=0, loading_workers=1)
    see("no worker", "no-worker", loading_workers=0)
    see("stopping", "stopping", draining=True)
    see("serving", "serving", draining=False, ready_workers=1)
    assert page.evaluate("document.querySelector('#notice').hidden")
    page.connect(is_connected=False)
    page.wait_for("document.querySelector('#state').innerText === 'no answer'")
    assert page.text("#notice") == "The server does not answer."
    page.wait_for("/numbers are \\d+ s old/.test(document.querySelector('#age').innerText)")
    page.screenshot(shots / "status-no-answer.png")
    assert page.text("#queue") == "120"
    page.connect(is_connected=True)
    page.wait_for("document.querySelector('#state').innerText === 'serving'")
    page.wait_for("document.querySelector('#age').innerText.startsWith('as of ')")
    assert_clean(page, bench)


def test_it_asks_seldom_while_nobody_looks_and_not_at_all_while_paused(browser: Browser, bench: Bench) -> None:
    page = browser.open(f"{bench.url}/")
    page.wait_for(f"{ROWS} === 8")
    page.evaluate(
        "window.pauses = []; const plain = setTimeout; "
        "window.setTimeout = (call, ms) => { pauses.push(ms); return plain(call, ms); }; "
        "window.hide = (isHidden) => { Object.defineProperty(document, 'hidden', { get: () => isHidden, configurable: true }); "
        "document.dispatchEvent(new Event('visibilitychange')); }"
    )
    page.wait_for("pauses.includes(1000)")
    page.evaluate("hide(true)")
    page.wait_for("pauses.at(-1) === 15000")
    page.evaluate("hide(false)")
    page.wait_for("pauses.at(-1) === 1000")
    page.evaluate("document.querySelector('#pause').click()")
    page.wait_for("!isAsking")
    assert page.text("#age").startswith("paused at ")
    asked = len(page.urls())
    tell(bench, report(worker(0)))
    page.evaluate("hide(true); hide(false)")
    assert len(page.urls()) == asked
    page.evaluate("document.querySelector('#pause').click()")
    page.wait_for(f"{ROWS} === 1")
    assert_clean(page, bench)


def test_behind_a_proxy_with_a_prefix(browser: Browser) -> None:
    """Also without the slash at its end, where a relative address would leave the prefix."""
    with running_frontend(HttpSettings(root_path="/encoders")) as bench:
        for path in ("/encoders", "/encoders/", "/encoders/docs"):
            page = browser.open(bench.url + path)
            page.wait_for(f"{ROWS} === 1 || document.querySelectorAll('article').length > 3")
            links = page.evaluate("[...document.querySelectorAll('a[data-to]')].map((link) => new URL(link.href).pathname)")
            assert links
            assert all(link.startswith("/encoders/") for link in links), links
            assert_clean(page, bench, "/encoders")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("device", WIDTHS)
def test_the_api_can_be_read_and_tried(browser: Browser, bench: Bench, shots: Path, device: str, dark: bool) -> None:
    page = browser.open(f"{bench.url}/docs", width=WIDTHS[device], dark=dark)
    page.wait_for("document.querySelectorAll('article').length > 3")
    found = page.evaluate("[...document.querySelectorAll('article')].map((one) => one.id)")
    assert sorted(found) == sorted(operation.name for operation in OPERATIONS)
    request = page.text("#createEmbeddings table")
    assert "input required" in request
    assert "list of 1 to 2,048 texts" in request
    assert "truncate_prompt_tokens" in request
    assert '"model": "tiny"' in page.text("#createEmbeddings pre")
    page.evaluate("document.querySelector('#try-createEmbeddings').closest('details').open = true")
    page.evaluate("document.querySelector('#try-createEmbeddings button').click()")
    page.wait_for("document.querySelector('#try-createEmbeddings .outcome').innerText.startsWith('200 in')")
    answer = json.loads(page.text("#try-createEmbeddings .answer pre"))
    assert [item["index"] for item in answer["data"]] == [0, 1]
    assert_fits(page, WIDTHS[device])
    page.screenshot(shots / f"docs-{device}-{'dark' if dark else 'light'}.png")
    page.evaluate("document.querySelector('#try-createEmbeddings textarea').value = '{\"input\": 7}'")
    page.evaluate("document.querySelector('#try-createEmbeddings button').click()")
    page.wait_for("document.querySelector('#try-createEmbeddings .outcome').innerText.startsWith('400 in')")
    assert "input" in page.text("#try-createEmbeddings .answer pre")
    assert_clean(page, bench)


def test_metrics_are_read_and_counted_as_prometheus_does(browser: Browser, bench: Bench) -> None:
    page = browser.open(f"{bench.url}/")
    page.wait_for(f"{ROWS} === 8")
    buckets = 'h_bucket{le="0.1"} %d\nh_bucket{le="1.0"} %d\nh_bucket{le="+Inf"} %d'

    def quantile(share: float, *counts: int) -> Any:
        return page.evaluate(f"quantile([...readMetrics({json.dumps(buckets % counts)}).values()], 'h', {share})")

    assert quantile(0.5, 10, 10, 10) == pytest.approx({"value": 0.05, "isBeyond": False})
    assert quantile(0.5, 0, 10, 10) == pytest.approx({"value": 0.55, "isBeyond": False})
    assert quantile(0.99, 5, 5, 10) == {"value": 1, "isBeyond": True}
    assert quantile(0.5, 0, 0, 0) is None
    texts = [json.dumps(f'c{{why="a \\\\"b\\\\" }}"}} {value}\n# HELP c 1\nnew 3') for value in (7, 10, 2)]
    first, later, restarted = (f"readMetrics({text})" for text in texts)
    assert page.evaluate(f"total(growth({later}, {first}), 'c')") == 3
    assert page.evaluate(f"total(growth({restarted}, {later}), 'c')") == 2, "a counter that went back has begun anew"
    assert page.evaluate(f"total(growth({later}, new Map()), 'new')") == 3
    assert (
        page.evaluate("[0.0004, 0.025, 9.94, 75].map(writeSeconds).join()").replace("\u202f", " ") == "0.4 ms,25 ms,9.9 s,75 s"
    )
    assert page.evaluate("[0, 9.94, 1234, 1.2e6].map(writeRate).join(' ')") == "0 9.9 1,234 1.2M"
    assert page.evaluate("[0, 2 ** 20, 3 * 2 ** 30].map(writeBytes).join()").replace("\u202f", " ") == "\u2013,1.0 MiB,3.0 GiB"


def controls(page: Page) -> list[tuple[str, str]]:
    """Role and name of what can be used or jumped to, as a screen reader gets them."""
    nodes = page.ask("Accessibility.getFullAXTree")["nodes"]
    seen = [(node["role"]["value"], node.get("name", {}).get("value", "").strip()) for node in nodes if not node["ignored"]]
    return [(role, name) for role, name in seen if role in ("button", "link", "textbox", "image", "heading", "table")]


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_every_control_has_a_name_and_every_part_a_heading(browser: Browser, bench: Bench, path: str) -> None:
    page = browser.open(bench.url + path)
    page.wait_for(f"{ROWS} === 8 || document.querySelectorAll('article').length > 3")
    wait_until(lambda: all(name for role, name in controls(page) if role != "table"), 10, f"names of {controls(page)}")
    assert {role for role, _ in controls(page)} >= {"button", "link", "heading", "table"}


def test_the_keyboard_reaches_everything(browser: Browser, bench: Bench) -> None:
    page = browser.open(f"{bench.url}/")
    page.wait_for(f"{ROWS} === 8")
    reached = []
    for _ in range(3):
        page.press("Tab")
        reached.append(page.evaluate("document.activeElement.innerText"))
    assert reached == ["API", "Metrics", "Pause"]
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.press("Enter")
    page.wait_for("document.querySelector('#pause').getAttribute('aria-pressed') === 'true'")


def test_a_server_that_loads_shows_its_page(browser: Browser) -> None:
    state = msgspec.structs.replace(STATE, ready_workers=0, loading_workers=1, model=None)
    with running_frontend(wait=False, state=state) as bench:
        tell(bench, msgspec.structs.replace(report(worker(0, "loading")), model=None))
        page = browser.open(f"{bench.url}/")
        page.wait_for("document.querySelector('#state').innerText === 'loading'")
        page.wait_for(f"{ROWS} === 1")
        assert page.text("#model") == "no model yet"
        wait_until(lambda: "loading" in page.text("#workers tr"))
        assert_clean(page, bench)
