"""Custom weight loader inside the engine: ``--custom-weight-loader weight_sync.loader.load``.

Runs in every tensor-parallel worker. It never raises, because an exception there kills the scheduler; instead it
keeps a status, which the plugin turns into the answer of the update request.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weight_sync.buckets import view
from weight_sync.messages import BucketSpec, LoaderStatus

logger = logging.getLogger(__name__)


@dataclass
class Session:
    """An update in progress: which bucket is next and which tensors have arrived."""

    run_id: str
    version: str
    next_index: int = 0
    loaded: set[str] = field(default_factory=set)


@dataclass
class LoaderState:
    """State of this worker, read by the plugin after every update request."""

    session: Session | None = None
    status: LoaderStatus | None = None


STATE = LoaderState()


def load(model: Any, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Load one bucket: a single (header, bytes) pair (see ``weight_sync.messages.BucketSpec``)."""
    try:
        [(header, data)] = named_tensors
        STATE.status = _load(model, BucketSpec.decode(header), data)
    except Exception as error:
        logger.exception("weight update failed")
        STATE.session = None
        STATE.status = LoaderStatus(False, f"{type(error).__name__}: {error}")


def _load(model: Any, spec: BucketSpec, data: Tensor) -> LoaderStatus:
    session = STATE.session
    if spec.index == 0:
        session = STATE.session = Session(spec.run_id, spec.version)
    if session is None or (session.run_id, session.version) != (spec.run_id, spec.version):
        return LoaderStatus(False, f"bucket {spec.index} of version {spec.version} has no open update; start over")
    if spec.index != session.next_index:
        return LoaderStatus(False, f"bucket {spec.index} arrived where {session.next_index} was due; start over")
    if spec.file is not None:
        data = torch.from_numpy(np.memmap(spec.file, dtype=np.uint8, mode="r+"))
    named = [(placement.name, view(data, placement)) for placement in spec.placements]
    if repeated := session.loaded.intersection(name for name, _ in named):
        return LoaderStatus(False, f"tensor {min(repeated)!r} arrived twice")
    with torch.no_grad():
        model.load_weights(iter(named))
    if data.is_cuda:
        # The sender reuses its buffer as soon as it is told of success.
        torch.cuda.synchronize(data.device)
    session.loaded.update(name for name, _ in named)
    session.next_index += 1
    if spec.last:
        STATE.session = None
        missing = expected_names(model) - session.loaded
        if missing:
            return LoaderStatus(False, f"{len(missing)} tensors never arrived, e.g. {min(missing)!r}")
    return LoaderStatus(True, tensors=len(named), nbytes=data.numel())


def expected_names(model: Any) -> set[str]:
    """Checkpoint names of everything the engine's model holds."""
    from weight_sync.layout import CheckpointLayout

    return set(CheckpointLayout.from_config(model.config.to_dict()).specs)
