"""Reports in a real browser, Chromium without a window: what is drawn, what can be done, what must not happen.

Debian's packages `chromium` and `chromium-driver` are needed; `make test` installs them where it may.
"""

import base64
import io
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_material import FOUR, TWO, rollout_lines, write_lines, write_run, write_study
from rich.console import Console
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

from conftest import MakeConfig
from hacrl.algorithms import ALGORITHMS, HACPO
from hacrl.report.page import write_report
from hacrl.run import train
from hacrl.tasks.arithmetic import ArithmeticTask
from teacher_server import Response, Teacher, right

HOSTILE = '<img src=x onerror="hacked=1"></script><script>hacked=1</script><!--\u202eevil\u2066 \x1b[31mred\x07'
SHOWN = '<img src=x onerror="hacked=1"></script><script>hacked=1</script><!--\\u202eevil\\u2066 \\x1b[31mred\\x07'


@pytest.fixture(scope="module")
def chromium() -> Iterator[webdriver.Chrome]:
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not binary or not driver:
        pytest.fail("Chromium is missing: install the packages chromium and chromium-driver (apt-get install ...).")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--force-prefers-reduced-motion",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield browser
    browser.quit()


class Tab:
    """A report in the browser. What the page says to the console is collected: it should say nothing."""

    def __init__(self, chromium: webdriver.Chrome) -> None:
        self.chromium = chromium

    def open(self, report: Path, width: int = 1200, height: int = 900, scheme: str = "light") -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": [feature]})
        self.chromium.get(report.as_uri())
        self.wait("document.querySelector('main section')")

    def js(self, expression: str) -> Any:
        return self.chromium.execute_script(f"return {expression}")

    def wait(self, expression: str) -> Any:
        return WebDriverWait(self.chromium, 20).until(lambda _: self.js(expression), f"never true: {expression}")

    def all(self, selector: str) -> list[WebElement]:
        return self.chromium.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.chromium.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return str(self.js(f"document.querySelector({json.dumps(selector)}).innerText"))

    def scroll_through(self) -> None:
        for plot in self.all(".plot"):
            self.chromium.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", plot)
            WebDriverWait(self.chromium, 20).until(
                lambda _, plot=plot: plot.find_elements(By.CSS_SELECTOR, "svg.main-svg")
            )

    def choose(self, name: str, value: str) -> None:
        Select(self.one(f"[name={name}]")).select_by_value(value)

    def browse(self) -> None:
        """Go to the rollouts and wait for the first prompt."""
        self.js("document.querySelector('.group').scrollIntoView({behavior: 'instant'})")
        self.wait(
            "document.querySelector('.answer') && !/searching/.test(document.querySelector('.pager output').innerText)"
        )

    def position(self, text: str) -> None:
        self.wait(f"document.querySelector('.pager output').innerText.startsWith({json.dumps(text)})")

    def console(self) -> list[dict[str, Any]]:
        return list(self.chromium.get_log("browser"))


@pytest.fixture
def tab(chromium: webdriver.Chrome) -> Iterator[Tab]:
    opened = Tab(chromium)
    yield opened
    assert opened.console() == []
    assert opened.js("performance.getEntriesByType('resource').length") == 0
    assert opened.js("typeof hacked") == "undefined"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reports")


@pytest.fixture(scope="module")
def two(folder: Path) -> Path:
    return write_report(write_run(folder / "two", TWO, steps=12))


@pytest.fixture(scope="module")
def four(folder: Path) -> Path:
    return write_report(write_run(folder / "four", FOUR, steps=80, prompts=2, generations=2))


@pytest.fixture(scope="module")
def study(folder: Path) -> Path:
    return write_report(write_study(folder / "study", failed="it broke"))


# --- charts ----------------------------------------------------------------------------------------


def figures(agents: int) -> int:
    """Accuracy, reward, capability, cosine, time, lost; for each learner omega, kept, sources; for each pair s."""
    return 6 + 3 * agents + agents * (agents - 1)


