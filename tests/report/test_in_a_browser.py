"""The page in headless Chromium: no error in the console, and the figures of the files in what is shown."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from nccl_ep.report import __main__ as report
from nccl_ep.report.figures import figures
from nccl_ep.report.inputs import load
from tests import ROOT
from tests.report import programs
from tests.report.programs import RANKS, ROW_BYTES
from tests.report.test_report import Page
from tools import browser

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def chromium() -> str:
    found, why_not = browser.find()
    if found is None:
        pytest.skip(why_not)
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_as_a_browser_shows_it(chromium: str, tmp_path: Path, scheme: str) -> None:
    run, out = tmp_path / "run", tmp_path / "page.html"
    programs.recorded(run, "ll", "ht")
    records = ROOT / "records/ll_2xh100_2026-11-27.json"
    assert report.main([str(run), str(records), "--out", str(out)]) == 0
    # In place of a pointer: one over the second point of every chart, and the buttons. What is shown is written down.
    act = """<script>
    const at = (svg, share) => { const box = svg.getBoundingClientRect();
      return { clientX: box.left + box.width * share, clientY: box.top + box.height / 2, bubbles: true }; };
    const middle = svg => at(svg, 0.5);
    const said = [...document.querySelectorAll("[data-lines]")].map(chart => {
      const { left, width, series } = JSON.parse(chart.dataset.lines), svg = chart.querySelector("svg");
      const share = (left + width * 1.5 / series[0].values.length) / svg.viewBox.baseVal.width;
      svg.dispatchEvent(new PointerEvent("pointermove", at(svg, share)));
      return document.getElementById("tip").textContent; });
    const bar = document.querySelector("#time-line rect");
    bar.dispatchEvent(new PointerEvent("pointermove", middle(bar)));
    said.push(document.getElementById("tip").textContent);
    const line = document.getElementById("time-line"), drawn = [];
    for (const id of ["in", "out", "whole"]) { document.getElementById(id).click(); drawn.push(line.dataset.drawn); }
    line.dispatchEvent(new WheelEvent("wheel", { ...middle(line), deltaY: -500, cancelable: true }));
    drawn.push(line.dataset.drawn);
    const before = line.innerHTML;
    line.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", cancelable: true }));
    document.body.dataset.moved = before !== line.innerHTML;
    document.body.dataset.said = JSON.stringify(said);
    document.body.dataset.drawn = JSON.stringify(drawn.map(Number));
    document.body.dataset.paper = getComputedStyle(document.body).backgroundColor;
    </script></body>"""
    out.write_text(out.read_text().replace("</body>", act))
    command = [
        *browser.command(chromium, str(tmp_path / "profile")), "--enable-logging=stderr",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
        "--virtual-time-budget=5000", "--dump-dom", out.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=browser.LIMIT)
    assert done.returncode == 0 and ":CONSOLE" not in done.stderr, done.stderr[-3000:]
    page, found = Page(done.stdout), figures(load([run]).recorded)
    assert json.loads(page.data)["recorded"] == found
    for kind in ("dispatch", "combine"):
        rows = found["sent"][kind]["rows"]
        assert page.heat[kind] == {(i, j): rows[i][j] * ROW_BYTES for i in range(RANKS) for j in range(RANKS)}
    assert page.bars == found["experts"]

    def written(name: str) -> str:
        (text,) = re.findall(rf'<body[^>]* data-{name}="([^"]*)"', done.stdout)
        return text.replace("&quot;", '"')

    drawn, all_spans = json.loads(written("drawn")), len(found["spans"])
    assert f'data-bars="{all_spans}"' in done.stdout and all_spans == RANKS * programs.STEPS * 4
    assert 0 < drawn[3] <= drawn[1] == drawn[2] <= all_spans  # bars that would lie within half a pixel are one
    load_said, *lines_said, span_said = json.loads(written("said"))
    shown = [float(f"{found['load'][1][name]:.4g}") for name in ("max_over_mean", "rank_max_over_mean")]
    assert [float(text) for text in re.findall(r"mean: ([\d.]+)", load_said)] == shown
    times_said, records_said = lines_said[:4], lines_said[4:]
    assert all("host's call: " in text and "longest wait" in text for text in times_said)
    assert any(re.search(r"tokens of a rank 8\n(.*\n)*floor: the wire alone: ", text) for text in records_said)
    assert re.match(r"rank 0, host: dispatch 1\n[\d.]+ (us|ms|s), at ", span_said)
    assert written("moved") == "true"
    assert written("paper") == {"light": "rgb(246, 246, 244)", "dark": "rgb(22, 22, 21)"}[scheme]
