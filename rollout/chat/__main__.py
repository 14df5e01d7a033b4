"""A terminal chat that shows every block being unmasked in place.

    python -m rollout.chat --model-path DIR                 an engine of its own
    python -m rollout.chat --url http://127.0.0.1:30000     a running server

A block appears when it is committed and is then replayed step by step from its log: masks, the tokens of the step on
yellow, settled tokens from red (unsure) to green (sure), tokens behind the stop struck out. /clear forgets the
conversation, /exit ends.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from dllm.config import ConfigError, resolve
from dllm.decoding import SamplingParams
from rollout.chat.blocks import NoLog, committed
from rollout.chat.source import LocalSource, ServerSource, Source
from rollout.chat.view import BlockView
from rollout.engine import Engine, GenerateParams
from rollout.generate import load_tokenizer
from rollout.records import RolloutError
from rollout.viewer.tokens import TokenTexts

FRAMES_PER_SECOND = 20


@dataclass
class Chat:
    """A conversation on a screen.

    Attributes:
        pause: seconds that a denoise step stays on the screen.
    """

    source: Source
    tokenizer: Any
    block_size: int
    params: GenerateParams
    console: Console
    pause: float = 0.05
    seed: int | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.view = BlockView(TokenTexts(self.tokenizer))

    def ask(self, message: str) -> str:
        """Show the answer to a message being decoded, and return it.

        Raises:
            RolloutError: the engine failed the request.
            NoLog: the engine logs no reveal steps.
        """
        self.messages.append({"role": "user", "content": message})
        text = self.tokenizer.apply_chat_template(self.messages, tokenize=False, add_generation_prompt=True)
        prompt = self.tokenizer(text, add_special_tokens=False).input_ids
        shown, steps, tokens, answer = Text(), 0, 0, ""
        with Live(console=self.console, refresh_per_second=FRAMES_PER_SECOND, transient=False) as live:
            seen = 0
            for made in self.source.stream(prompt, self.params, self.seed):
                blocks = committed(made, len(prompt), self.block_size)
                for block in blocks[seen:]:
                    for frame in self.view.frames(block):
                        live.update(shown + frame, refresh=True)
                        time.sleep(self.pause)
                    shown, steps, tokens = (
                        shown + self.view.finished(block),
                        steps + block.steps,
                        tokens + len(block.ids),
                    )
                seen, answer = len(blocks), made.get("text") or ""
                reason = made["meta_info"].get("finish_reason") or {}
            live.update(shown, refresh=True)
        if reason.get("type") == "abort":
            raise RolloutError(str(reason.get("message") or reason))
        self.console.print(
            f"{tokens} tokens in {steps} steps, {tokens / max(1, steps):.1f} a step ({reason.get('type')})", style="dim"
        )
        self.messages.append({"role": "assistant", "content": answer})
        return answer


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m rollout.chat", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = p.add_mutually_exclusive_group(required=True)
    where.add_argument("--model-path", help="Hugging Face checkpoint directory; starts an engine")
    where.add_argument("--url", help="address of a running server")
    p.add_argument("--tokenizer", help="directory of the tokenizer and config.json; default: the model's")
    p.add_argument("--message", action="append", help="say this and end, instead of asking; may be repeated")
    p.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    p.add_argument("--max-new-tokens", type=int, default=512)
    p.add_argument("--steps-per-second", type=float, default=20.0, help="of the replay")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--dllm-algorithm", default="SelectThenSample", help="decoder name or package.module:Class")
    p.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if one is visible")
    p.add_argument("--trust-remote-code", action="store_true")
    return p


def open_chat(args: argparse.Namespace, console: Console) -> Chat:
    """Start or find the engine.

    Raises:
        ConfigError: the preflight refused, or nothing answers at the address.
    """
    if args.steps_per_second <= 0:
        raise ConfigError(f"steps_per_second={args.steps_per_second} is not positive; use e.g. 20")
    source: Source
    if args.url:
        source = ServerSource(args.url)
        path = args.tokenizer or source.model_path()
        if not Path(path).is_dir():
            raise ConfigError(f"the server's model {path!r} is not on this machine; pass --tokenizer DIR")
        block_size = resolve(path).block_size
    else:
        path = args.tokenizer or args.model_path
        with console.status("starting the engine"):
            engine = Engine(
                args.model_path,
                dllm_algorithm=args.dllm_algorithm,
                device=args.device,
                trust_remote_code=args.trust_remote_code,
            )
        source, block_size = LocalSource(engine), engine.block_diffusion.block_size
    params = GenerateParams(SamplingParams(args.temperature), args.max_new_tokens)
    tokenizer = load_tokenizer(path, args.trust_remote_code)
    return Chat(source, tokenizer, block_size, params, console, 1 / args.steps_per_second, args.seed)


def talk(chat: Chat) -> None:
    """Ask for messages until the user ends."""
    while True:
        try:
            message = chat.console.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if message == "/exit":
            return
        if message == "/clear":
            chat.messages.clear()
        elif message:
            try:
                chat.ask(message)
            except RolloutError as error:
                chat.console.print(f"error: {error}", style="red")


def main(argv: Sequence[str] | None = None) -> int:
    args, console = parser().parse_args(argv), Console(highlight=False)
    try:
        chat = open_chat(args, console)
        try:
            for message in args.message or ():
                console.print(f"[bold]> [/bold]{message}")
                chat.ask(message)
            if not args.message:
                talk(chat)
        finally:
            chat.source.close()
    except (ConfigError, RolloutError, NoLog) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