@pytest.mark.parametrize(("name", "agents"), [("two", TWO), ("four", FOUR)])
def test_every_chart_of_a_run(tab: Tab, request: pytest.FixtureRequest, name: str, agents: tuple[str, ...]) -> None:
    tab.open(request.getfixturevalue(name))
    assert len(tab.all(".plot")) == figures(len(agents))
    drawn = len(tab.all(".plot svg.main-svg"))
    assert drawn < figures(len(agents)), "charts far below are drawn when somebody comes near"
    tab.scroll_through()
    assert all(plot.find_elements(By.CSS_SELECTOR, "svg .trace, svg .points path") for plot in tab.all(".plot"))
    labels = tab.js("[...document.querySelectorAll('#learning .annotation-text')].map((node) => node.textContent)")
    assert sorted(labels) == sorted([*agents, *agents])
    assert [cell.text for cell in tab.all(".matrix thead th")[1:]] == list(agents)
    shares = [
        [int(cell.text.rstrip("%")) for cell in row.find_elements(By.TAG_NAME, "td")]
        for row in tab.all(".matrix tbody tr")
    ]
    assert all(98 <= sum(row) <= 102 for row in shares)


def test_the_table_has_the_numbers_of_the_summary(tab: Tab, two: Path) -> None:
    tab.open(two)
    agent = json.loads((two.parent / "summary.json").read_text())["agents"]["south"]
    cells = [cell.text for cell in tab.all("#result tbody tr:nth-child(2) > *")]
    assert cells[:3] == ["south", f"{agent['start_accuracy']:.3f}", f"{agent['final_accuracy']:.3f}"]
    assert cells[4:] == ["144", "3,600", "4,242", "24", "13 s", "18 s", "–"]


def test_the_horizontal_axis_can_be_changed(tab: Tab, two: Path) -> None:
    tab.open(two)
    tab.scroll_through()
    titles = []
    for value in ("rollouts", "updates", "seconds", "step"):
        tab.js(f"document.querySelector('#learning input[value={value}]').click()")
        titles.append(tab.js("document.querySelector('#learning .xtitle').textContent"))
    assert titles == ["rollouts sampled, all agents", "updates of the agent", "seconds of training", "step"]


def test_the_numbers_of_a_chart_as_a_table(tab: Tab, two: Path) -> None:
    tab.open(two)
    tab.js("document.querySelector('#learning details.numbers').setAttribute('open', '')")
    tab.wait("document.querySelector('#learning details.numbers tbody')")
    rows = [
        [cell.text for cell in row.find_elements(By.CSS_SELECTOR, "th, td")]
        for row in tab.all("#learning details.numbers tr")
    ]
    assert rows[0] == ["rollouts sampled, all agents", "north", "south"]
    assert rows[1] == ["0", "0.4", "0.45"]
    assert [row[0] for row in rows[1:]] == ["0", "120", "240", "288"]


@pytest.mark.parametrize(
    ("agents", "algorithm", "reason"),
    [
        (("solo",), "hacpo", "This run has one agent: nothing is shared."),
        (TWO, "gspo", "Under gspo others' rollouts have no term"),
    ],
)
def test_empty_places_say_why(tab: Tab, tmp_path: Path, agents: tuple[str, ...], algorithm: str, reason: str) -> None:
    tab.open(write_report(write_run(tmp_path / "run", agents, steps=3, algorithm=algorithm)))
    for place in ("capability", "overlap", "kept", "sources", "agreement"):
        assert reason in tab.text(f"#{place} .empty")
    tab.scroll_through()


def test_a_run_that_has_just_begun(tab: Tab, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1, finished=False)
    (run / "metrics.jsonl").unlink()
    shutil.rmtree(run / "rollouts")
    tab.open(write_report(run))
    assert "No evaluation has been logged" in tab.text("#learning .empty")
    assert "This run has no rollouts yet." in tab.text("#rollouts .empty")
    assert tab.all(".plot") == []


# --- what the algorithm says -----------------------------------------------------------------------


SENTENCES = {name: asdict(algorithm().explain(num_agents=2)) for name, algorithm in ALGORITHMS.items()}


