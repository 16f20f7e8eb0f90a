"""The pages in headless Chromium: nothing complains, charts are drawn and can be used, nothing
hostile runs."""

import shutil

import pytest
from fake_run import HOSTILE_TEXTS, write_fake_run, write_fake_sweep

from xgpt.report.page import write_comparison, write_report
from xgpt.report.sweep_page import write_sweep_page

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (dev)")
pytestmark = pytest.mark.browser
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser():
    program = next(path for name in PROGRAMS if (path := shutil.which(name)))
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=program, args=[
            "--no-sandbox", "--disable-quic", "--host-resolver-rules=MAP * ~NOTFOUND"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of each kind, by name."""
    folder = tmp_path_factory.mktemp("pages")
    runs = [write_fake_run(folder / name, num_queries=24) for name in ("run", "other")]
    return {"run": write_report(runs[0]), "sweep": write_sweep_page(
        write_fake_sweep(folder / "sweep")), "comparison": write_comparison(
            runs, folder / "compare.html")}


@pytest.fixture
def opened(browser, pages, request):
    """A page that nothing was said of on the console, when it was loaded and to the test's end.
    `request.param`: its kind, its width and what else its context has."""
    name, width, options = request.param
    context = browser.new_context(viewport={"width": width, "height": 900}, **options)
    page, said = context.new_page(), []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda asked: said.extend([asked.url] * (
        not asked.url.startswith(("file:", "data:", "blob:")))))
    page.goto(pages[name].as_uri())
    yield page
    context.close()
    assert said == []


KINDS = ("run", "sweep", "comparison")


@pytest.mark.parametrize("opened", [
    (name, width, {"color_scheme": scheme}) for name in KINDS
    for width, scheme in ((1400, "light"), (380, "dark"))], indirect=True, ids=str)
def test_every_chart_is_drawn_and_nothing_is_wider_than_the_screen(opened):
    page = opened
    width = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    charts = page.locator("[data-chart]")
    assert charts.count() >= 2
    for place in range(charts.count()):
        chart = charts.nth(place)
        assert chart.locator(".main-svg").count() >= 2, chart.get_attribute("data-chart")
        assert chart.locator(".scatterlayer path, .barlayer path").count() > 0
        box = chart.locator(".main-svg").first.bounding_box()
        assert 200 < box["width"] <= width and box["height"] >= 250
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "unfolded, too"
    # the colours are those of the page's mode
    ink = page.evaluate("getComputedStyle(document.querySelector('.xtick text')).fill")
    light = sum(int(part) for part in ink[4:-1].split(","))
    is_dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert light > 500 if is_dark else light < 200, ink


@pytest.mark.parametrize("opened", [("run", 1400, {})], indirect=True, ids=str)
def test_a_chart_follows_its_place_though_the_window_stays_as_it_is(opened):
    opened.evaluate("document.body.style.width = '380px'")
    opened.wait_for_function("""() => Array.from(document.querySelectorAll('[data-chart]')).every(
        box => box.querySelector('.main-svg').getBoundingClientRect().width <= 380)""")


@pytest.mark.parametrize("opened", [(name, 1400, {}) for name in KINDS], indirect=True, ids=str)
def test_hover_tells_of_a_point_and_a_drag_zooms(opened):
    page = opened
    chart = page.locator("[data-chart]").first
    chart.scroll_into_view_if_needed()
    area = chart.locator(".nsewdrag").first.bounding_box()
    point = page.evaluate("""() => {
        const box = document.querySelector('[data-chart]'), trace = box.data[0];
        const place = Math.floor(trace.x.length / 2), layout = box._fullLayout;
        const is_bar = trace.type === 'bar';  // its middle: bars of two series meet at the place
        const across = layout.xaxis.d2p(trace.x[place]) - (is_bar ? 20 : 0);
        const up = layout.yaxis.d2p(trace.y[place] / (is_bar ? 2 : 1));
        return [layout.xaxis._offset + across, layout.yaxis._offset + up];
    }""")
    corner = chart.bounding_box()
    hovered = page.locator("[data-chart] .hovertext").first
    for _ in range(40):  # on a busy machine a movement may come before the chart listens
        page.mouse.move(corner["x"] + point[0] - 30, corner["y"] + point[1] + 10)
        page.mouse.move(corner["x"] + point[0], corner["y"] + point[1], steps=4)
        page.wait_for_timeout(200)
        if hovered.is_visible():
            break
    assert page.locator(".hovertext").first.text_content().strip()
    before = page.evaluate("document.querySelector('[data-chart]')._fullLayout.xaxis.range")
    page.mouse.move(area["x"] + 0.3 * area["width"], area["y"] + 0.3 * area["height"])
    page.mouse.down()
    page.mouse.move(area["x"] + 0.6 * area["width"], area["y"] + 0.7 * area["height"], steps=5)
    page.mouse.up()
    page.wait_for_function("""before => {
        const range = document.querySelector('[data-chart]')._fullLayout.xaxis.range;
        return range[1] - range[0] < 0.5 * (before[1] - before[0]);
    }""", arg=before, timeout=30_000)


@pytest.mark.parametrize("opened", [("run", 1400, {})], indirect=True, ids=str)
def test_what_is_printed_is_in_light_colours_and_narrow_enough(opened):
    page = opened
    page.emulate_media(media="print", color_scheme="dark")
    page.wait_for_function("document.documentElement.classList.contains('printing')")
    widths = page.evaluate(
        "Array.from(document.querySelectorAll('.main-svg')).map(one => one.clientWidth)")
    assert widths and max(widths) <= 680
    assert page.evaluate("getComputedStyle(document.querySelector('.xtick text')).fill") == (
        "rgb(0, 0, 0)")
    assert not page.locator(".copy").first.is_visible()
    assert page.pdf().startswith(b"%PDF")


@pytest.mark.parametrize("opened", [("run", 1400, {})], indirect=True, ids=str)
def test_hostile_texts_are_shown_and_answers_searched_and_tables_copied(opened):
    page = opened
    assert page.title() == "quickstart - xgpt report"
    assert page.locator("body").inner_text().count(HOSTILE_TEXTS[0]) == 2
    assert page.locator(".answer:visible").count() == 3, "the others are folded"
    page.click("#more > summary")
    assert page.locator(".answer:visible").count() == 24
    page.click("#more > summary")
    page.fill("#search", "emoji")
    assert page.locator(".answer:visible").count() == 1, "a search looks into what is folded"
    page.fill("#search", "")
    assert page.locator(".answer:visible").count() == 3
    page.click("#more > summary")
    assert "\\u202eright to left" in page.locator("#answers").locator("xpath=../..").inner_text()
    page.evaluate("document.execCommand = () => { window.copied = document.activeElement.value;"
                  " return true; }; delete Navigator.prototype.clipboard")
    page.locator("section:has(#compared) .copy").click()
    rows = page.evaluate("window.copied").splitlines()
    assert rows[0].startswith("quantity\tpredicted\tmeasured") and rows[1].startswith("Throughput")


@pytest.mark.parametrize("opened", [("run", 1400, {"java_script_enabled": False})], indirect=True,
                         ids=str)
def test_without_scripts_every_chart_has_its_data(opened):
    page = opened
    charts = page.locator("[data-chart]").count()
    assert charts >= 3 and page.locator("details.data").count() == charts
    page.locator("details.data summary").first.click()
    assert page.locator("details.data table").first.is_visible()


@pytest.mark.parametrize("opened", [("sweep", 1400, {})], indirect=True, ids=str)
def test_an_axis_shows_what_is_chosen(opened):
    page = opened
    figure = page.locator("figure:has([data-chart=scenario-0])")
    figure.locator("select").nth(1).select_option("device-seconds per request")
    chart = "document.querySelector('[data-chart=scenario-0]')"
    shown = page.evaluate(f"{chart}.data[1].y.filter(value => value !== null)")
    assert shown == pytest.approx([4 / 12, 4 / 24, 4 / 26], rel=1e-4)
    assert page.evaluate(f"{chart}._fullLayout.yaxis.title.text") == "device-seconds per request"
    assert page.evaluate(f"{chart}.layout.shapes.length") == 1
    figure.locator("select").first.select_option("expected latency, seconds")
    assert page.evaluate(f"{chart}.data[1].x") == [1.5, 4.5, None, 7.5]
    assert page.evaluate(f"{chart}.layout.xaxis.tickvals") is None
    assert page.evaluate(f"{chart}.layout.shapes.length") == 0, "no limit is on this axis"


def test_the_pages_policy_stops_requests_and_scripts_that_escaping_let_through(
        browser, pages, tmp_path):
    leak = "<script>document.title = 'OWNED'</script><img src='http://example.invalid/x.png'>"
    leaky = tmp_path / "leaky.html"
    leaky.write_text(pages["run"].read_text("utf-8").replace("</main>", leak + "</main>"), "utf-8")
    page, said = browser.new_page(), []
    page.on("console", lambda message: said.append(message.text))
    page.goto(leaky.as_uri())
    assert page.title() == "quickstart - xgpt report"
    assert len(said) == 2 and all("Content Security Policy" in line for line in said)
    page.close()
