"""SGLang general plugin (entry point group ``sglang.srt.plugins``).

SGLang calls ``register`` in every process before the engine starts. This package is the only place that knows
SGLang's internals; each hook is in the module of what it changes:

    settings.py     block size, mask id and batch limit of the engine; preflight before the start
    algorithm.py    our decoders behind SGLang's ``DllmAlgorithm`` interface
    finish.py       where a response stops, and the log that leaves with it
    abort.py        aborts at a block boundary
    prefill.py      prompts in large chunks
    metrics.py      Prometheus metrics
    routing.py      experts of each token at its reveal, on request
    version.py      which weights a block was decoded with
    requests.py     requests that are refused on every endpoint
    refusals.py     400 instead of 500 where a request's content breaks a handler
    keys.py         settings told without the server's keys
    fence.py        closing the engine for a weight refresh
    cpu.py          what SGLang's CPU engine lacks for LLaDA2
    loading.py      no engine without all of these
"""

from __future__ import annotations


def register() -> None:
    """Install all hooks; called once per process by SGLang's plugin loader.

    Raises:
        Exception: a hook cannot be installed. SGLang only logs it; an engine of this process then refuses to start.
    """
    from rollout.plugin import loading

    try:
        install()
    except Exception as error:
        loading.failed(error)
        raise
    loading.loaded()


def install() -> None:
    """Install the hooks of every module."""
    from rollout.plugin import (
        abort,
        algorithm,
        cpu,
        fence,
        finish,
        keys,
        metrics,
        prefill,
        refusals,
        requests,
        routing,
        settings,
        version,
    )

    cpu.prepare_environment()
    for module in (
        settings,
        algorithm,
        prefill,
        finish,
        abort,
        routing,
        version,
        fence,
        requests,
        refusals,
        keys,
        metrics,
        cpu,
    ):
        module.install()