def curves(tab: Tab, section: str) -> list[dict[str, list[float]]]:
    """The named curves of each chart of a section."""
    charts: list[dict[str, list[float]]] = tab.js(
        f"[...document.querySelectorAll('#{section} .plot')].map((plot) => "
        "Object.fromEntries(plot.data.filter((trace) => trace.meta).map((trace) => [trace.meta, trace.y])))"
    )
    return charts


def uses(tab: Tab) -> list[tuple[bool, str, bool]]:
    """Every use in the rollouts of a step: whether it is the source's own, its tooltip, whether a band is drawn."""
    found = []
    count = int(tab.text(".pager output").split()[3])
    for n in range(1, count + 1):
        tab.position(f"Prompt {n} of {count}")
        found += tab.js(
            """[...document.querySelectorAll('.uses li[title]')].map((row) => [
              row.title.startsWith(row.closest('.column').querySelector('.agent').textContent + ':'),
              row.title, row.querySelector('.gauge .band') !== null])"""
        )
        tab.js("document.querySelector('.pager button:last-of-type').click()")
    return [tuple(use) for use in found]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_report_says_what_the_algorithm_says(tab: Tab, make_config: MakeConfig, name: str) -> None:
    config = make_config(algorithm={"name": name}, prompts_per_step=12, task={"name": "arithmetic", "eval_size": 8})
    tab.open(write_report(train(config, console=Console(file=io.StringIO())).run_dir))
    tab.scroll_through()
    tab.browse()
    told, shares = config.algorithm.explain(num_agents=2), config.algorithm.shares_rollouts
    shown, rollouts = tab.text("main"), tab.text("#rollouts")
    own = {sentence for sentence in asdict(told).values() if sentence}
    assert [sentence for sentence in own if sentence not in shown] == []
    anybodys = {sentence for each in SENTENCES.values() for sentence in each.values() if sentence}
    assert [sentence for sentence in anybodys - own if sentence in shown] == []
    assert "nothing is shared" not in shown  # rft imitates others' answers, and in opd others score
    assert ("ω" in shown) == (told.omega is not None)
    assert bool(re.search(r"\bband\b|\bclip", shown.replace(rollouts, ""))) == (told.band is not None)

    assert len(curves(tab, "capability")) == (3 if told.omega else 1)
    assert len(curves(tab, "overlap")) == len(curves(tab, "sources")) == (2 if shares else 0)
    assert all(("band, lower" in chart) == (told.band is not None) for chart in curves(tab, "overlap"))
    signs = ["right", "wrong"] if told.band else ["wrong"]
    assert [list(chart) for chart in curves(tab, "kept")] == ([signs] * 2 if told.leaves_out else [])
    assert (tab.all("#kept") == []) == (shares and told.leaves_out is None)
    for section in ("capability", "overlap", "kept", "sources"):
        for chart in curves(tab, section):
            assert any(len(set(values)) > 1 for values in chart.values()), f"{section} is flat: {chart}"
    found = uses(tab)
    assert {by_source for by_source, _, _ in found} == ({True, False} if shares else {True})
    for by_source, tooltip, has_band in found:
        expected = "band" in (told.own_weight or "") if by_source else told.band is not None
        assert has_band == ("band" in tooltip) == expected


def test_sources_of_which_nothing_is_used_are_not_drawn(tab: Tab, make_config: MakeConfig) -> None:
    algorithm = {"name": "hacpo", "cross_weight": 0}
    config = make_config(algorithm=algorithm, task={"name": "arithmetic", "eval_size": 2})
    tab.open(write_report(train(config, console=Console(file=io.StringIO())).run_dir))
    tab.scroll_through()
    assert curves(tab, "sources") == []
    assert [place.text for place in tab.all("#sources .empty")] == [
        f"{agent.id} used no rollout of others." for agent in config.agents
    ]


