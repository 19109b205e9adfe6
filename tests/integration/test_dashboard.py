"""The dashboard in a real browser, on a real server: what it shows, and what it must not do."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from tests.integration import browser
from tests.integration.conftest import start, stop
from tests.integration.steps import new_model, step
from tests.integration.test_whole import new_model as new_whole_model
from tests.integration.test_whole import sampled, session, train
from tinker import types as T

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(browser.binary() is None, reason="no chromium on this machine's PATH"),
]

EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>"
STEPS = 6
KEY_FORM = "!document.getElementById('key-form').hidden"
IS_READY = "document.body.dataset.ready === 'yes'"
TEXT = "document.getElementById('main').innerText"
ROWS = "[...document.querySelectorAll('main tbody tr')].map((row) => row.innerText)"
EXPECTED = "401"
"""Of the console: a page in a local browser tries without a key first, for open mode."""


@pytest.fixture(scope="module")
def server(tmp_path_factory, model_folder):
    folder = tmp_path_factory.mktemp("dashboard")
    extra = 'full = true\ndtype = "bfloat16"\n'  # in which small steps change few elements
    running = start(folder, model_folder=model_folder, extra=extra)
    yield running
    stop(running)


@pytest.fixture(scope="module")
def client(server):
    """Of a session that lasts as long as the tests: its runs are live."""
    with session(server) as client:
        yield client


@pytest.fixture(scope="module")
def run(client):
    """A run with a name that is an attack, some steps of two losses, a save and an error."""
    model = new_model(client, user_metadata={"name": EVIL})
    for _ in range(STEPS):
        step(model)
    inputs = {
        "target_tokens": np.arange(6, 26),
        "logprobs": np.full(20, -5.0, np.float32),
        "advantages": np.ones(20, np.float32),
    }
    drawn = T.Datum(model_input=T.ModelInput.from_ints(list(range(5, 25))), loss_fn_inputs=inputs)
    model.forward_backward([drawn], "importance_sampling").result()
    model.save_state("kept").result()
    with pytest.raises(Exception, match="nope"):
        model.forward_backward([drawn], "cross_entropy", {"nope": 1.0}).result()
    return model.get_info().model_id


@pytest.fixture(scope="module")
def whole_run(client, run):
    """A run of all weights, twice published, whole and as what changed, and sampled from."""
    model = new_whole_model(client)
    for _ in range(2):
        train(model, T.AdamParams(learning_rate=1e-5), 1)
        sampled(model.save_weights_and_get_sampling_client().result())
    return model.get_info().model_id


@pytest.fixture
async def page(tmp_path):
    async with browser.page(tmp_path) as tab:
        yield tab


async def opened(page, server, *, width=1280, dark=False):
    await page.look_as(width=width, height=900, dark=dark)
    await page.go(f"{server.base_url}/")
    await page.until(KEY_FORM)
    await page.type(server.api_key)
    await page.press("Enter", "\r")
    await page.until(IS_READY)


def serious(page):
    return [one for one in page.troubles if EXPECTED not in one]


async def test_the_overview_shows_what_goes_on(server, run, whole_run, page):
    await opened(page, server)
    await page.until("document.querySelectorAll('.plot .u-over').length >= 2")
    await page.until(f"{TEXT}.includes('version 2')")  # that the pool's sampler serves
    text = await page.run(TEXT)

    for caption in (
        *("Live runs", "Recent errors", "Services", "Queues", "Sampler pools"),
        *("Published weights", "Checkpoints", "Usage per key"),
    ):
        assert caption in text
    assert "weights/kept" in text
    assert "does not take it" in text
    assert await page.run("document.querySelectorAll('meter').length") >= 1
    assert serious(page) == []


async def test_a_run_shows_its_curves_its_chain_its_log_and_how_to_do_it_again(server, run, page):
    await opened(page, server)
    await page.go(f"{server.base_url}/#/run/{run}")
    await page.until(f"{TEXT}.includes('Copy replay command')")
    await page.until(f"{TEXT}.includes('KL to the sampler')")
    text = await page.run(TEXT)

    assert f"tinsmith replay {run}" in text
    assert "link up" in text
    for word in ("Loss:", "ForwardBackward", "OptimStep", "weights/kept", "Failed"):
        assert word in text
    assert serious(page) == []


async def test_a_whole_model_shows_how_much_each_version_changed(server, whole_run, page):
    await opened(page, server)
    await page.go(f"{server.base_url}/#/run/{whole_run}")
    await page.until(f"{TEXT}.includes('Elements changed')")
    rows = await page.run(ROWS)

    assert any("delta" in row and "%" in row for row in rows)
    assert any("full" in row and "all" in row for row in rows)


async def test_the_name_of_a_run_is_text_and_nothing_else(server, run, page):
    await opened(page, server)
    await page.go(f"{server.base_url}/#/run/{run}")
    await page.until(f"{TEXT}.includes({json.dumps(EVIL)})")

    assert await page.run("document.querySelectorAll('main img, main script').length") == 0
    assert serious(page) == []


@pytest.mark.parametrize("dark", [False, True])
async def test_it_fits_on_a_phone_in_both_colours(server, run, page, dark):
    await opened(page, server, width=360, dark=dark)
    await page.until("document.querySelectorAll('.plot .u-over').length >= 1")
    colour = await page.run("getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, colour.strip("rgb()").split(","))) / 3

    assert (light < 60) if dark else (light > 200)
    for address in ("#/", "#/runs", f"#/run/{run}"):
        await page.go(f"{server.base_url}/{address}")
        await page.until(f"{ROWS}.length > 0")
        assert await page.run("document.documentElement.scrollWidth") <= 360


async def test_it_is_used_with_a_keyboard(server, run, page):
    await opened(page, server)
    await page.press("r")
    await page.until("location.hash === '#/runs'")
    await page.until("document.querySelectorAll('main tbody a').length > 0")
    await page.press("j")
    await page.until("document.activeElement.matches('main tbody a')")
    outline = await page.run("getComputedStyle(document.activeElement).outlineStyle")
    await page.press("Enter", "\r")
    await page.until("location.hash.startsWith('#/run/')")
    await page.press("?")
    await page.until("document.getElementById('help').open")
    await page.press("Escape")
    await page.until("!document.getElementById('help').open")
    await page.press("o")
    await page.until("location.hash === '#/'")

    assert outline == "solid"


async def test_without_a_right_key_it_shows_nothing_and_a_key_is_forgotten(server, run, page):
    await page.look_as(width=800, height=600)
    await page.go(f"{server.base_url}/")
    await page.until(KEY_FORM)
    await page.type("tml-nobody")
    await page.press("Enter", "\r")
    await page.until("document.getElementById('notice').textContent.includes('not a key')")
    assert await page.run("document.querySelectorAll('main tbody tr').length") == 0

    await page.run("document.getElementById('key').focus()")
    await page.type(server.api_key)
    await page.press("Enter", "\r")
    await page.until(IS_READY)
    assert await page.run("document.cookie") == ""
    await page.run("document.getElementById('leave').click()")
    await page.until(KEY_FORM)
    assert await page.run("sessionStorage.length") == 0


async def test_everything_is_loaded_from_the_gateway(server, run, page):
    await opened(page, server)
    await page.until("document.querySelectorAll('.plot .u-over').length >= 1")
    script = "performance.getEntriesByType('resource').map((entry) => new URL(entry.name).origin)"

    assert set(await page.run(script)) == {server.base_url.rstrip("/")}


async def test_new_operations_appear_by_themselves(server, client, page):
    model = new_model(client, seed=5)
    run_id = model.get_info().model_id
    await opened(page, server)
    await page.go(f"{server.base_url}/#/run/{run_id}")
    await page.until(f"{TEXT}.includes('Copy replay command')")
    assert "OptimStep" not in await page.run(TEXT)

    await asyncio.to_thread(step, model)

    await page.until(f"{TEXT}.includes('OptimStep')")
