"""The page in headless Chromium: views, hover, keyboard, themes, no error, no request, names as text."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.config.load import compose
from spmd_rl.topology.cluster import Cluster
from spmd_rl.topology.page import page
from spmd_rl.topology.plan import Plan

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not shutil.which("chromedriver"), reason="needs chromium and chromium-driver"),
]
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--window-size=1440,1300",
]  # fmt: skip
HOSTILE = "</script><script>window.hit=1</script><img src=x onerror=window.hit=1>"
FSDP = [
    "model.shape=qwen3-8b", "cluster.nodes=2", "cluster.gpus_per_node=8", "actor.use_kl_loss=true",
    "actor.engine.fsdp.fsdp_size=8", "actor.engine.fsdp.ulysses_size=2",
]  # fmt: skip
MEGATRON = [
    "model.shape=qwen3-30b-a3b", "engine=megatron", "cluster.nodes=2", "cluster.gpus_per_node=8",
    "rollout.name=vllm",
    "actor.engine.megatron.tp=2", "actor.engine.megatron.pp=2", "actor.engine.megatron.ep=4", "rollout.infer_tp=4",
    "actor.engine.offload_params=true", "actor.engine.offload_optimizer=true",
]  # fmt: skip
LARGE = [
    "model.shape=qwen3-32b", "cluster.nodes=64", "cluster.gpus_per_node=8", "+pools.rollout.nnodes=16",
    "rollout.name=vllm",
    "rollout.pool=rollout", "rollout.infer_tp=4", "actor.engine.fsdp.fsdp_size=64", "data.train_batch_size=512",
]  # fmt: skip


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for flag in [*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    yield browser
    browser.quit()


def open_page(driver: Any, folder: Path, overrides: list[str], addresses: tuple[str, ...] = ()) -> Plan:
    config = compose(overrides)
    cluster = Cluster.from_config(config)
    if addresses:
        cluster = Cluster.from_counts([node.ranks for node in cluster.nodes], addresses)
    plan = Plan.from_config(config, cluster)
    (folder / "plan.html").write_text(page(plan), encoding="utf-8")
    driver.get_log("performance")
    driver.get_log("browser")
    driver.get((folder / "plan.html").as_uri())
    return plan


def quiet(driver: Any) -> None:
    """No console entry, and no request but for the page itself."""
    assert driver.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    urls = [
        s["request"]["url"] for s in sent if s["documentURL"] == driver.current_url
    ]  # not the browser's own start page
    assert [url for url in urls if not url.startswith("data:")] == [driver.current_url]


def labels(driver: Any) -> list[str]:
    return driver.execute_script("return [...document.querySelectorAll('#views button')].map(b => b.textContent)")


def lit(driver: Any) -> list[int]:
    return driver.execute_script("return [...document.querySelectorAll('.rank.lit')].map(c => Number(c.dataset.rank))")


def story(driver: Any) -> str:
    return driver.execute_script("return document.getElementById('story').innerText")


def press(driver: Any, start: str) -> None:
    found = next(b for b in driver.find_elements("css selector", "#views button") if b.text.startswith(start))
    found.click()
    assert found.get_attribute("aria-pressed") == "true"


def hover(driver: Any, rank: int) -> None:
    from selenium.webdriver import ActionChains

    cell = driver.find_element("css selector", f".rank[data-rank='{rank}']")
    ActionChains(driver).move_to_element(cell).perform()


def test_fsdp_at_16_ranks(driver: Any, tmp_path: Path) -> None:
    plan = open_page(driver, tmp_path, FSDP)
    assert labels(driver) == ["RANK", "Pools", "FSDPactor", "Ulyssesactor", "Rollout", "FSDPref", "Ulyssesref"]
    for button in driver.find_elements("css selector", "#views button"):
        button.click()
        assert len(driver.find_elements("css selector", ".rank small")) == 16
    press(driver, "FSDP")
    hover(driver, 13)
    expected = {*plan.groups("actor/fsdp").members_of(13), *plan.groups("actor/ddp").members_of(13)}
    assert set(lit(driver)) == expected
    assert "ddp\nr // 8 = 13 // 8 = 1\nwith ranks 5, 13" in story(driver)
    assert "fsdp\nr % 8 = 13 % 8 = 5\nwith ranks 8–15" in story(driver)
    press(driver, "Ulysses")
    hover(driver, 6)
    assert set(lit(driver)) == {*plan.groups("actor/sp").members_of(6), *plan.groups("actor/dp").members_of(6)}
    assert "Rows: part 3 of 8. It collects the results." in story(driver)
    quiet(driver)


def test_the_keyboard_reaches_every_rank(driver: Any, tmp_path: Path) -> None:
    from selenium.webdriver import Keys

    plan = open_page(driver, tmp_path, MEGATRON)
    press(driver, "Megatron")
    driver.switch_to.active_element.send_keys(Keys.TAB)
    for _ in range(20):
        if "rank" in (driver.switch_to.active_element.get_attribute("class") or "").split():
            break
        driver.switch_to.active_element.send_keys(Keys.TAB)
    driver.switch_to.active_element.send_keys(Keys.ARROW_RIGHT * 5)
    assert driver.switch_to.active_element.get_attribute("aria-label").startswith("rank 5, node0")
    assert "tp\nr % 2 = 5 % 2 = 1\nwith ranks 4–5" in story(driver)
    axes = [plan.groups(f"actor/{axis}").members_of(5) for axis in ("tp", "pp", "dp")]
    assert set(lit(driver)) == {rank for members in axes for rank in members}
    driver.switch_to.active_element.send_keys(Keys.END)
    assert "rank 15" in story(driver)
    press(driver, "Experts")
    driver.switch_to.active_element.send_keys(Keys.TAB)
    assert "ep" in story(driver)
    quiet(driver)


def test_phases_show_their_memory_and_traffic(driver: Any, tmp_path: Path) -> None:
    plan = open_page(driver, tmp_path, FSDP)
    steps = driver.find_elements("css selector", ".step")
    assert [step.find_element("css selector", "b").text for step in steps] == [phase.name for phase in plan.phases]
    for step in steps:
        step.click()
    steps[1].click()
    text = driver.find_element("id", "phase").text
    assert "rollout: KV cache" in text
    assert "weight sync: weights" in text
    quiet(driver)


def test_512_ranks_in_two_pools_dark_and_light(driver: Any, tmp_path: Path) -> None:
    plan = open_page(driver, tmp_path, LARGE)
    for button in driver.find_elements("css selector", "#views button"):
        button.click()
    press(driver, "Rollout")
    hover(driver, 500)
    assert set(plan.groups("rollout/infer_tp").members_of(500)) <= set(lit(driver))
    assert all(plan.pool_of(rank).name == "rollout" for rank in lit(driver))
    wide = driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert wide, "nothing sticks out to the side"
    theme = "return document.documentElement.dataset.theme + getComputedStyle(document.body).backgroundColor"
    before = driver.execute_script(theme)
    driver.find_element("id", "theme").click()
    assert driver.execute_script(theme) != before
    quiet(driver)


def test_4096_ranks_are_drawn_and_more_are_said_not_to_be(driver: Any, tmp_path: Path) -> None:
    open_page(driver, tmp_path, ["cluster.nodes=513", "cluster.gpus_per_node=8", "trainer.device=cpu"])
    assert driver.execute_script("return document.querySelectorAll('.rank').length") == 4096
    assert "The first 4096 of 4104 ranks are drawn" in driver.find_element("id", "more").text
    quiet(driver)


def test_names_are_text(driver: Any, tmp_path: Path) -> None:
    open_page(driver, tmp_path, [*FSDP, f"trainer.experiment_name='{HOSTILE}'"], (HOSTILE, "b"))
    assert HOSTILE in driver.find_element("id", "summary").text
    assert HOSTILE in driver.find_element("css selector", ".node h3").text
    assert driver.execute_script("return window.hit === undefined && document.images.length === 0")
    quiet(driver)
