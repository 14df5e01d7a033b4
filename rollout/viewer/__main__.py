"""Write the rollouts of a run into one HTML file that replays them.

python -m rollout.viewer RUN_DIR [--out FILE.html]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dllm.config import ConfigError
from dllm.trace import TraceError
from rollout.viewer.build import build_page
from rollout.viewer.source import find_rollouts, parse_steps
from rollout.viewer.tokens import load_texts


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m rollout.viewer", description=__doc__.splitlines()[0])
    p.add_argument("run", metavar="RUN_DIR", help="directory of a training run, or a .jsonl file of rollout.generate")
    p.add_argument("--out", help="HTML file to write (default: RUN_DIR/viewer.html, or beside the .jsonl file)")
    p.add_argument("--limit", type=int, help="samples per training step (default: what fits into about 10 MB)")
    p.add_argument("--steps", help="training steps to show, for instance 1,5,10-20 (default: all)")
    p.add_argument(
        "--model-path", help="checkpoint directory with the tokenizer (default: what the run's config names)"
    )
    return p


def run(args: argparse.Namespace) -> None:
    """Build and write the page; see ``parser`` for the arguments."""
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"limit={args.limit} must be at least 1")
    rollouts = find_rollouts(args.run, parse_steps(args.steps) if args.steps is not None else None)
    out = Path(args.out) if args.out else rollouts.default_out
    if out.is_dir():
        raise ConfigError(f"out={str(out)!r} is a directory; give the path of a file")
    texts = load_texts(args.model_path, rollouts.model_paths)
    if texts is None:
        print("no tokenizer found, tokens are shown as ids; --model-path DIR names one")
    page = build_page(rollouts, texts, args.limit)
    for warning in page.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(page.html)
    except OSError as error:
        raise ConfigError(f"out={str(out)!r} cannot be written ({error.strerror}); choose another --out") from error
    print(f"{page.shown} rollouts, {len(page.html) / 1e6:.1f} MB -> {out}")
    if page.left_out:
        print(f"{page.left_out} of {page.shown + page.left_out} rollouts left out to keep the file small; choose "
              "with --steps or --limit")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    try:
        run(parser().parse_args(argv))
    except (ConfigError, TraceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
