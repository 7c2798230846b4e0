"""The page of a run: its figures, its charts, and that nothing from outside gets into its markup."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser

import pytest

from tests.report_run import FACTS, GIB, make_run, metric
from zft.config import ZftError
from zft.observe.chart import Line, line_chart, merged, short, smoothed, thinned, ticks
from zft.observe.memory import bytes_text, memory_rows, traffic_rows
from zft.observe.report import page, write_facts, write_report
from zft.observe.trace import Span

VOID = {"meta", "link", "br", "img"}
OPTIONAL = {"tr", "td", "th", "p", "html"}


class Page(HTMLParser):
    """Text, headings and addresses; fails on tags that are never closed."""

    def __init__(self, html: str):
        super().__init__()
        self.open, self.text, self.links, self.tags = [], [], [], set()
        self.feed(html)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "data", "action", "srcset")]
        if tag not in VOID | OPTIONAL:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)

    def handle_endtag(self, tag):
        if tag not in OPTIONAL:
            assert self.open.pop() == tag, tag

    def handle_data(self, data):
        self.text.append(data)


def shown(tmp_path, **facts) -> tuple[str, Page]:
    html = write_report(make_run(tmp_path / "run", **facts)).read_text(encoding="utf-8")
    return html, Page(html)


def test_the_page_has_every_part_and_needs_nothing_else(tmp_path):
    html, seen = shown(tmp_path)
    text = " ".join("".join(seen.text).split())
    for part in ("Training", "Memory", "Traffic of a step", "Where the time goes", "Data", "Settings", "Gradient norm"):
        assert part in text
    assert "40 of 50 steps" in text and "1 of 40 steps were skipped" in text and "(step 20)" in text
    assert "The loss fell from" in text and "The longest lane is compute" in text
    assert "planned 2 s" in text
    assert not seen.links and "url(" not in html and "@import" not in html and "http" not in html
    assert "script" not in seen.tags and "prefers-color-scheme:dark" in html


def test_markup_in_data_is_text(tmp_path):
    evil = "</pre><script>alert(1)</script><img src=x>"
    facts = json.loads(json.dumps(FACTS))
    facts |= {"title": evil, "facts": [[evil, evil]], "samples": [{"prompt": evil, "before": evil, "after": evil}]}
    facts["data"]["sample"] = [{"text": evil, "supervised": True}]
    facts["data"]["notes"] = [evil]
    html, seen = shown(tmp_path, **facts)
    assert not {"script", "img"} & seen.tags and html.count("&lt;script&gt;") >= 8
    assert "Before and after" in "".join(seen.text)


def test_a_run_with_metrics_alone_still_has_a_page(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(metric(1)) + "\n")
    seen = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    text = "".join(seen.text)
    assert "no plan to compare with" in text and "Where the time goes" not in text


def test_nothing_logged_is_an_error(tmp_path):
    with pytest.raises(ZftError, match="no finished step"):
        write_report(tmp_path)


def test_all_losses_nan(tmp_path):
    write_facts(tmp_path, FACTS)
    html = page("run", [metric(1) | {"loss": math.nan}, metric(2) | {"loss": math.nan}], {}, ([], []))
    assert "no finite value" in html and "nan" in html


def test_planned_and_measured():
    metrics = [metric(step) for step in range(1, 6)]
    metrics[0]["traffic_bytes"] = metrics[0]["traffic_bytes"] | {"nvme_write": 1}
    metrics[3]["peak_bytes"] = metrics[3]["peak_bytes"] | {"host_rss": 4 * GIB}
    rows = {row.name: row for row in memory_rows(metrics, {"peak_host_bytes": 2 * GIB, "peak_device_bytes": 0})}
    assert rows["host memory"].measured_bytes == 4 * GIB and rows["host memory"].ratio == 2
    assert rows["NVMe"].planned_bytes is None and rows["NVMe"].ratio is None
    assert "device memory" not in rows
    traffic = {row.name: row for row in traffic_rows(metrics, {"traffic_bytes": {"nvme_write": 600}})}
    assert traffic["written to NVMe"].ratio == 1 and traffic["read from NVMe"].ratio is None


@pytest.mark.parametrize(("low", "high"), [(0, 0), (1.4, 1.4), (-3, 1e9), (1e-7, 2e-5), (2.999, 3.001), (0, 1)])
def test_ticks_are_few_round_and_enclose(low, high):
    marks = ticks(low, high)
    assert 3 <= len(marks) <= 7 and marks[0] <= low + 1e-12 and marks[-1] >= high - 1e-12
    assert marks == sorted(set(marks)) and len({short(mark) for mark in marks}) == len(marks)


def test_thinning_keeps_extremes_and_what_is_not_finite():
    points = [(float(i), math.sin(i)) for i in range(5000)]
    points[1234], points[2345] = (1234.0, 99.0), (2345.0, math.nan)
    kept = thinned(points)
    assert len(kept) <= 410 and (1234.0, 99.0) in kept and any(math.isnan(y) for _, y in kept)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


def test_smoothing_is_the_mean_of_a_window():
    points = [(float(i), float(i * i)) for i in range(100)]
    expected = [(float(i), sum(j * j for j in range(max(0, i - 4), i + 1)) / min(i + 1, 5)) for i in range(100)]
    assert smoothed(points) == [(x, pytest.approx(y)) for x, y in expected]


def test_a_gap_breaks_the_line_and_is_marked():
    chart = line_chart("a", [Line("l", "s-blue", [(1, 1.0), (2, math.inf), (3, 2.0), (4, 3.0)])])
    curve = chart.split("class='curve s-blue' d='")[1].split("'")[0]
    assert curve.count("M") == 2 and chart.count("class=bad") == 1


def test_tiny_spans_become_one_block_and_long_ones_stay():
    tiny = [Span("nvme read", f"read {i}", i * 1e-4, i * 1e-4 + 5e-5) for i in range(1000)]
    long = Span("nvme read", "long", 1.0, 2.0)
    blocks = merged([*tiny, long], 1e-3)
    assert len(blocks) < 60 and blocks[-1] == long
    assert blocks[0].start_s == 0 and blocks[-2].end_s == tiny[-1].end_s


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1 GiB"), (3 << 40, "3 TiB")]
)
def test_bytes_text(count, text):
    assert bytes_text(count) == text
