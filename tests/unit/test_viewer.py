"""What ``python -m rollout.viewer`` embeds, leaves out, and says when it cannot."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from rollout.records import read_lines, write_parquet
from rollout.viewer import __main__ as viewer
from rollout.viewer import build
from rollout.viewer.source import parse_steps
from rollout.viewer.tokens import load_texts
from tests.support import hand_made_trace, write_lines

RESPONSE = (11, 12, 13, 14, 15, 16, 17)
REVEAL = (0, 1, 0, 0, 1, 1, 2)


def line(uid="a", prompt=(7, 7, 7, 7, 7), trace=(), **changes):
    """One rollout of block size 4: three tokens in the block that the prompt ends in, four in the next."""
    made = hand_made_trace(list(prompt), RESPONSE, REVEAL, 4, **dict(trace))
    made.visible = 6
    made.validate()
    engine = made.action_logprob.astype(float)
    scores = {"uid": uid, "reward": 0.0, "finish_reason": "stop", "trainer_logprob": (engine + 2e-7).tolist()}
    return made.to_line() | scores | changes


@pytest.fixture
def run_dir(tmp_path):
    """A run of two training steps with two groups of two."""
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    for step in (2, 10):
        lines = [line(uid, (i,) * 5, reward=float(r), step=step) for i, uid in enumerate("ab", 1) for r in (0, 1)]
        write_lines(tmp_path / "run" / "rollouts" / f"{step}.jsonl", lines)
    return tmp_path / "run"


def embedded(path) -> dict:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(data)


@pytest.fixture
def view(tmp_path, capsys):
    """Run the command; returns the embedded data, what it printed, and its errors."""

    def run(path, *flags):
        out = tmp_path / "page.html"
        assert viewer.main([str(path), "--out", str(out), *map(str, flags)]) == 0
        printed = capsys.readouterr()
        return embedded(out), printed.out, printed.err

    return run


def view_lines(view, tmp_path, *lines):
    return view(write_lines(tmp_path / "some.jsonl", lines))


def test_a_run_in_order(view, run_dir):
    data, printed, errors = view(run_dir)
    assert [(s["step"], s["group"], s["uid"], s["reward"]) for s in data["samples"]] == [
        (step, group, uid, reward) for step in (2, 10) for group, uid in ((1, "a"), (2, "b")) for reward in (0, 1)
    ]
    assert data["prompts"] == [[1] * 5, [2] * 5], "a prompt is embedded once, whatever the number of its samples"
    assert (data["name"], data["left_out"], errors) == ("run", 0, "")
    assert printed.splitlines()[-1].startswith("8 rollouts, ")


def test_a_directory_of_parquet_files(view, run_dir, tmp_path):
    """As ``--save-debug-rollouts`` writes them: the same page."""
    (tmp_path / "saved").mkdir()
    for file in (run_dir / "rollouts").iterdir():
        write_parquet(tmp_path / "saved" / f"{file.stem}.parquet", list(read_lines(file)))
    assert view(tmp_path / "saved")[0]["samples"] == view(run_dir)[0]["samples"]


def test_the_default_file_lies_in_the_run(run_dir, capsys):
    assert viewer.main([str(run_dir)]) == 0
    assert len(embedded(run_dir / "viewer.html")["samples"]) == 8
    assert viewer.main([str(run_dir / "rollouts" / "2.jsonl")]) == 0
    assert len(embedded(run_dir / "rollouts" / "2.html")["samples"]) == 4


def test_fields_of_a_sample(view, tmp_path):
    edits = [(2, 2, 8, 30, 14)]
    trace = {"edits": edits, "select_logprobs": [[-0.5, 0.0], [-0.25, 0.0, 0.0]], "weight_versions": ["3", "4"]}
    trace["logprob_raw"] = np.linspace(-1, -0.4, 7).astype(np.float32)
    (sample,) = view_lines(
        view, tmp_path, line(trace=trace, ground_truth="12", router_tie=[False, True] + [False] * 5)
    )[0]["samples"]
    assert sample["ids"] == list(RESPONSE) and sample["reveal"] == list(REVEAL) and sample["visible"] == 6
    assert (sample["steps"], sample["versions"], sample["block_size"]) == ([2, 3], ["3", "4"], 4)
    assert sample["edits"] == [list(edit) for edit in edits]
    assert sample["select"] == [[-0.5, 0], [-0.25, 0, 0]]
    assert sample["logprob"] == [-1] * 7 and sample["confidence"] == [0.5] * 7
    assert sample["raw"] == pytest.approx(np.linspace(-1, -0.4, 7), abs=1e-5)
    assert (sample["truth"], sample["finish"], sample["ties"]) == ("12", "stop", [1])


def test_differences_keep_what_rounding_would_lose(view, tmp_path):
    """Trainer and engine agree to six digits here; the choice of positions is part of the engine's number."""
    trace = {"select_logprobs": [[-0.5, 0.0], [-0.25, 0.0, 0.0]]}
    (sample,) = view_lines(view, tmp_path, line(trace=trace))[0]["samples"]
    assert sample["trainer"] == [-1.5, -1, -1, -1.25, -1, -1, -1]
    assert sample["difference"] == pytest.approx([2e-7] * 7, rel=1e-3)


