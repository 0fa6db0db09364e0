"""The live page in a real browser, over a real cluster: `make test-page`, which renews the pictures too."""

import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import combinations
from pathlib import Path

import grpc
import pytest
from axe_playwright_python.sync_playwright import Axe
from live_cluster import LiveCluster, all_ready, live_cluster
from playwright.sync_api import Browser, Page, sync_playwright

from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1 import link_pb2 as link
from pdserve.router.frontend.backend import MAX_OF_STAGE

pytestmark = pytest.mark.timeout(600)

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PICTURES = os.environ.get("PDSERVE_PICTURES")  # folder that they are written to
SIZES = {"desktop": {"width": 1440, "height": 900}, "phone": {"width": 390, "height": 844}}
NUM_MANY = 20  # requests that fill a lane
LONG_ANSWERED = "Count from 1 to 500, one number on each line."  # greedily, the model goes on for a thousand tokens
PATIENCE_MS = 60_000  # with a busy machine
POLICY = """
apiVersion: pdserve/v1alpha1
kind: AutoscalingPolicy
mode: advisory
objectives: {ttftMs: 1500, tpotMs: 150}
budget: {maxDevices: 4}
interval: {forecast: 10s, react: 2s}
pools:
  prefill: {minReplicas: 1, maxReplicas: 2, startup: 5s}
  decode: {minReplicas: 2, maxReplicas: 3, startup: 5s}
"""
PROMPTS = (
    "Explain in a few sentences how rain is made.",
    "List the planets of the solar system, the largest first, and say something about each of them.",
    "Write a letter to a friend about a walk in the mountains. " * 12,
)


class Traffic:
    """Clients that ask again and again, some of them for what cannot be had."""

    def __init__(self, cluster: LiveCluster) -> None:
        self._cluster = cluster
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(place,)) for place in range(5)]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, place: int) -> None:
        turn = 0
        while not self._stop.wait(0.3):
            turn += 1
            ttft_ms = 1.0 if place == 0 and turn % 4 == 0 else 2500.0
            request = inference.GenerateRequest(
                text=PROMPTS[(place + turn) % len(PROMPTS)],
                sampling=inference.SamplingParams(max_tokens=24 + 16 * place, ignore_eos=True),
                slo=inference.Slo(ttft_ms=ttft_ms, tpot_ms=200.0 + 50 * place),
            )
            with suppress(grpc.RpcError):
                self._cluster.generate(request)


@pytest.fixture(scope="module")
def cluster(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    policy = folder / "policy.yaml"
    policy.write_text(POLICY)
    flags = ("--prefill", "1", "--decode", "2", "--num-pages", "320", "--max-model-len", "2048")
    model_flags = ("--served-model-name", "smollm2-135m-instruct", "--placement", "goodput")
    with live_cluster(folder, smollm2, *flags, *model_flags, "--policy", str(policy), "--max-workers", "4") as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.fail("no browser is here: install Debian's package chromium")
    with sync_playwright() as driver:
        # A sandbox of its own is refused to a browser of root's; it opens nothing but this machine's pages.
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


Open = Callable[..., Page]


@pytest.fixture
def opened(browser: Browser, cluster: LiveCluster) -> Iterator[Open]:
    """Open the page; nothing that it does may be refused or fail."""
    contexts, troubles = [], []

    def open_page(size: str = "desktop", scheme: str = "light") -> Page:
        context = browser.new_context(viewport=SIZES[size], color_scheme=scheme, reduced_motion="no-preference")
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda said: troubles.append(said.text) if "Content Security" in said.text else None)
        page.goto(cluster.state.http)
        page.wait_for_selector('#link[data-state="live"]')
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert troubles == []


def say(page: Page, words: str, max_tokens: int = 48) -> None:
    page.fill("#chat-max", str(max_tokens))
    page.fill("#chat-text", words)
    page.press("#chat-text", "Enter")


def until_answered(page: Page) -> None:
    page.wait_for_selector("#chat-stop:disabled")


