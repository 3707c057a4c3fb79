"""The web book: built without a network, and read in a real browser without one.

`python3 course.py book` makes `.venv-book`; without it most of these tests are skipped. Set GRPO_EDU_SCREENSHOTS to a
folder to look at what the browser saw.
"""

import html
import json
import math
import os
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import torch
from jupyter_lab import shoot
from keyboard import axe_problems, keyboard_problems

from benchmarks.views import VIEWS, served
from course import CORE_PATH
from grpo_edu.advantages import group_advantages, tie_probability
from grpo_edu.config import LOSS_TYPES
from grpo_edu.losses import per_token_kl, per_token_policy_loss

REPOSITORY = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted(path.stem for path in (REPOSITORY / "notebooks").glob("*.ipynb"))
PHONE, LAPTOP = {"width": 390, "height": 844}, {"width": 1366, "height": 768}
FACTS = re.compile(r"^Study time ≈ .*$", re.MULTILINE)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory, jupyter_book):
    """The folder of the book, built with links to a repository that does not exist."""
    folder = tmp_path_factory.mktemp("book") / "site"
    command = [jupyter_book, "book/build.py", f"--output={folder}", "--repository=https://github.com/an-owner/a-course"]
    built = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stdout + built.stderr
    return folder


class Page(HTMLParser):
    """The links, pictures, ids and page-to-page links of a page."""

    def __init__(self, path):
        super().__init__()
        self.links, self.images, self.ids, self.steps = [], [], set(), {}
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "link" and found.get("rel") in ("prev", "next"):
            self.steps[found["rel"]] = found["href"]
        if tag in ("a", "link") and found.get("href"):
            self.links.append(found["href"])
        if tag in ("img", "script") and found.get("src"):
            self.links.append(found["src"])
        if tag == "img":
            self.images.append(found)


@pytest.fixture(scope="module")
def pages(site):
    """The pages of the book by their place in it."""
    found = {path.relative_to(site).as_posix(): Page(path) for path in site.rglob("*.html")}
    return {name: page for name, page in found.items() if not name.startswith(("_", "index", "genindex"))}


def stored(name):
    return json.loads((REPOSITORY / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))


def test_no_link_is_dead(site, pages):
    dead = []
    for name, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme in ("https", "data", "mailto"):
                continue
            there = (site / name).parent / unquote(parts.path) if parts.path else site / name
            named = pages.get(os.path.relpath(there, site))
            anchor = unquote(parts.fragment)
            if parts.scheme or not there.exists() or (anchor and named and anchor not in named.ids):
                dead.append(f"{name}: {link}")
    assert not dead, dead


def test_nothing_is_fetched_from_elsewhere(site, pages):
    """Scripts, styles, fonts and pictures are in the book."""
    for name, page in pages.items():
        assert not re.findall(r"<(?:script|img|iframe)[^>]* src=[\"']?https?:", page.text), name
        assert not re.findall(r"<link[^>]*rel=\"?stylesheet[^>]*https?:[^>]*>", page.text), name
    for path in (site / "_static").rglob("*.css"):
        assert not re.findall(r"url\([\"']?https?:", path.read_text(encoding="utf-8")), path