def test_sources_that_are_no_agents_have_a_table(tab: Tab, make_config: MakeConfig, tmp_path: Path) -> None:
    """What each gave and what that cost, as the metrics of the run say."""
    teacher = Teacher(lambda fields: right(fields) if fields["seed"] % 3 else Response(b"", 418))
    endpoint = {"url": teacher.url, "model": "big"}
    rows = [{"prompt": problem.prompt, "completion": "#1"} for problem in ArithmeticTask(0).train(0, 2)]
    (tmp_path / "past.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sources = [
        {"id": "past", "rollouts": str(tmp_path / "past.jsonl")},
        {"id": "teacher", "endpoint": endpoint, "budget": {"requests": 15}, "max_requests": 1},
    ]
    settings = {"algorithm": {"name": "hacpo_robust"}, "task": {"name": "arithmetic", "eval_size": 2}}
    try:
        run = train(make_config("llama-plus", sources=sources, **settings), console=Console(file=io.StringIO())).run_dir
    finally:
        teacher.close()
    tab.open(write_report(run))
    tab.scroll_through()
    used = json.loads((run / "summary.json").read_text())["sources"]["teacher"]
    head, *rows_shown = tab.js(
        """[...document.querySelectorAll('table')]
          .find((each) => each.caption?.textContent === 'Sources that are no agents')
          .querySelectorAll('tr').values()
          .map((row) => [...row.cells].map((cell) => cell.textContent)).toArray()"""
    )
    shown = [dict(zip(head, cells, strict=True)) for cells in rows_shown]
    assert [row["source"] for row in shown] == ["past", "teacher"]
    assert (shown[0]["rollouts"], shown[0]["without log-probs"], shown[0]["requests"]) == ("2", "2", "–")
    assert shown[0]["with an answer in store"] == "25%"
    assert (shown[1]["rollouts"], shown[1]["failed"]) == (str(used["rollouts"]), str(used["failed"]))
    assert 0 < used["failed"] < used["rollouts"]
    assert (shown[1]["requests"], shown[1]["not sent"]) == ("13", "3")
    assert [len(chart) for chart in curves(tab, "sources")] == [3]


def test_a_ratio_that_is_always_1_is_not_drawn(tab: Tab, make_config: MakeConfig) -> None:
    """A learner that makes one update a step has not changed when it compares a rollout with its own earlier view."""
    algorithm = {"name": "naive", "ratio": "own"}
    config = make_config(algorithm=algorithm, rollouts_per_update=100, task={"name": "arithmetic", "eval_size": 2})
    tab.open(write_report(train(config, console=Console(file=io.StringIO())).run_dir))
    tab.scroll_through()
    assert [place.text for place in tab.all("#overlap .empty")] == ["s was 1 for every rollout."] * 2
    assert [place.text for place in tab.all("#kept .empty")] == ["All of them were kept."] * 2
    assert tab.text("#overlap .lead").startswith(str(config.algorithm.explain(num_agents=2).ratio))


def test_one_agent_is_told_nothing_about_others(tab: Tab, tmp_path: Path) -> None:
    tab.open(write_report(write_run(tmp_path / "run", ("solo",), steps=3)))
    told = HACPO().explain(num_agents=1)
    shown = tab.text("main")
    assert told.own_weight is not None
    assert told.own_weight in shown
    assert not any(sentence in shown for sentence in (told.weight, told.band, told.omega) if sentence)


def test_an_algorithm_that_this_version_does_not_know(tab: Tab, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=3)
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("name: hacpo", "name: hacpo9"))
    tab.open(write_report(run))
    tab.scroll_through()
    tab.browse()
    assert not re.search(r"\bband\b|ω", tab.text("main"))  # nobody says what they are
    assert len(curves(tab, "overlap")) == 2


def test_hacpo_with_more_than_two_agents_is_marked_as_our_decision(
    tab: Tab, two: Path, four: Path, tmp_path: Path
) -> None:
    tab.open(two)
    assert tab.all(".decision") == []
    tab.open(four)
    decision = HACPO().explain(num_agents=4).decision
    assert tab.text("#result .decision") == decision
    folder = write_study(tmp_path / "study", teams=("main",), seeds=2, steps=2)
    tab.open(write_report(folder))
    assert tab.all(".decision") == []
    for seed in range(2):
        write_run(folder / f"runs/main/hacpo/seed-{seed}", FOUR, steps=2, seed=seed)
    tab.open(write_report(folder))
    assert [place.text for place in tab.all("#result .decision")] == [decision]


