"""The viewer's page in a headless Chromium: the replay, the filters, the keys. Skipped where there is none."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rollout.viewer import __main__ as viewer
from tests.support import hand_made_trace, write_lines

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH (Debian: chromium-headless-shell)")

PROMPT, SIZE = [7] * 5, 4
"""The response begins behind the first token of a block."""
RESPONSE = (11, 12, 13, 14, 15, 16, 17)
REVEAL = (0, 1, 0, 0, 1, 1, 2)
TIMES = (0, 1, 0, 2, 3, 3, 4)
"""Reveals counted over the whole response: two steps in the first block, three in the next."""
HOSTILE = "</script><script>document.body.id='broken'</script>"


@dataclass
class Dom(HTMLParser):
    """Elements of a dumped page by id or data attribute, with their classes and texts."""

    html: str
    tokens: dict[int, tuple[set[str], str]] = field(default_factory=dict)
    hues: list[str] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    current: list[int] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self.open: list[dict[str, str]] = []
        self.feed(self.html)

    def handle_starttag(self, tag, attrs):
        given = {name: value or "" for name, value in attrs}
        if "data-token" in given:
            self.tokens[int(given["data-token"])] = (set(given["class"].split()), "")
            self.hues.append(given["data-hue"])
        if given.get("class") == "row":
            self.rows.append(int(given["data-sample"]) + 1)
            if "aria-current" in given:
                self.current.append(self.rows[-1])
        if "hidden" in given and "id" in given:
            self.hidden.add(given["id"])
        if tag not in ("meta", "input", "br", "rect", "line"):
            self.open.append(given)

    def handle_endtag(self, tag):
        if self.open and tag not in ("rect", "line"):
            self.open.pop()

    def handle_data(self, text):
        for given in self.open:
            if "data-token" in given:
                index = int(given["data-token"])
                self.tokens[index] = (self.tokens[index][0], self.tokens[index][1] + text)
            if "id" in given:
                self.texts[given["id"]] = self.texts.get(given["id"], "") + text

    def masks(self) -> list[int]:
        return [index for index, (classes, _) in self.tokens.items() if classes & {"hidden", "waiting"}]


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """Two training steps; per step a group of rewards 0 and 1 and one of equal rewards. The third token is edited."""
    run = tmp_path_factory.mktemp("page")
    (run / "rollouts").mkdir()
    for step in (1, 2):
        lines = []
        for uid, rewards in (("a", (0.0, 1.0)), ("b", (0.5, 0.5))):
            for reward in rewards:
                edits = [(2, 2, 8, 30, 14)]
                trace = hand_made_trace(PROMPT, RESPONSE, REVEAL, SIZE, edits=edits)
                trace.visible = 6
                trace.validate()
                scores = {"uid": uid, "reward": reward, "trainer_logprob": [-1.0] * 6 + [-1.5], "ground_truth": HOSTILE}
                lines.append(trace.to_line() | scores)
        write_lines(run / "rollouts" / f"{step}.jsonl", lines)
    assert viewer.main([str(run)]) == 0
    return run / "viewer.html"


@pytest.fixture
def dom(page, tmp_path) -> Callable[..., Dom]:
    """The page at an address, after a script if one is given. A script error of the page fails the test."""

    def load(address: str = "", script: str = "") -> Dom:
        file = page
        if script:
            file = tmp_path / "scripted.html"
            file.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        flags = ["--no-sandbox", "--disable-gpu", profile, "--virtual-time-budget=2000", "--dump-dom"]
        command = [str(CHROMIUM), *flags, f"{file.as_uri()}#{address}"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stderr
        found = Dom(result.stdout)
        assert "problem" in found.hidden, found.texts.get("problem")
        return found

    return load


def press(*keys: str) -> str:
    return "".join(
        f"document.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}', bubbles: true}}));" for key in keys
    )


def test_the_slider_replays_every_step(dom):
    for step in range(6):
        found = dom(f"sample=1&step={step}")
        assert found.masks() == [i for i, time in enumerate(TIMES) if time >= step]
        waiting = [i for i, (classes, _) in found.tokens.items() if "waiting" in classes]
        assert waiting == ([3, 4, 5, 6] if step < 2 else []), "the second block begins after the first"
        fresh = [i for i, (classes, _) in found.tokens.items() if "fresh" in classes]
        assert fresh == [i for i, time in enumerate(TIMES) if time == step - 1]
    assert dom("sample=1").masks() == [], "a page opens at the end"


def test_edits_happen_at_their_step(dom):
    before, after = dom("sample=1&step=4"), dom("sample=1&step=5")
    assert before.tokens[3][1] == "30" and "edited" not in before.tokens[3][0]
    assert after.tokens[3][1] == "14" and {"edited", "changed"} <= after.tokens[3][0]
    assert "1 drawn, 1 edited" in after.texts["status"]


def test_the_token_behind_the_stop_is_marked(dom):
    tail = [i for i, (classes, _) in dom("sample=1").tokens.items() if "tail" in classes]
    assert tail == [6]


@pytest.mark.parametrize(
    ("address", "rows"),
    [
        ("", [1, 2, 3, 4, 5, 6, 7, 8]),
        ("training_step=2", [5, 6, 7, 8]),
        ("training_step=2&group=1", [5, 6]),
        ("reward_min=0.5", [2, 3, 4, 6, 7, 8]),
        ("reward_min=0.25&reward_max=0.75", [3, 4, 7, 8]),
        ("mixed=1&training_step=1", [1, 2]),
        ("query=no+such+text", []),
    ],
)
def test_filters(dom, address, rows):
    found = dom(address)
    assert found.rows == rows
    assert found.texts["count"] == f"{len(rows)} of 8 samples"


def test_keys_move_in_the_list_and_in_time(dom):
    found = dom("sample=2&reward_min=0.5", press("ArrowDown", "ArrowDown", "ArrowDown", "ArrowUp"))
    assert found.current == [4], "the list of the filter: 2, 3, 4, 6"
    found = dom("sample=1", press("ArrowLeft", "ArrowLeft"))
    assert found.texts["status"].startswith("Step 3 of 5 (block 3, step 1 of 3)")
    assert dom("sample=1", press("Home")).masks() == list(range(7))
    assert dom("sample=1", press("Home", "ArrowLeft", "End", "ArrowRight")).masks() == []


def test_a_token_shows_its_numbers(dom):
    found = dom("sample=1", "document.querySelector('[data-token=\"6\"]').click()")
    assert "tip" not in found.hidden
    for part in ("id17", "reveal step3 of 3", "confidence0.5", "trainer log-prob−1.5", "difference−0.5"):
        assert part in found.texts["tip"]


def test_colours(dom):
    found = dom("sample=1&color=difference")
    assert found.hues == ["warm"] * 6 + ["cool"], "the trainer gives the last token less"
    assert "trainer 1 nat lower" in found.texts["legend"]


def test_texts_of_a_rollout_run_nothing(dom):
    found = dom("sample=1")
    assert 'id="broken"' not in found.html
    assert HOSTILE in found.texts["facts"]