def test_previous_and_next_follow_the_order_of_the_course(pages):
    order, name = [], "README.html"
    while name:
        order.append(name)
        following = pages[name].steps.get("next")
        name = following and os.path.normpath(os.path.join(os.path.dirname(name), following))
    notebooks = [Path(name).stem for name in order if name.startswith("notebooks/")]
    assert sorted(notebooks) == NOTEBOOKS
    assert tuple(name[:2] for name in notebooks)[: len(CORE_PATH) + 1] == (*CORE_PATH, "09")
    for name in NOTEBOOKS:
        if (REPOSITORY / "exercises" / f"{name}.ipynb").exists():
            place = order.index(f"notebooks/{name}.html")
            assert order[place + 1] == f"exercises/{name}.html"
    documents = {path.stem for path in (REPOSITORY / "docs").glob("*.md")}
    assert documents == {Path(name).stem for name in order if re.fullmatch(r"docs/[^/]+", name)}
    assert sorted(order) == sorted(set(pages) - {"search.html"})


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_page_shows_study_time_and_difficulty_and_offers_the_notebook(site, pages, name):
    text = pages[f"notebooks/{name}.html"].text
    facts = FACTS.search("".join(stored(name)["cells"][0]["source"]))
    shown = re.search(r'<p class="course-facts">(.*?)</p>', text)
    assert bool(facts) == bool(shown)
    if facts:
        labels = [html.unescape(label) for label in re.findall(r"<span>(.*?)</span>", shown.group(1))]
        assert labels == [fact.strip() for fact in facts.group().split("·")]
    for place in ("mybinder.org", "colab.research.google.com"):
        assert re.search(rf'href="https://{place}[^"]*a-course[^"]*{name}', text), place
    assert (site / "_sources" / "notebooks" / f"{name}.ipynb").read_bytes() == (
        REPOSITORY / "notebooks" / f"{name}.ipynb"
    ).read_bytes(), "the download is the notebook itself"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_no_output_is_empty_where_a_widget_stood(pages, name):
    """Each dashboard shows a picture or runs in JavaScript, each bar is at its end, and each picture has its words."""
    page = pages[f"notebooks/{name}.html"]
    assert "widget-view" not in page.text and "0%|" not in page.text
    assert all(len((image.get("alt") or "").split()) >= 3 for image in page.images if image["src"].startswith("data:"))
    outputs = [output for cell in stored(name)["cells"] for output in cell.get("outputs", [])]
    shown = ["".join(output.get("data", {}).get("text/html", "")) for output in outputs]
    pictures = [one for one in shown if "<img" in one]
    assert len([image for image in page.images if image["src"].startswith("data:")]) >= len(pictures)


# ---- in a browser: every run reads two pages, `course.py test --all` the others ----


@pytest.fixture(scope="module")
def address(browser, site):  # in this order: without a browser nothing is served
    with served(site) as address:
        yield address


