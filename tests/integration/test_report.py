"""Reports of real runs, and the page in a real browser (Debian's chromium; scripts/test.sh --slow installs it)."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import zlib
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.test_cli import zft
from tests.report_run import make_run
from tests.tiny import tiny_folder
from zft.observe.report import write_report

pytestmark = pytest.mark.slow
FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync --hide-scrollbars --virtual-time-budget=2000"
).split()


def browse(page: Path, profile: Path, *flags: str) -> str:
    """Open the page with a fresh profile; returns what the browser prints."""
    program = next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )
    assert program, "this test needs a browser: apt-get install chromium"
    command = [program, *FLAGS, f"--user-data-dir={profile}", "--enable-logging=stderr", "--v=0", *flags, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


def pixels(path: Path) -> list[bytes]:
    """Colours of an 8-bit PNG's pixels, row after row."""
    content, place, data, width = path.read_bytes(), 8, b"", 0
    while place < len(content):
        (length,), kind = struct.unpack(">I", content[place : place + 4]), content[place + 4 : place + 8]
        body = content[place + 8 : place + 8 + length]
        if kind == b"IHDR":
            width, _, depth, colour = struct.unpack(">IIBB", body[:10])
            size = {2: 3, 6: 4}[colour]
            assert depth == 8
        data += body if kind == b"IDAT" else b""
        place += length + 12
    raw, out, above = zlib.decompress(data), [], bytearray(width * size)
    for start in range(0, len(raw), width * size + 1):
        row = bytearray(raw[start + 1 : start + 1 + width * size])
        _unfilter(raw[start], row, above, size)
        out += [bytes(row[i : i + 3]) for i in range(0, len(row), size)]
        above = row
    return out


def _unfilter(kind: int, row: bytearray, above: bytearray, size: int) -> None:
    """PNG filters (https://www.w3.org/TR/png-3/#9Filters)."""
    for i in range(len(row)):
        left, up = row[i - size] if i >= size else 0, above[i]
        corner = above[i - size] if i >= size else 0
        guess = left + up - corner
        paeth = min((abs(guess - left), 0, left), (abs(guess - up), 1, up), (abs(guess - corner), 2, corner))[2]
        row[i] = (row[i] + (0, left, up, (left + up) // 2, paeth)[kind]) & 255


@pytest.mark.parametrize(("scheme", "background"), [("1", (0xFB, 0xFB, 0xFA)), ("0", (0x14, 0x16, 0x1A))])
def test_the_page_in_a_browser_light_and_dark(tmp_path, scheme, background):
    page = write_report(make_run(tmp_path / "run"))
    shot = tmp_path / "shot.png"
    mode = f"--blink-settings=preferredColorScheme={scheme}"
    browse(page, tmp_path / "profile", mode, "--window-size=1000,1000", f"--screenshot={shot}")
    colours = Counter(pixels(shot))
    assert colours.most_common(1)[0][0] == bytes(background) or colours[bytes(background)] > 200_000
    blue = {"1": bytes((0x2F, 0x6F, 0xDE)), "0": bytes((0x6A, 0xA2, 0xFF))}[scheme]
    assert colours[blue] > 300, "no curve, no bar"


def test_nothing_overflows_and_every_chart_has_its_size(tmp_path):
    page = write_report(make_run(tmp_path / "run"))
    probe = (
        "<script>addEventListener('load',()=>{const s=[...document.querySelectorAll('svg')].map(e=>e.getBoundingClientRect());"
        "document.body.dataset.seen=JSON.stringify({wide:document.documentElement.scrollWidth-innerWidth,"
        "svg:s.map(r=>[r.width,r.height]),"
        "clipped:[...document.querySelectorAll('svg text')].filter(t=>{const r=t.getBoundingClientRect(),"
        "o=t.ownerSVGElement.getBoundingClientRect();return r.left<o.left-1||r.right>o.right+1||r.bottom>o.bottom+1})"
        ".map(t=>t.textContent)})})</script></html>"
    )
    page.write_text(page.read_text(encoding="utf-8").replace("</html>", probe), encoding="utf-8")
    for width in (1200, 500):
        dom = browse(page, tmp_path / f"profile{width}", f"--window-size={width},900", "--dump-dom")
        seen = json.loads(re.search(r'data-seen="([^"]*)"', dom)[1].replace("&quot;", '"'))
        assert seen["wide"] <= 0 and len(seen["svg"]) == 5 and not seen["clipped"], seen
        assert all(w > 200 and h > 50 for w, h in seen["svg"]), seen


def test_a_run_leaves_its_page_and_trace(tmp_path):
    tiny_folder("llama", tmp_path / "model")
    row = {"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d <b>"}]}
    (tmp_path / "chats.jsonl").write_text((json.dumps(row) + "\n") * 6)
    args = "run sft model=model data=chats.jsonl train.seq_len=64 train.steps=4 out=o engine=zero3_nvme".split()
    done = zft(*args, "train.stop_after=3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    html = (tmp_path / "o" / "report.html").read_text(encoding="utf-8")
    assert "3 of 4 steps" in html and "Where the time goes" in html
    # measured traffic of a usual step is the formula's, to the byte
    traffic = html.split("Traffic of a step")[1].split("</section>")[0]
    assert traffic.count("<span class=ok>100 %</span>") == 4, traffic
    found = json.loads((tmp_path / "o" / "trace.json").read_text())["traceEvents"]
    names = {event["name"] for event in found if event.get("cat") == "step"}
    lanes = {event["cat"] for event in found if "cat" in event}
    assert names == {"step 2", "step 3"} and lanes == {"step", "compute", "update", "d2h", "nvme read", "nvme write"}
    drawn = html.split("Where the time goes")[1].split("</section>")[0]
    assert all(f"class='lane-{lane.replace(' ', '-')}'" in drawn for lane in lanes - {"step"})
    (tmp_path / "o" / "report.html").unlink()
    assert zft("report", "o", cwd=tmp_path).returncode == 0
    assert (tmp_path / "o" / "report.html").read_text(encoding="utf-8") == html
    for folder in ("model", "absent"):
        wrong = zft("report", folder, cwd=tmp_path)
        assert wrong.returncode == 2 and len(wrong.stderr.splitlines()) == 1