def test_another_likelihood_has_no_difference(view, tmp_path):
    other = line(trainer_likelihood=[-2.0] * 7)
    del other["trainer_logprob"]
    (sample,) = view_lines(view, tmp_path, other)[0]["samples"]
    assert sample["trainer"] == [-2] * 7 and "difference" not in sample


def test_a_file_of_generate_has_neither_reward_nor_step(view, tmp_path):
    lines = [hand_made_trace([p] * 5, RESPONSE, REVEAL, 4).to_line() | {"text": "t"} for p in (1, 1, 2)]
    data, printed, _ = view_lines(view, tmp_path, *lines)
    assert [s["group"] for s in data["samples"]] == [1, 1, 2], "samples of one prompt are a group"
    assert all(s["step"] is None and "reward" not in s for s in data["samples"])
    assert data["texts"] is None and data["samples"][0]["text"] == "t"
    assert "no tokenizer found" in printed


def test_text_cannot_leave_its_place(view, tmp_path):
    hostile = '</script><script>alert(1)</script><!-- {{title}} \u2028 \ud800 "'
    (sample,) = view_lines(view, tmp_path, line(ground_truth=hostile, text=hostile))[0]["samples"]
    assert sample["truth"] == hostile.replace("\ud800", "?")
    page = (tmp_path / "page.html").read_text()
    assert page.count("</script>") == 2 and "<!--" not in page and "alert(1)<" not in page


def test_a_name_is_no_placeholder(tmp_path):
    page = build.render("{{data}}<b>", '{"a":1}').decode()
    assert page.count('{"a":1}') == 1 and "{{data}}&lt;b&gt;" in page


def test_the_page_needs_nothing_else(run_dir, view, tmp_path):
    view(run_dir)
    page = (tmp_path / "page.html").read_text()
    assert not re.search(r"https?://|\bsrc=|<link|url\(|@import|fetch\(|import\(", page)
    assert "default-src 'none'" in page


def test_limit_and_steps(view, run_dir):
    data, printed, _ = view(run_dir, "--limit", 3)
    assert [s["step"] for s in data["samples"]] == [2, 2, 2, 10, 10, 10]
    assert data["left_out"] == 2 and "2 of 8 rollouts left out" in printed
    assert [s["step"] for s in view(run_dir, "--steps", "5-10")[0]["samples"]] == [10] * 4
    assert parse_steps("1,5-7") == {1, 5, 6, 7}


@pytest.mark.parametrize(("samples", "expected"), [(0.5, 1), (1.5, 1), (2.5, 2), (3.5, 2), (4.5, 4)])
def test_the_default_limit_is_a_size_and_keeps_groups_whole(view, run_dir, monkeypatch, samples, expected):
    """Room for so many samples per step. A first group that does not fit is the one exception."""
    largest = max(len(build.compact(s)) for s in view(run_dir)[0]["samples"]) + 20
    monkeypatch.setattr(build, "BUDGET_BYTES", int(samples * largest) * 2)
    data, printed, _ = view(run_dir)
    assert len(data["samples"]) == 2 * expected
    assert data["left_out"] == 8 - 2 * expected
    assert ("left out" in printed) == (expected < 4)


# The tokenizer


def test_texts_come_from_the_model_that_the_run_names(view, run_dir, tiny_dir):
    (run_dir / "config.yaml").write_text(f"actor_rollout_ref: {{model: {{path: {tiny_dir}}}}}")
    data, printed, _ = view(run_dir)
    assert set(map(int, data["texts"])) == {1, 2, *RESPONSE} and "tokenizer" not in printed
    assert all(isinstance(text, str) for text in data["texts"].values())