@pytest.fixture
def open_page(browser, address):
    """Opens a page of the book at a width; no request may leave this computer, and no script may fail."""
    contexts, outside, errors = [], [], []

    def open_(name, viewport=LAPTOP, scheme="light"):
        contexts.append(browser.new_context(viewport=viewport, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.on("request", lambda request: request.url.startswith((address, "data:")) or outside.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{address}/{name}", wait_until="load")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert outside == [] and errors == []


@pytest.mark.browser
@pytest.mark.long
def test_no_page_is_wider_than_a_phone(open_page, address, pages):
    page, wide = open_page("README.html", PHONE), []
    for name in sorted(pages):
        page.goto(f"{address}/{name}", wait_until="load")
        page.wait_for_function("!window.MathJax?.startup?.promise || MathJax.startup.promise.then(() => true)")
        if page.evaluate("document.documentElement.scrollWidth") > PHONE["width"]:
            wide.append(name)
        shoot(page, "book_phone_" + name.replace("/", "_"))
    assert not wide, wide


@pytest.mark.browser
@pytest.mark.long
@pytest.mark.parametrize(("viewport", "scheme"), [(PHONE, "dark"), ({"width": 1280, "height": 720}, "light")])
def test_axe_finds_nothing_in_the_pages(open_page, pages, viewport, scheme):
    """Neither in the course's own parts of a page nor in those of Jupyter Book; MathJax has its own tests."""
    found = []
    for name in sorted(pages):
        page = open_page(name, viewport, scheme)
        page.wait_for_function("!window.MathJax?.startup?.promise || MathJax.startup.promise.then(() => true)")
        page.evaluate("document.querySelectorAll('.bd-article details').forEach(one => { one.open = true; })")
        page.evaluate("dispatchEvent(new Event('resize'))")  # what scrolls now is reached by keyboard
        page.evaluate("Promise.all(document.getAnimations().map(one => one.finished))")  # what opens fades in
        found += [(name, *problem) for problem in axe_problems(page, {"exclude": [["mjx-container"]]})]
        page.context.close()
    assert found == []


@pytest.mark.browser
def test_code_fits_a_laptop_and_stored_html_has_the_ground_of_the_page(open_page, address):
    page, wide = open_page("README.html", {"width": 1280, "height": 720}, "dark"), []
    for name in ("README", "notebooks/02_reward_functions", "notebooks/16_several_turns"):
        page.goto(f"{address}/{name}.html", wait_until="load")
        page.evaluate("document.querySelectorAll('.bd-article details').forEach(one => { one.open = true; })")
        texts = "all => all.filter(one => one.scrollWidth > one.clientWidth + 1).map(one => one.textContent)"
        wide += [(name, text) for text in page.locator(".bd-article pre").evaluate_all(texts)]
    assert not wide, wide
    board = page.locator(".output:has(> .grpo-edu-words)").first
    assert board.evaluate("e => getComputedStyle(e).backgroundColor") == "rgba(0, 0, 0, 0)"
    color = "e => getComputedStyle(e).color"
    assert board.evaluate(color) == page.locator("body").evaluate(color)
    board.scroll_into_view_if_needed()
    shoot(page, "book_word_game_dark")


@pytest.mark.browser
@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_mathematics_is_typeset_in_light_and_dark(open_page, scheme):
    page = open_page("notebooks/05_grpo_objective.html", scheme=scheme)
    page.wait_for_function("MathJax.startup.promise.then(() => true)")
    formulas = page.locator("mjx-container")
    assert formulas.count() > 20 and page.locator("mjx-merror, [data-mjx-error]").count() == 0
    assert page.evaluate("document.fonts.ready.then(fonts => [...fonts].some(font => /MJXTEX/.test(font.family)))")
    assert page.locator("html").get_attribute("data-theme") == scheme
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]")
    assert (ground > 200) == (scheme == "light")
    shoot(page, f"book_math_{scheme}")


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, pytest.param(768, marks=pytest.mark.long), 1280])
def test_the_menu_and_the_contents_open(open_page, width):
    page = open_page("notebooks/05_grpo_objective.html", {"width": width, "height": 800})
    for button, menu in ((".primary-toggle", ".bd-sidebar-primary"), (".secondary-toggle", ".bd-sidebar-secondary")):
        shown = page.locator(f"{button}:visible")
        if shown.count() == 0:  # there is room for the menu next to the page
            assert page.locator(f"{menu}:visible").count() == 1
            continue
        before = page.locator(f"{menu} a:visible").count()
        shown.first.click()
        page.wait_for_timeout(400)
        assert page.locator(f"{menu} a:visible").count() != before or page.locator("dialog[open]").count() == 1, button
        page.keyboard.press("Escape")
        page.wait_for_timeout(400)


@pytest.mark.browser
@pytest.mark.long
def test_the_search_finds_a_page(open_page):
    page = open_page("search.html?q=clipping")
    page.wait_for_selector("#search-results li a")
    found = page.locator("#search-results li a").evaluate_all("links => links.map(link => link.href)")
    assert any("05_grpo_objective" in link for link in found), found


@pytest.mark.browser
def test_the_mathematics_of_the_live_figures_agrees_with_the_package(open_page):
    page = open_page("docs/dashboards.html")
    draws = torch.Generator().manual_seed(0)
    for scaling in ("group", "none", "mean", "batch"):
        for size in (2, 3, 8, 16):
            rewards = (2 * torch.rand(size, generator=draws, dtype=torch.float64)).tolist()
            for group in (rewards, [1.69] * size, [1.0] + [0.0] * (size - 1)):
                found = page.evaluate("([r, s]) => courseExplorers.groupAdvantages(r, s)", [group, scaling])
                expected = group_advantages(torch.tensor(group, dtype=torch.float64), size, scale_rewards=scaling)
                assert found == pytest.approx(expected.tolist(), abs=1e-9), (scaling, group)
    for p in (0.0, 0.25, 0.9, 1.0):
        assert page.evaluate("p => courseExplorers.tieProbability(p, 8)", p) == pytest.approx(tie_probability(p, 8))
    for loss in LOSS_TYPES:
        for _ in range(25):
            ratio, advantage, low, high, beta, reference = torch.rand(6, generator=draws, dtype=torch.float64).tolist()
            asked = {"ratio": 0.05 + 1.9 * ratio, "advantage": 4 * advantage - 2, "low": 0.9 * low, "high": 1.5 * high}
            asked |= {"beta": beta, "reference": 0.05 + 2.9 * reference, "loss": loss}
            found = page.evaluate("asked => courseExplorers.tokenObjective(asked)", asked)
            assert found == pytest.approx(token_objective(**asked), abs=1e-9), asked


