"""A training run as the switcher's job: what is done, whether the server answers, which ports are free."""

import socket
from pathlib import Path

from longstraw.rollout.topology.gathering import choose_free_ports
from longstraw.rollout.topology.run import Site
from longstraw.rollout.topology.stages import NO_WEIGHTS
from longstraw.rollout.topology.states import Progress
from longstraw.rollout.vllm_client.engine import EngineError, VllmEngine
from megatron.grpo.topology.commands import RAY_PORTS
from megatron.grpo.topology.config import SwitchConfig
from megatron.grpo.topology.disk import read_progress

ANSWER_SECONDS = 5.0


class LoopJob:
    """See `longstraw.rollout.topology.stages.Job`."""

    def __init__(self, config: SwitchConfig, site: Site, ready_file: Path):
        self.config, self.site, self.ready_file = config, site, ready_file
        self.last_step, self.uses_ray = config.train_iters, config.uses_ray

    def read_progress(self) -> Progress:
        """See `Job`."""
        return read_progress(self.config.checkpoints, self.config.weights, self.config.rollouts)

    def choose_ports(self, role: str) -> tuple[int, ...]:
        """See `Job`."""
        return choose_free_ports(self.site.address, len(RAY_PORTS) if role == "ray" else 1)

    def ray_answers(self, ports: tuple[int, ...]) -> bool:
        """See `Job`."""
        try:
            with socket.create_connection((self.site.address, ports[RAY_PORTS.index("gcs")]), timeout=ANSWER_SECONDS):
                return True
        except OSError:
            return False

    def server_version(self) -> int | None:
        """See `Job`."""
        if not self.ready_file.exists():
            return None
        try:
            with VllmEngine(self.ready_file, call_seconds=ANSWER_SECONDS) as engine:
                return NO_WEIGHTS if engine.weight_version is None else engine.weight_version
        except (EngineError, ValueError):
            return None  # not yet, or no longer: the server itself is watched