def test_a_chat_is_seen_to_pass_all_stages(opened: Open, cluster: LiveCluster) -> None:
    page = opened()
    with cluster.frozen("prefill-0"):  # long enough to be seen before its first token
        say(page, "What is a list in Python? " * 200, max_tokens=96)
        mark = page.wait_for_selector("#lanes :is([data-stage=queue], [data-stage=prefill]) button.own")
        assert mark.get_attribute("aria-label").startswith("Your request")
    until_answered(page)
    assert page.text_content(".turn.it .words").strip()
    assert page.wait_for_selector(".way li:nth-child(4).passed")
    assert page.locator(".way li.passed").count() == 4
    about = page.text_content(".turn.it .about")
    assert "TTFT" in about
    assert re.search(r"\b[1-9]\d* tokens?\b", about)
    row = page.wait_for_selector("#ended tr:has(.badge)").text_content()
    assert "answered" in row
    assert "prefill-0 → decode-" in row


def test_an_answer_can_be_stopped(opened: Open) -> None:
    page = opened()
    page.fill("#chat-temperature", "0")
    say(page, LONG_ANSWERED, max_tokens=1000)
    page.wait_for_selector("#lanes [data-stage=decode] button.own")
    page.click("#chat-stop")
    assert "stopped" in page.wait_for_selector(".turn.it .about:has-text('stopped')").text_content()
    assert "client left" in page.wait_for_selector("#ended tr:has(.badge)").text_content()


def test_the_parts_of_a_timeline_add_up_to_the_time_to_first_token(opened: Open) -> None:
    page = opened()
    say(page, "What is rain?", max_tokens=8)
    page.wait_for_selector("#ended tr:has(.badge)")
    page.click(".turn.it .about button")
    steps = {
        row.locator("th").text_content(): [
            cell.split()[0].lstrip("+") for cell in row.locator("td").all_text_contents() if cell
        ]
        for row in page.wait_for_selector("#detail tbody") and page.locator("#detail tbody tr").all()
    }
    until_first = list(steps.items())[1 : list(steps).index("first token") + 1]
    total_ms = sum(float(after) for _, (_, after) in until_first)
    request_id = page.locator("#detail dd").first.text_content()
    known = page.evaluate("id => fetch(`/page/requests/${id}`).then((response) => response.json())", request_id)
    assert total_ms == pytest.approx(known["ledger"]["ttft_ms"], abs=2)
    assert {"prefill started", "KV landed", "finished"} <= set(steps)
    page.keyboard.press("Escape")
    assert not page.is_visible("#detail")


def test_a_change_of_role_and_a_decision_are_shown_as_they_happen(opened: Open, cluster: LiveCluster) -> None:
    page = opened()
    for role, name in ((link.ROLE_MIXED, "mixed"), (link.ROLE_DECODE, "decode")):
        asked = admin.SetWorkerRoleRequest(worker_id="decode-1", role=role)
        cluster.admin.SetWorkerRole(asked, metadata=cluster.proof("SetWorkerRole", 10), timeout=10)
        page.wait_for_selector(f'[data-role={name}] [data-worker="decode-1"]')
    page.select_option("#news-kind", "scaling")
    assert page.wait_for_selector("#news [data-kind=scaling]").text_content()


def test_a_killed_worker_is_seen_to_go_and_to_come_back(opened: Open, cluster: LiveCluster) -> None:
    page = opened()
    card = page.locator('[data-worker="decode-0"]')
    before = card.get_attribute("data-process")
    cluster.signal("decode-0", signal.SIGKILL)
    page.wait_for_selector('[data-worker="decode-0"][data-state=gone]')
    assert (
        "lost decode-0" in page.wait_for_selector('#news [data-kind=warning]:has-text("lost decode-0")').text_content()
    )
    page.wait_for_selector(f'[data-worker="decode-0"][data-state=ready]:not([data-process="{before}"])')
    assert "ready" in card.text_content()
    cluster.wait_for(all_ready(3), 60)


def test_a_cut_stream_is_noticed_and_news_come_again(opened: Open, cluster: LiveCluster) -> None:
    page = opened()
    assert not page.is_visible("#cut")
    with cluster.frozen("router"):
        page.wait_for_selector("#cut:visible")
        assert "Last news at" in page.text_content("#cut-text")
        assert page.text_content("#link-text") == "Not connected"
        assert violations(page) == []
    page.wait_for_selector('#link[data-state="live"]')
    assert not page.is_visible("#cut")
    cluster.wait_for(all_ready(3), 60)