def token_objective(*, ratio, advantage, low, high, beta, reference, loss):
    """What the package computes for one token."""
    logps = torch.tensor([[ratio]], dtype=torch.float64).log().requires_grad_()
    k1 = math.log(reference)
    k3 = per_token_kl(logps, (logps - k1).detach())
    advantages = torch.tensor([advantage], dtype=torch.float64)
    options = {"epsilon": low, "epsilon_high": high, "loss_type": loss}
    total = (per_token_policy_loss(logps, logps.exp(), advantages, **options) + beta * k3).sum()
    (gradient,) = torch.autograd.grad(total, logps)
    return {"objective": -total.item(), "push": -gradient.item(), "k1": k1, "k2": k1**2 / 2, "k3": k3.item()}


@pytest.mark.browser
def test_the_live_figures_answer_to_their_controls(open_page):
    page = open_page("notebooks/04_group_advantages.html")
    box = page.locator("[data-explorer=advantages]")
    box.scroll_into_view_if_needed()
    said = box.locator("[role=status]")
    assert "0.100" in said.inner_text() and box.locator("svg").count() == 3
    pictures = box.get_by_role("img").evaluate_all("all => all.map(one => one.ariaLabel)")
    assert pictures[0] == "Rewards: 1, 1, 0, 0, 0, 0, 0, 0" and pictures[2] == "How often a group ties: 0.1 at 0.25"
    chance = box.get_by_label("success rate p")
    chance.focus()
    before = said.inner_text()
    page.keyboard.press("ArrowRight")
    assert said.inner_text() != before
    for button in box.get_by_role("button").all():
        if button.get_attribute("aria-pressed") == "true":
            button.click()
    assert "no gradient" in said.inner_text()
    shoot(page, "book_advantages")
    page = open_page("notebooks/05_grpo_objective.html", PHONE, "dark")
    box = page.locator("[data-explorer=objective]")
    box.scroll_into_view_if_needed()
    box.get_by_label("ratio").fill("1.5")
    assert "not pushed" in box.locator("[role=status]").inner_text()
    shoot(page, "book_objective_phone_dark")


@pytest.mark.browser
@pytest.mark.parametrize(
    ("page", "viewport", "scheme"),
    [("README", LAPTOP, "light"), pytest.param("notebooks/04_group_advantages", PHONE, "dark", marks=pytest.mark.long)],
)
def test_a_policy_learns_in_the_page_and_hacks_its_reward(open_page, page, viewport, scheme):
    opened = open_page(f"{page}.html", viewport, scheme)
    box = opened.locator("[data-playground]")
    assert box.count() == 1
    if page != "README":  # in a notebook it is folded
        opened.get_by_text("Try it without Python").press("Enter")
    box.get_by_label("task", exact=True).select_option("up to three tokens")
    box.get_by_label("reward", exact=True).select_option(index=1)
    said, start = box.locator("[role=status]"), box.locator("svg path").first.get_attribute("d")
    box.get_by_role("button", name="One step").click()
    assert re.match(r"Reward [\d.]+, right .* 1 step", box.get_by_role("img").get_attribute("aria-label"))
    assert "After 1 step " in said.inner_text() and box.locator("tbody").first.locator("tr").count() == 8
    box.get_by_role("button", name="Play").click()
    chances = box.get_by_role("region", name="What the policy says")
    chances.focus()
    steps = "Number(/\\d+/.exec(document.querySelector('[data-playground] svg .title').textContent)[0])"
    opened.wait_for_function(f"{steps} >= 40", timeout=120_000)
    assert chances.evaluate("e => e === document.activeElement"), "a table that is scrolled by keyboard keeps the focus"
    box.get_by_role("button", name="Pause").click()
    assert "not what we wanted" in said.inner_text()
    assert opened.get_by_role("heading", name="A policy that learns in this page").count() == 1
    assert box.locator("svg path").first.get_attribute("d") != start
    box.scroll_into_view_if_needed()
    shoot(opened, f"book_playground_{scheme}")
    box.get_by_role("button", name="Start over").click()
    assert box.locator("svg path").first.get_attribute("d") == start