# --- rollouts --------------------------------------------------------------------------------------


def test_one_step_is_a_dot(tab: Tab, tmp_path: Path) -> None:
    tab.open(write_report(write_run(tmp_path, steps=1)))
    tab.scroll_through()
    for plot in tab.all(".plot"):
        drawn = plot.find_elements(By.CSS_SELECTOR, ".trace .point")
        assert drawn, plot.get_attribute("aria-label")


def test_two_agents_fit_into_the_matrix(tab: Tab, tmp_path: Path) -> None:
    tab.open(write_report(write_run(tmp_path, agents=("llama-plus", "llama-minus"))), width=1100)
    table = "document.querySelector('.matrix')"
    assert tab.js(f"{table}.parentElement.scrollWidth <= {table}.parentElement.clientWidth")


def test_rollouts_side_by_side_with_what_learners_made_of_them(tab: Tab, two: Path) -> None:
    tab.open(two)
    tab.browse()
    tab.position("Prompt 1 of 4 · step 12, prompt 0")
    lines = [json.loads(line) for line in (two.parent / "rollouts" / "step-000012.jsonl").read_text().splitlines()]
    group = [line for line in lines if line["prompt_id"] == lines[0]["prompt_id"]]
    assert tab.text(".prompt .said") == lines[0]["prompt"]
    assert [text.text for text in tab.all(".answer .said")] == [line["text"] for line in group]
    columns = tab.all(".column")
    assert columns[0].rect["x"] < columns[1].rect["x"]
    assert columns[0].rect["y"] == columns[1].rect["y"]
    first, other = group[0], group[0]["learners"]["south"]
    shown = tab.text(".answer")
    assert "24 tokens" in shown
    assert f"log-prob −{-first['logp_sum'] / 24:.3f} / token" in shown
    use = [span.text for span in tab.all(".answer .uses")[0].find_elements(By.CSS_SELECTOR, "li:nth-child(2) > span")]
    advantage = "A +0.80" if other["advantage"] > 0 else "A −0.90"
    assert use == ["south", f"s {other['ratio']:.3f}", advantage, "kept" if other["kept"] else "left out"]


def test_filters(tab: Tab, two: Path) -> None:
    tab.open(two)
    tab.browse()
    rollouts = {
        step: [
            json.loads(line) for line in (two.parent / "rollouts" / f"step-{step:06d}.jsonl").read_text().splitlines()
        ]
        for step in range(1, 13)
    }
    tab.choose("step", "all")
    tab.position("Prompt 1 of 48")
    tab.choose("reward", "unverified")
    tab.position("Prompt 1 of 1 · step 2, prompt 0")
    assert "timeout: no answer within 10 s" in tab.text(".remark")
    assert len(tab.all(".answer:not(.other)")) == 2
    tab.choose("agent", "south")
    wrong = {
        (line["step"], line["prompt"])
        for lines in rollouts.values()
        for line in lines
        if line["source"] == "south" and line["reward"] == 0
    }
    tab.choose("reward", "wrong")
    tab.position(f"Prompt 1 of {len(wrong)} ")
    assert len(tab.all(".column")) == 1
    tab.choose("reward", "range")
    tab.one("[name=low]").clear()
    tab.one("[name=low]").send_keys("0.5")
    right = {
        (line["step"], line["prompt"])
        for lines in rollouts.values()
        for line in lines
        if line["source"] == "south" and line["reward"] == 1
    }
    tab.position(f"Prompt 1 of {len(right)} ")
    tab.choose("reward", "any")
    wanted = rollouts[7][0]["prompt"]
    tab.one("[name=search]").send_keys(wanted)
    tab.position("Prompt 1 of 1 · step 7, prompt 0")
    assert tab.text(".prompt mark") == wanted
    tab.one("[name=search]").send_keys("nowhere")
    tab.wait("document.querySelector('.group .empty')")
    assert tab.text(".group") == "Nothing fits these filters."