@pytest.mark.parametrize("size", SIZES)
def test_a_full_lane_shows_the_newest_marks_and_counts_the_others(
    opened: Open, cluster: LiveCluster, size: str
) -> None:
    page = opened(size)
    many = inference.GenerateRequest(
        text=PROMPTS[0], sampling=inference.SamplingParams(max_tokens=300, ignore_eos=True, temperature=1.0)
    )
    calls = [cluster.start(many) for _ in range(NUM_MANY)]
    lane = page.locator("#lanes [data-stage=decode]")
    try:
        page.wait_for_selector(f"#lanes [data-stage=decode] .count:text-is('{NUM_MANY}')")
        assert lane.locator("button").count() == MAX_OF_STAGE
        assert lane.locator("ul").get_attribute("class") == "dense"
        assert lane.locator(".more").text_content() == f"and {NUM_MANY - MAX_OF_STAGE} more"
        page.evaluate("Promise.allSettled(document.getAnimations().map((each) => each.finished))")  # marks glide here
        boxes = lane.locator("button").evaluate_all("all => all.map((each) => each.getBoundingClientRect().toJSON())")
        assert not any(overlap(one, other) for one, other in combinations(boxes, 2))
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert violations(page) == []
    finally:
        for call in calls:
            call.cancel()
    page.wait_for_selector("#lanes [data-stage=decode] button", state="detached")


def overlap(one: dict[str, float], other: dict[str, float]) -> bool:
    """Return whether two boxes have more in common than an edge."""
    return all(
        one[start] < other[end] - 1 and other[start] < one[end] - 1
        for start, end in (("left", "right"), ("top", "bottom"))
    )


def test_the_keyboard_alone_suffices(opened: Open, cluster: LiveCluster) -> None:
    page = opened()
    with Traffic(cluster):
        page.wait_for_selector("#lanes button")
        page.focus("#flow-title")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.closest('#lanes') !== null")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        page.wait_for_selector("#detail[open]")
        page.keyboard.press("Escape")
        page.focus("#chat-text")
        page.keyboard.type("Hello")
        page.keyboard.press("Enter")
        until_answered(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_axe_finds_nothing_serious(opened: Open, cluster: LiveCluster, size: str, scheme: str) -> None:
    page = opened(size, scheme)
    with Traffic(cluster):
        say(page, "What is rain?", max_tokens=12)
        until_answered(page)
        page.wait_for_selector("#ended tr")
        found = violations(page)
        page.click("#ended button")
        page.wait_for_selector("#detail tbody")
        found += violations(page)
    assert found == []


def violations(page: Page) -> list[str]:
    """Return what is wrong with the page as it is, all but the minor."""
    response = Axe().run(page).response
    return [
        f"{each['id']} ({each['impact']}): {[node['target'] for node in each['nodes']]}"
        for each in response["violations"]
        if each["impact"] != "minor"
    ]


@pytest.mark.skipif(PICTURES is None, reason="make test-page renews the pictures")
def test_pictures(opened: Open, cluster: LiveCluster) -> None:
    from PIL import Image  # noqa: PLC0415 - which only pictures need

    with Traffic(cluster):
        page = opened()
        page.wait_for_timeout(75_000)  # for the charts to have something to show
        page.close()
        for size in SIZES:
            for scheme in ("light", "dark"):
                page = opened(size, scheme)
                say(page, "What is a prefix cache?", max_tokens=40)
                until_answered(page)
                page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
                path = Path(str(PICTURES)) / f"page-{size}-{scheme}.png"
                page.screenshot(path=path, full_page=True, animations="disabled")
                if (size, scheme) == ("desktop", "light"):
                    page.click("#ended tr:has(.badge) button")
                    page.wait_for_selector("#detail tbody")
                    page.locator("#detail").screenshot(path=path.with_name("page-timeline.png"))
                page.close()
    for path in Path(str(PICTURES)).glob("page-*.png"):
        few = Image.open(path).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few.save(path, optimize=True)
        assert path.stat().st_size < 150_000, path


def test_a_drained_worker_is_seen_to_drain_to_leave_and_to_come_back(opened: Open, cluster: LiveCluster) -> None:
    page = opened()
    before = page.locator('[data-worker="decode-1"]').get_attribute("data-process")
    drain = admin.DrainWorkerRequest(worker_id="decode-1")
    cluster.admin.DrainWorker(drain, metadata=cluster.proof("DrainWorker", 10), timeout=10)
    page.wait_for_selector('#news [data-kind=drain]:has-text("decode-1: drains")')
    page.wait_for_selector('[data-worker="decode-1"][data-state=gone]')
    page.wait_for_selector(f'[data-worker="decode-1"][data-state=ready]:not([data-process="{before}"])')
