"""verl's synchronous V1 trainer with our workers, our metrics and a dump of every rollout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import transfer_queue as tq
from verl.checkpoint_engine import CheckpointEngineManager
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.llm_server import LLMServerManager

from rollout.records import write_parquet
from rollout.verl.agent_loop import ERROR_TAG, LINE, REWARD_SECONDS, saved_rollouts
from rollout.verl.server import decoder_settings
from trainers.flips import MEASURE, NO_FLIPS
from trainers.metrics import gate_excess, refresh_metrics, reward_metrics, step_metrics, validation_metrics
from trainers.samples import log_samples
from trainers.schedule import threshold_of
from trainers.workers import BlockDiffusionWorker

Listener = Callable[[str, dict[str, Any]], None]
"""Called as ``listener(event, details)``; see ``BlockDiffusionTrainer`` for the events."""


class LogprobMismatch(RuntimeError):
    """Engine and trainer disagree about the log-probs of the rollouts: the trained policy is not the one that
    decoded."""


class RolloutFailed(RuntimeError):
    """A prompt's rollout or its reward raised an error."""


class BlockDiffusionTrainer(PPOTrainerSync):
    """One step: roll out, score, replay, update, refresh the engine.

    Args:
        config: verl's config with our ``dllm`` and ``recipe`` groups.
        listener: told of "validate_begin", "validate_end" (metrics), "step_begin" (step), "phase" (name),
            "step_end" (step, metrics).
    """

    def __init__(self, config: Any, listener: Listener | None = None) -> None:
        self.without_engine = saved_rollouts(config.actor_rollout_ref.rollout) is not None
        self.separate = not config.actor_rollout_ref.hybrid_engine and not self.without_engine
        # verl's switches for a trainer that starts no engine beside its workers.
        self._enable_hybrid_replicas = not (self.without_engine or self.separate)
        if self.without_engine:
            config.actor_rollout_ref.rollout.nnodes = 1
        super().__init__(config)
        self.listener = listener or (lambda event, details: None)
        self.step_lines: list[dict[str, Any]] = []
        self.reward_seconds: list[float] = []
        self.measured = False
        self.exact = config.dllm.likelihood == "exact"
        decoder = decoder_settings(config.actor_rollout_ref.rollout.engine_kwargs or {})
        self.threshold = threshold_of(decoder["algorithm"], decoder["options"])

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef, Role.RefPolicy):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(BlockDiffusionWorker)

    def _setup(self) -> None:
        super()._setup()
        if self.separate:
            # verl has this in its asynchronous trainer only (separate_async); a synchronous loop needs no more.
            self.llm_server_manager = LLMServerManager.create(config=self.config)
            self.checkpoint_manager = CheckpointEngineManager(
                config=omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine),
                actor_wg=self.actor_rollout_wg,
                replicas=self.llm_server_manager.get_replicas(),
            )

    def _get_n_gpus_for_throughput(self) -> int:
        rollout = self.config.actor_rollout_ref.rollout
        return super()._get_n_gpus_for_throughput() + self.separate * rollout.nnodes * rollout.n_gpus_per_node

    def _build_replay_buffer(self) -> ReplayBuffer:
        buffer = super()._build_replay_buffer()
        # verl polls the queue every 2 s, which would be most of a tiny model's step.
        buffer.poll_interval = 0.05
        if self.config.trainer.v1.sampler.get("sync_refill_failed_groups", False):
            return buffer
        read_status = buffer._sync_metadata_from_transfer_queue

        def read_status_strictly() -> None:
            # verl pads a failed group in training and leaves it out of the validation's mean, with a line in a
            # worker's log.
            read_status()
            for partition, failed in buffer.failure_keys.items():
                if failed:
                    tags = tq.kv_list()[partition]
                    errors = {tags[uid].get(ERROR_TAG, "see the agent loop worker's log") for uid in failed}
                    raise RolloutFailed(f"{len(failed)} prompt(s) of step {self.global_steps}: {sorted(errors)[0]}")

        buffer._sync_metadata_from_transfer_queue = read_status_strictly
        return buffer

    # Phases, told to the listener

    def on_validate_begin(self) -> None:
        super().on_validate_begin()
        self.listener("validate_begin", {"step": self.global_steps})

    def on_step_begin(self) -> None:
        super().on_step_begin()
        self.listener("step_begin", {"step": self.global_steps, "total": self.total_training_steps})

    def on_sample_begin(self) -> None:
        super().on_sample_begin()
        self.listener("phase", {"name": "rollout"})

    def on_init_end(self) -> None:
        if not self.without_engine:
            super().on_init_end()

    def on_step_end(self) -> None:
        if self.without_engine:
            return
        self.listener("phase", {"name": "weight refresh"})
        super().on_step_end()
        replicas = self.checkpoint_manager.replicas
        costs = ray.get([replica.servers[0].get_refresh_metrics.remote() for replica in replicas])
        self._pending_sync_metrics = refresh_metrics(costs, self.step_lines, self.global_steps)

    def _validate(self) -> dict[str, float]:
        metrics = super()._validate()
        self.listener("validate_end", {"step": self.global_steps, "metrics": metrics})
        return metrics

    def _val_metrics_update(
        self, data_sources: Any, sample_uids: Any, reward_extra_infos_dict: dict[str, list], *rest: Any, **more: Any
    ) -> dict[str, float]:
        """verl's numbers and ours, which are those of warm starts and of ``recipes.evaluate``."""
        metrics = super()._val_metrics_update(data_sources, sample_uids, reward_extra_infos_dict, *rest, **more)
        return metrics | validation_metrics(sample_uids, reward_extra_infos_dict)

    def _update_actor(self, batch: Any, metrics: dict) -> Any:
        self.listener("phase", {"name": "update"})
        return super()._update_actor(batch, metrics)

    # Engine against trainer

    def _compute_old_log_prob(self, batch: Any, metrics: dict) -> Any:
        self.listener("phase", {"name": "log-probs"})
        asked = self.config.dllm
        due = asked.measure_every > 0 and (self.global_steps - 1) % asked.measure_every == 0
        self.measured = self.exact and due and asked.measure_states + asked.measure_routing > 0
        batch.extra_info[MEASURE] = asked.measure_states if self.measured else NO_FLIPS
        batch = super()._compute_old_log_prob(batch, metrics)
        self.step_lines = self.rollout_lines(batch)
        ours = step_metrics(self.step_lines, self.threshold) | reward_metrics(self.reward_seconds)
        metrics.update(ours)
        limit = self.config.dllm.max_logprob_diff
        if (worst := gate_excess(ours, limit)) is not None:
            self.write_lines(f"{self.global_steps}.jsonl")
            raise LogprobMismatch(
                f"step {self.global_steps}: 0.1 % of the tokens differ by {worst:.3g} nats or more between engine "
                f"and trainer (dllm.max_logprob_diff={limit}); the rollouts are in "
                f"{self.config.trainer.rollout_data_dir}, check them with python -m recipes.check_logprobs"
            )
        return batch

    def rollout_lines(self, batch: Any) -> list[dict[str, Any]]:
        """The step's samples as lines of a rollout file, with the trainer's view of them beside the engine's."""
        real = [i for i, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
        flips = ["schedule_flip", "router_flip"] if self.measured else []
        fields = ["uid", "extra_fields", "old_log_probs", "router_tie", "response_mask", "rm_scores", "reward_model"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields + flips)
        columns = {name: data[name] for name in ("old_log_probs", "router_tie", "rm_scores", *flips)}
        unbound = {name: value.unbind() for name, value in columns.items()}
        extra, uids, rewards = (list(data[name]) for name in ("extra_fields", "uid", "reward_model"))
        self.reward_seconds = [float(extra[i].get(REWARD_SECONDS) or 0.0) for i in real]
        lines = []
        for i in real:
            line = dict(extra[i][LINE])
            logprob = unbound["old_log_probs"][i].tolist()
            # verl keeps what belongs to a response token one place earlier.
            ours = slice(-len(logprob) - 1, -1)
            reward, truth = float(unbound["rm_scores"][i].sum()), rewards[i].get("ground_truth")
            line.update(
                step=self.global_steps,
                uid=uids[i],
                reward=reward,
                ground_truth=truth,
                # The fields of verl's own dump, under its names.
                input=self.tokenizer.decode(line["input_ids"], skip_special_tokens=True),
                output=line["text"],
                gts=truth,
                score=reward,
                router_tie=[bool(v) for v in unbound["router_tie"][i][ours].tolist()],
                # 0 stands for what was not measured; rows of padding have nothing else.
                **{name: [v - 1.0 for v in unbound[name][i][ours].tolist()] for name in flips},
            )
            line["trainer_logprob" if self.exact else "trainer_likelihood"] = logprob
            line.update(
                {k: v for k, v in (extra[i].get("reward_extra_info") or {}).items() if k in ("acc", "malformed")}
            )
            lines.append(line)
        # uids are random; this order is the same in every run with one seed.
        return sorted(lines, key=lambda line: (line["input_ids"], line["sampling_params"]["seed"] or 0))

    # Records

    def write_lines(self, name: str) -> None:
        directory = Path(self.config.trainer.rollout_data_dir)
        directory.mkdir(parents=True, exist_ok=True)
        temporary = directory / (name + ".part")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in self.step_lines)
        temporary.replace(directory / name)
        if (saved := self.config.recipe.save_debug_rollouts) is not None:
            Path(saved).mkdir(parents=True, exist_ok=True)
            write_parquet(Path(saved) / f"{Path(name).stem}.parquet", self.step_lines)

    def _log_rollout_data(self, batch: Any, timing_raw: dict, rollout_data_dir: str) -> None:
        self.write_lines(f"{self.global_steps}.jsonl")
        log_samples(self.logger, self.step_lines, self.config.recipe.wandb_samples, self.global_steps)

    def _compute_metrics(self, batch: Any, metrics: dict, timing_raw: dict, global_steps: int, epoch: int) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        if not self.exact:
            # verl compares the engine's log-probs with values of another likelihood.
            for key in [k for k in metrics if k.startswith(("rollout_corr/", "training/rollout_"))]:
                del metrics[key]
        self.listener("step_end", {"step": global_steps, "metrics": metrics, "lines": self.step_lines})