def test_arrow_keys_go_from_prompt_to_prompt(tab: Tab, two: Path) -> None:
    tab.open(two)
    tab.browse()
    body = tab.one("body")
    body.send_keys(Keys.ARROW_RIGHT)
    tab.position("Prompt 2 of 4")
    body.send_keys(Keys.ARROW_RIGHT)
    tab.position("Prompt 3 of 4")
    body.send_keys(Keys.ARROW_LEFT)
    tab.position("Prompt 2 of 4")
    tab.one("[name=search]").send_keys(Keys.ARROW_RIGHT)
    tab.position("Prompt 2 of 4")


def test_hostile_text_stays_text(tab: Tab, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1, prompts=1, generations=1)
    lines = [
        {**line, "prompt": HOSTILE, "text": HOSTILE, "detail": HOSTILE, "problem": HOSTILE}
        for line in rollout_lines(TWO, 1, 1, 1, True, np.random.default_rng(0))
    ]
    lines[1] |= {"text": "x" * 10_000_000}
    write_lines(run / "rollouts" / "step-000001.jsonl", lines)
    tab.open(write_report(run))
    tab.browse()
    assert tab.text(".prompt .said") == SHOWN
    assert tab.text(".answer .said") == SHOWN
    assert SHOWN in tab.text(".answer .remark")
    assert "9,980,000 more characters, left out of this file" in tab.text(".column:nth-child(2) .remark")
    tab.one("[name=search]").send_keys("onerror")
    tab.wait("document.querySelectorAll('.answer mark').length")
    assert tab.js("document.querySelectorAll('img, main script').length") == 0


def test_hostile_names_stay_text(tab: Tab, tmp_path: Path) -> None:
    name = '<img src=x onerror="hacked=1"><a href="javascript:hacked=1">%{x}\u202e'
    folder = write_study(tmp_path / "study", teams=("main",), seeds=2, steps=3, failed=HOSTILE)
    data = json.loads(
        (folder / "study.json").read_text().replace('"hacpo"', json.dumps(name)).replace('"north"', json.dumps(name))
    )
    (folder / "study.json").write_text(json.dumps({**data, "title": HOSTILE}))
    for config in folder.glob("runs/*/*/*/config.yaml"):
        config.write_text(config.read_text().replace("id: north", f"id: {json.dumps(name)}"))
        lines = [json.loads(line) for line in (config.parent / "metrics.jsonl").read_text().splitlines()]
        renamed = [{key.replace("north", name): value for key, value in line.items()} for line in lines]
        write_lines(config.parent / "metrics.jsonl", renamed)
    tab.open(write_report(folder))
    tab.scroll_through()
    assert tab.text("h1") == SHOWN
    assert SHOWN in tab.text(".failure")
    assert tab.js("document.querySelectorAll('img, main script, main a').length") == 0
    assert name.replace("\u202e", "\\u202e") in tab.text("#result table")


# --- studies ---------------------------------------------------------------------------------------


def test_a_study(tab: Tab, study: Path) -> None:
    tab.open(study)
    assert tab.text("h1") == "Alone or together"
    assert "18 of 19 runs done" in tab.text(".facts")
    assert "it broke" in tab.text(".failure")
    rows = [
        [cell.text for cell in row.find_elements(By.CSS_SELECTOR, "th, td")]
        for row in tab.all("#result .scroll:has(.grouped) tbody tr")
    ]
    data = json.loads((study.parent / "study.json").read_text())
    north = next(row for row in data["agents"] if row["variant"] == "hacpo" and row["agent"] == "north")
    (shown,) = [row for row in rows[:3] if row[1] == "hacpo"]
    assert shown[3].replace(" ", "") == f"{north['mean']:.3f}{north['low']:.3f}to{north['high']:.3f}"
    assert shown[4].startswith("+6.4")
    assert "+2.9 to +9.4" in shown[4]
    assert shown[5:8] == ["0.500", "2.20", "3 : 0"]
    assert len(rows) == 2 * (3 + 3 + 2)
    tab.scroll_through()
    assert len(tab.all("#differences .errorbar")) == 12
    assert len(tab.all("#learning .plot")) == 4
    assert "480" in tab.text("#cost table")
    assert "GPU time" in tab.text("#cost table")


