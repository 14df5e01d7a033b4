"""GRPO on a LLaDA2, end to end: stock SGLang rolls out, stock verl trains.

    python -m recipes.grpo_llada2                                     # a tiny model, on a CPU or one GPU
    python -m recipes.grpo_llada2 hardware=gpu1 model=llada2_mini actor_rollout_ref.model.path=DIR
    python -m recipes.grpo_llada2 hardware=separate trainer.n_gpus_per_node=2       # engines on GPUs of their own
    python -m recipes.grpo_llada2 --dllm-algorithm NAME [--dllm-algorithm-config FILE.yaml]   # dllm.algorithm, .options
    python -m recipes.grpo_llada2 recipe.run=NAME trainer.resume_mode=auto     # go on with a run
    python -m recipes.grpo_llada2 recipe.dry_run=true                          # show the config, start nothing
    python -m recipes.grpo_llada2 --save-debug-rollouts DIR                    # every rollout as parquet, too
    python -m recipes.grpo_llada2 --load-debug-rollouts DIR trainer.val_before_train=false trainer.test_freq=-1
                                                                               # train from them, without an engine

Every key of verl's config can be overridden, and the groups hardware (auto, cpu, gpu1, gpus, separate, separate_cpu),
model (tiny, llada2_mini, llada2_flash) and task (see recipes/config/task).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dllm.config import ConfigError
from recipes.compose import ResolvedRun, as_overrides, resolve_run
from recipes.host import choose_hardware, host_report


def prepare_environment(device: str, run_dir: Path) -> None:
    """Environment of this process and all its workers; must come before verl or SGLang is imported."""
    os.environ["VERL_USE_EXTERNAL_MODULES"] = "rollout.verl"
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("VERL_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
    # Ray reads it when imported. Its hook for `uv run` packs the working directory and fails on verl's runtime
    # environment, which says working_dir=None; our workers start from the driver's interpreter anyway.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    os.environ["WANDB_DIR"] = str(run_dir)
    os.environ.setdefault("WANDB_SILENT", "true")
    if not (os.environ.get("WANDB_API_KEY") or "api.wandb.ai" in _netrc()):
        os.environ.setdefault("WANDB_MODE", "offline")
    if device == "cpu":
        from rollout.plugin.cpu import prepare_environment as prepare_cpu

        os.environ["VERL_PLATFORM"] = "cpu"
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        prepare_cpu()


def _netrc() -> str:
    path = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    return path.read_text() if path.is_file() else ""


def execute(run: ResolvedRun) -> dict[str, Any]:
    """Train, then write plots and summary; what was written stays if the training fails.

    Output of the libraries goes to ``driver.log``; the terminal shows progress only.
    """
    from recipes.console import RunConsole, library_output_to
    from recipes.records import RunRecorder
    from recipes.summary import finish_run

    started = time.time()
    run.directory.mkdir(parents=True, exist_ok=True)
    run.write_config()
    recorder = RunRecorder(run.directory)
    with library_output_to(run.directory / "driver.log") as terminal, RunConsole(terminal) as console:

        def listener(event: str, details: dict) -> None:
            recorder(event, details)
            console(event, details)

        try:
            from trainers.runner import train

            train(run.config, listener)
        finally:
            recorder.close()
        return finish_run(run, console.seconds, time.time() - started)


def print_summary(directory: Path, summary: dict) -> None:
    from recipes.summary import step_table

    before, after = summary["val_accuracy_before"], summary["val_accuracy_after"]
    speed = summary["host"]["fp32_gflops_per_core"]
    held_out = (
        "no validation"
        if before is None
        else f"held-out accuracy {before:.3f} -> {after:.3f} ({summary['val_prompts']} prompts)"
    )
    print(
        f"\n{held_out}, {summary['steps']} steps in {summary['wall_s']:.0f} s on {summary['device']} "
        f"({speed} GFLOP/s a core)"
    )
    if "logprob_abs_diff_p999" in summary:
        print(
            f"log-prob difference engine - trainer: p99.9 {summary['logprob_abs_diff_p999']:.1e}, "
            f"max {summary['logprob_abs_diff_max']:.1e} ({summary['router_tie_tokens']} tokens with a router tie)"
        )
    for line in step_table(summary.get("step_seconds", {})):
        print(line)
    print(f"files in {directory}:")
    for name, what in (
        ("config.yaml", "resolved config"),
        ("metrics.jsonl", "every metric of every step"),
        ("rollouts/", "every rollout with its log"),
        ("plots/", "curves"),
        ("summary.json", "this summary"),
        ("checkpoints/", "resume with recipe.run=" + directory.name + " trainer.resume_mode=auto"),
        ("wandb/", "Weights & Biases run"),
        ("driver.log", "output of the libraries"),
    ):
        if (directory / name).exists():
            print(f"  {name:<14} {what}")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if any(a in ("-h", "--help") for a in arguments):
        print(__doc__)
        return 0
    try:
        arguments = as_overrides(arguments)
        requested = next((a.partition("=")[2] for a in arguments if a.startswith("hardware=")), "auto")
        hardware, why = choose_hardware(requested)
        print(f"hardware={hardware} ({why}); {json.dumps(host_report())}", flush=True)
        run = resolve_run([a for a in arguments if not a.startswith("hardware=")], hardware)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if run.recipe.dry_run:
        print(run.yaml())
        print(run.report.describe())
        print("preflight: ok")
        return 0
    prepare_environment(run.config.trainer.device, run.directory)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(f"run {run.directory}", flush=True)
    try:
        print_summary(run.directory, execute(run))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\ninterrupted; what was written is in {run.directory}", file=sys.stderr)
        return 130
    except Exception as error:
        print(
            f"error: {describe_failure(error)}\nwhat was written, and driver.log, are in {run.directory}",
            file=sys.stderr,
        )
        return 1
    return 0


def describe_failure(error: BaseException) -> str:
    """A failure in one paragraph: type, message and, for an error in a worker, where it was raised."""
    cause = getattr(error, "cause", None)
    text = f"{type(cause or error).__name__}: {cause or error}"
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[:1] + (["..."] if len(lines) > 25 else []) + lines[1:][-24:])


if __name__ == "__main__":
    sys.exit(main())