@pytest.mark.browser
@pytest.mark.long
def test_the_dashboards_on_stored_numbers_answer_to_their_controls(open_page):
    def opened(name, kind, scheme="light"):
        box = open_page(f"notebooks/{name}.html", scheme=scheme).locator(
            f"[data-recorded={kind}], [data-explorer={kind}]"
        )
        assert box.count() == 1 and "undefined" not in box.inner_text()
        box.scroll_into_view_if_needed()
        return box, box.locator("[role=status]")

    box, said = opened("02_reward_functions", "rewards")
    assert "27 ways to cheat, 0 pay" in said.inner_text()
    box.get_by_label("weight of accuracy").fill("0")
    box.get_by_label("weight of format").fill("1")
    assert "27 ways to cheat, 0 pay" not in said.inner_text()
    box, said = opened("09_quantization", "quantization")
    before = float(re.search(r"error ([\d.]+)%", said.inner_text())[1])
    box.get_by_label("bits").fill("3")
    assert float(re.search(r"error ([\d.]+)%", said.inner_text())[1]) > 10 * before
    box, said = opened("10_ewc_progressive_training", "forgetting", "dark")
    box.get_by_label("protection and its strength").select_option("replay 0.2")
    assert "replay 0.2" in said.inner_text()
    box, said = opened("06_losses", "objective")
    box, said = opened("07_grpo_run", "run")
    box.get_by_label("step").fill("10")
    assert "Step 10 of 30" in said.inner_text() and "20 held-out problems" in said.inner_text()
    assert re.match("Reward: mean reward 0", box.get_by_role("img").first.get_attribute("aria-label"))
    box.get_by_role("button", name="Play").click()
    box.page.wait_for_function(
        "document.querySelector('[data-recorded=run] [role=status]').innerText.includes('Step 30')"
    )
    drawn = box.locator("svg").first
    drawn.hover()
    assert "mean reward" in drawn.locator(".value").inner_html()
    shoot(box.page, "book_recorded_run")


@pytest.mark.browser
@pytest.mark.long
def test_what_scrolls_and_what_folds_has_a_name_and_the_keyboard(open_page):
    page = open_page("notebooks/05_grpo_objective.html", PHONE)
    names = page.locator(".bd-sidebar-primary summary").evaluate_all("all => all.map(one => one.ariaLabel)")
    assert len(names) > 10 and all(names)
    page.wait_for_function("MathJax.startup.promise.then(() => true)")
    page.evaluate("dispatchEvent(new Event('resize'))")
    scrolling = page.locator(".bd-article table, .bd-article .output").evaluate_all(
        "all => all.filter(one => one.scrollWidth > one.clientWidth + 1).map(one => one.tabIndex)"
    )
    assert scrolling and set(scrolling) == {0}


@pytest.mark.browser
@pytest.mark.long
def test_a_search_shows_words_and_the_console_no_complaint(browser, address):
    page, said = browser.new_page(), []
    page.on("console", lambda message: said.append(message.text))
    page.goto(f"{address}/search.html?q=ratio")
    page.locator("#search-results li p.context").nth(5).wait_for(timeout=60_000)
    texts = page.locator("#search-results p.context").all_inner_texts()
    page.close()
    assert not [text for text in texts if "\\(" in text or "\\frac" in text]
    assert not [text for text in said if "theme mode" in text]


@pytest.mark.browser
@pytest.mark.long
@pytest.mark.parametrize("name", ["README", "notebooks/00_start_here"])
def test_the_first_pages_show_step_by_step_how_the_model_was_asked(open_page, name):
    page = open_page(f"{name}.html", PHONE)
    box = page.locator("[data-explorer=ask]")
    recorded = json.loads((REPOSITORY / "data" / "curves" / "ask_the_model.json").read_text(encoding="utf-8"))
    for button, rows in (("2 Score", recorded["before"]), ("4 Ask again", recorded["after"])):
        box.get_by_role("button", name=button).click()
        shown = box.locator("li").all_inner_texts()
        assert len(shown) == len(rows)
        for text, row in zip(shown, rows, strict=True):
            assert row["text"] in text and f"reward {row['reward']:.0f}" in text
    box.get_by_role("button", name="3 Train").click()
    first_right = next(row for row in recorded["before"] if row["reward"])
    assert f"{first_right['then']:.0%}" in box.locator("[role=status]").inner_text()
    box.scroll_into_view_if_needed()
    shoot(page, f"book_asked_phone_{Path(name).stem}")