def test_the_run_in_detail_is_chosen(tab: Tab, study: Path) -> None:
    tab.open(study)
    assert tab.text("h3.chosen") == "state · hacpo · seed 0"
    before = len(tab.all("#chosen .plot"))
    tab.choose("variant", "gspo_x2")
    tab.choose("seed", "2")
    assert tab.text("h3.chosen") == "state · gspo_x2 · seed 2"
    assert 0 < len(tab.all("#chosen .plot")) < before
    assert "Under gspo others' rollouts have no term" in tab.text("#one-overlap .empty")
    tab.scroll_through()
    tab.browse()
    line = json.loads(
        (study.parent / "runs/state/gspo_x2/seed-2/rollouts/step-000010.jsonl").read_text().splitlines()[0]
    )
    assert tab.text(".answer .said") == line["text"]


def test_few_seeds_are_said_plainly(tab: Tab, tmp_path: Path) -> None:
    tab.open(write_report(write_study(tmp_path / "study", teams=("main",), seeds=2, steps=2)))
    assert "This study has 2 seeds: too few" in tab.text("#result .empty")
    assert "two seeds only" in tab.text("#result table")


# --- screens and paper -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["two", "four", "study"])
def test_a_phone_does_not_scroll_sideways(tab: Tab, request: pytest.FixtureRequest, name: str) -> None:
    tab.open(request.getfixturevalue(name), width=390, height=844)
    tab.scroll_through()
    tab.browse()
    assert tab.js("document.documentElement.scrollWidth") <= 390
    columns = tab.all(".column")
    assert columns[0].rect["x"] == columns[1].rect["x"]


def test_a_phone_shows_the_whole_table_of_two_agents(tab: Tab, two: Path) -> None:
    tab.open(two, width=390, height=844)
    table = "document.querySelector('#result .scroll')"
    assert tab.js(f"{table}.scrollWidth") <= tab.js(f"{table}.clientWidth")
    assert [cell.text for cell in tab.all("#result tbody tr:nth-child(2) > *")][4:8] == ["144", "3,600", "4,242", "24"]


def brightness(tab: Tab, selector: str, style: str) -> float:
    colour = tab.js(f"getComputedStyle(document.querySelector({json.dumps(selector)})).{style}")
    red, green, blue = (int(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3])
    return (red + green + blue) / 765


def test_dark_and_light(tab: Tab, two: Path) -> None:
    tab.open(two, scheme="dark")
    tab.scroll_through()
    assert brightness(tab, "body", "backgroundColor") < 0.2
    assert brightness(tab, "#learning .xtick text", "fill") > 0.5
    tab.one("#theme").click()
    assert brightness(tab, "body", "backgroundColor") > 0.8
    tab.wait("document.querySelector('#learning .xtick text')")
    assert brightness(tab, "#learning .xtick text", "fill") < 0.5


def test_printing_draws_all_charts_in_light_colours(tab: Tab, four: Path) -> None:
    tab.open(four, scheme="dark")
    assert len(tab.all(".plot svg.main-svg")) < figures(4)
    tab.chromium.execute_script(
        """window.seen = null;
        addEventListener("beforeprint", () => {
          const charts = [...document.querySelectorAll(".plot svg.main-svg")];
          seen = [new Set(charts.map((chart) => chart.closest(".plot"))).size, document.documentElement.dataset.theme,
            Math.max(...charts.map((chart) => chart.clientWidth))];
        });"""
    )
    printed = tab.chromium.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert base64.b64decode(printed["data"]).startswith(b"%PDF")
    drawn, theme, widest = tab.js("seen")
    assert (drawn, theme) == (figures(4), "light")
    assert widest < 700
    assert tab.js("document.documentElement.dataset.theme") == "dark"
