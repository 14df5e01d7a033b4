"""SGLang's own engine in Python, as its users write it; on a CPU the device is added."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support import child_environment

SCRIPT = """
import json, sys
import sglang as sgl

if __name__ == "__main__":
    engine = sgl.Engine(model_path=sys.argv[1], dllm_algorithm="LowConfidence", max_running_requests=1,
                        trust_remote_code=True, device="cpu")
    answers = engine.generate(["What is 2 + 3?", "Count to ten."], {"temperature": 0, "max_new_tokens": 40})
    print("ANSWERS " + json.dumps([[a["output_ids"], a["text"]] for a in answers]))
    engine.shutdown()
"""


def test_stock_engine(heavy, tiny, tmp_path):
    heavy.close()
    script = tmp_path / "use.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tiny.path)]
    environment = child_environment(OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    answers = json.loads(line.removeprefix("ANSWERS "))
    assert len(answers) == 2 and answers[0] != answers[1]
    assert all(0 < len(ids) <= 40 for ids, _ in answers)