@pytest.mark.browser
@pytest.mark.long
def test_a_real_model_answers_before_and_after_its_run_in_the_static_page(open_page):
    page = open_page("notebooks/14_real_language_model.html", PHONE)
    box = page.locator("[data-explorer=looks]")
    asked = json.loads((REPOSITORY / "data" / "curves" / "ask_smollm2.json").read_text(encoding="utf-8"))["asked"]
    box.get_by_label("Question").select_option(asked[-1]["question"])
    for look, button in zip(asked[-1]["looks"], ("before training", "after 40 steps"), strict=True):
        box.get_by_role("button", name=button).click()
        right = sum(row["reward"] == 1 for row in look["rows"])
        assert f"{right} of {len(look['rows'])}" in box.locator("[role=status]").inner_text()
        for text, row in zip(box.locator("li").all_inner_texts(), look["rows"], strict=True):
            assert row["answer"] in text and f"reward {row['reward']:.0f}" in text
    box.scroll_into_view_if_needed()
    shoot(page, "book_smollm2_phone")


@pytest.mark.browser
@pytest.mark.long
def test_a_run_of_a_real_model_is_played_step_by_step_in_the_static_page(open_page):
    page = open_page("notebooks/14_real_language_model.html")
    box = page.locator("[data-recorded=run]")
    recorded = json.loads((REPOSITORY / "data" / "curves" / "smollm2_run.json").read_text(encoding="utf-8"))
    said, answers = box.locator("[role=status]"), box.locator(".kept")
    first, *_, last = (look["rows"] for look in recorded["asked"][0]["looks"])
    box.get_by_label("step").fill("0")
    assert first[0]["text"] in answers.inner_text() and "before training" in said.inner_text()
    assert last[0]["text"] not in answers.inner_text()
    box.get_by_role("button", name="Play").click()
    page.wait_for_function("document.querySelector('[data-recorded=run] .kept').innerText.includes('after step 2')")
    box.get_by_role("button", name="Pause").click()
    box.get_by_label("step").fill("8")
    assert last[0]["text"] in answers.inner_text() and recorded["verdict"] in said.inner_text()
    box.get_by_label("step").fill("3")
    box.get_by_label("answers to").select_option(index=len(recorded["asked"]))
    row = recorded["history"][2]
    assert row["question"] in answers.inner_text() and f"mean reward {row['reward']:.2f}" in said.inner_text()
    for text, one in zip(answers.locator("li").all_inner_texts(), row["rows"], strict=True):
        assert one["text"] in text and f"reward {one['reward']:.0f}" in text
    inspector = page.locator("[data-tokens]")
    assert inspector.locator(".token").count() > 50 and "undefined" not in inspector.inner_text()
    shoot(page, "book_smollm2_run")


@pytest.mark.browser
@pytest.mark.long
def test_the_keyboard_reaches_and_uses_all_that_is_alive_in_the_book(open_page, address):
    page = open_page("README.html")
    for name, places in VIEWS.items():
        page.goto(f"{address}/{name}.html", wait_until="load")
        for place in places:
            problems = keyboard_problems(page, page.locator(place).first)
            assert problems == [], (name, place, problems)
    tokens = page.locator("[data-tokens] .token")
    tokens.and_(page.locator("[tabindex='0']")).focus()
    seen = []
    for key in ("Home", "ArrowRight", "ArrowDown", "ArrowUp", "ArrowLeft"):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true", key
        seen.append(page.evaluate("[...document.querySelectorAll('.token')].indexOf(document.activeElement)"))
    assert seen[1] == seen[0] + 1 and seen[2] > seen[1] and seen[3:] == [seen[1], seen[0]]