def test_texts_come_from_a_checkpoint_if_the_model_has_moved(view, run_dir, tiny_dir):
    (run_dir / "config.yaml").write_text("actor_rollout_ref: {model: {path: /nowhere}}")
    assert view(run_dir)[0]["texts"] is None
    saved = run_dir / "checkpoints" / "global_step_10" / "actor" / "huggingface"
    saved.parent.mkdir(parents=True)
    saved.symlink_to(tiny_dir)
    assert view(run_dir)[0]["texts"]


def test_every_token_has_a_text_of_its_own(tiny_dir):
    """A byte that is no character by itself is not the same sign as every other one."""
    texts = load_texts(str(tiny_dir), [])
    vocabulary = range(len(texts.tokenizer))
    found = texts.texts(vocabulary)
    assert len(set(found.values())) == len(found)
    assert found[texts.tokenizer.convert_tokens_to_ids("Ġ")] == " "
    controls = {texts.tokenizer.mask_token_id, texts.tokenizer.convert_tokens_to_ids("<|role_end|>")}
    assert controls <= set(texts.special(vocabulary)) and len(texts.special(vocabulary)) < 20


# What cannot be shown


def test_a_cut_last_line_costs_itself_only(view, tmp_path):
    path = write_lines(tmp_path / "cut.jsonl", [line(), line("b")])
    path.write_text(path.read_text() + '{"input_ids": [1, 2')
    data, _, errors = view(path)
    assert len(data["samples"]) == 2
    assert errors == f"warning: {path}: the last line was cut when its writer ended, and is not shown\n"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"steps_per_block": [2]}, "steps_per_block has 1 entries for 2 blocks"),
        ({"reveal_step": None}, "NoneType"),
        ({"trainer_logprob": [-1.0]}, "trainer_logprob has 1 entries for 7 replay tokens"),
    ],
)
def test_a_broken_sample_is_named_and_the_others_shown(view, tmp_path, change, reason):
    data, _, errors = view_lines(view, tmp_path, line(), line() | change)
    assert len(data["samples"]) == 1
    assert re.fullmatch(rf"warning: .*some.jsonl line 2 is not shown: .*{reason}.*\n", errors)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nowhere"], r"run 'nowhere' does not exist; pass a run directory or a .jsonl file of rollouts"),
        (["EMPTY"], r"run '.*' has no rollouts/<step>.jsonl or .parquet; pass the directory of a training run that .*"),
        (["RUN", "--limit", "0"], r"limit=0 must be at least 1"),
        (["RUN", "--steps", "1,x"], r"steps='1,x': 'x' is no step; write for instance 1,5,10-20"),
        (
            ["RUN", "--steps", "1-99999999999"],
            r"steps=.*: '1-99999999999' is more than 1000000 steps; write a shorter .*",
        ),
        (["RUN", "--steps", "3"], r"none of steps=\[3\] is in '.*', which has 2 to 10"),
        (["FILE", "--steps", "3"], r"steps=\[3\] need a run directory, and '.*' is a file; remove --steps"),
        (["RUN", "--out", "EMPTY"], r"out='.*' is a directory; give the path of a file"),
        (["RUN", "--out", "FILE/page.html"], r"out='.*' cannot be written \(.*\); choose another --out"),
        (["RUN", "--model-path", "no"], r"model path 'no' is not a directory; pass a local Hugging Face checkpoint"),
        (
            ["RUN", "--model-path", "EMPTY"],
            r"model path '.*' has no tokenizer that loads \(.*\); pass the checkpoint .*",
        ),
        (["PROMPTS"], r"nothing to show: .*prompts.jsonl line 1 is not shown: rollout line has no '.*'.*"),
        (["BLANK"], r"nothing to show: .*blank.jsonl is empty"),
        (["TEXT"], r".*text.jsonl line 1 is not JSON: .*"),
    ],
)
def test_bad_input_is_one_sentence(run_dir, tmp_path, capsys, flags, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.jsonl").write_text("not JSON\n")
    (tmp_path / "blank.jsonl").write_text("\n")
    write_lines(tmp_path / "prompts.jsonl", [{"text": "1 + 1 ="}])
    places = {"RUN": run_dir, "EMPTY": tmp_path / "empty", "FILE": run_dir / "rollouts" / "2.jsonl"}
    places |= {name: tmp_path / f"{name.lower()}.jsonl" for name in ("PROMPTS", "BLANK", "TEXT")}
    given = [re.sub("[A-Z]{3,}", lambda match: str(places[match[0]]), flag) for flag in flags]
    assert viewer.main(given) == 2
    assert re.fullmatch(f"error: {message}\n", capsys.readouterr().err)
