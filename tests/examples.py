"""Code that the documentation shows, to be run as it is shown."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support import ROOT


def third_party_decoder(directory: Path) -> str:
    """Write the decoder of docs/decoders.md into ``directory`` as a module; returns its algorithm name."""
    text = (ROOT / "docs" / "decoders.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (directory / "left_to_right.py").write_text(source, encoding="utf-8")
    return "left_to_right:LeftToRight"
