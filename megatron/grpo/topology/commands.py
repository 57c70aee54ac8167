"""What each role runs on a host.

| role | where | program |
|---|---|---|
| trainer | every host | tools/launch.py, which starts the host's ranks of megatron.grpo.train for one step |
| exporter | every host | the same, which writes the weights of its checkpoint and takes no step |
| ray | every host, with --rollout-backend ray | ray start, as the head on the first host |
| server | first host | longstraw.rollout.vllm_server, in vLLM's environment |
| sync | first host | longstraw.rollout.vllm_client.catch_up: what the folder that the server has loaded lacks |
| generator | first host | megatron.grpo.train --rollout-only |
"""

import argparse
import hashlib
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from longstraw.rollout.topology.command import Command
from longstraw.rollout.topology.devices import choose_devices
from longstraw.rollout.topology.run import LOOPBACK, Site
from longstraw.rollout.vllm_client.process import find_vllm_python, server_environment
from longstraw.rollout.vllm_server.flags import parse_config as parse_server_flags
from megatron.grpo.topology.config import SwitchConfig
from megatron.grpo.topology.disk import choose_start

ROOT = Path(__file__).resolve().parents[3]
PLANNED_VENV = ROOT / ".venv-vllm"
RAY_PORTS = ("gcs", "node", "objects", "agent", "agent_grpc", "environments", "metrics", "client")
TRAINER_OWNED = (
    "--save", "--load", "--train-iters", "--exit-interval", "--output-dir", "--rollouts-from", "--rollout-store",
    "--rollout-only", "--rollout-engine", "--rollout-server", "--weight-sync", "--weight-sync-dir",
    "--weight-sync-only",
)
SERVER_OWNED = (
    "--model", "--ready-file", "--owner-pid", "--bind-address", "--weight-version", "--await-sync", "--tensor-parallel-size",
    "--pipeline-parallel-size", "--distributed-executor-backend", "--max-lora-rank",
)


def check_flags(flags: Sequence[str], owned: Sequence[str], of: str) -> None:
    """Raise ValueError where flags of a program are given that the switcher gives itself."""
    taken = sorted({word.split("=")[0] for word in flags} & set(owned))
    if taken:
        raise ValueError(f"{', '.join(taken)} among the flags of the {of}: the switcher sets {'them' if len(taken) > 1 else 'it'}")


def check_server_flags(config: SwitchConfig, flags: Sequence[str], trainer_flags: Sequence[str]) -> str:
    """End with status 2 and the server's own sentence where it would refuse its flags, or --model or the ranks for it.

    Returns a warning, "" for none: with --plan, which may be read on another machine, the model need not be there. Raises
    ValueError where the switcher's flags do not fit the trainer's.
    """
    layout = _list_layout(config, trainer_flags)
    there = Path(config.model, "config.json").is_file()
    parse_server_flags(
        [*layout, "--model", config.model, "--ready-file", "-", *flags], needs_model=not config.plan and _serves(config),
    )
    return "" if there else f"--model {config.model} has no config.json here, so it is not checked: a run would be refused"


def _serves(config: SwitchConfig) -> bool:
    """Whether ranks of the engine may run on this host."""
    return config.node_rank == 0 or config.uses_ray


def find_lora_rank(trainer_flags: Sequence[str]) -> int:
    """The trainer's --lora-rank, 0 where it has none. Raises ValueError where its value is no number."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--lora-rank", type=int, default=0)
    try:
        return parser.parse_known_args(list(trainer_flags))[0].lora_rank
    except argparse.ArgumentError as error:
        raise ValueError(f"{error} among the flags of the trainer") from None


def _list_layout(config: SwitchConfig, trainer_flags: Sequence[str]) -> list[str]:
    """The server's flags of its ranks and adapters. Raises ValueError where adapters are synced that nobody trains."""
    layout = [
        "--tensor-parallel-size", str(config.rollout_tensor_parallel_size),
        "--pipeline-parallel-size", str(config.rollout_pipeline_parallel_size),
    ]
    if config.weight_sync == "lora":
        rank = find_lora_rank(trainer_flags)
        if rank < 1:
            raise ValueError("--weight-sync lora sends the pairs of --lora-rank, which is not among the flags of the trainer")
        layout += ["--max-lora-rank", str(rank)]
    return layout


@dataclass(frozen=True, kw_only=True)
class Commands:
    """Builds the commands of one host."""

    config: SwitchConfig
    site: Site
    trainer_flags: tuple[str, ...]
    server_flags: tuple[str, ...]
    grace_seconds: float
    ray_secret: str = ""
    planned: bool = False
    """Commands are printed only: vLLM's environment need not be there."""

    @property
    def ready_file(self) -> Path:
        """Where the server says how it is reached."""
        return self.config.switch / "server.json"

    def build(self, role: str, step: int, ports: tuple[int, ...]) -> Command:
        """The command of a role for a step. Raises ValueError where a program or folder that it needs is missing."""
        arguments, environment, scratch = getattr(self, f"_build_{role}")(step, ports)
        return Command(
            arguments=tuple(map(str, arguments)), environment=environment, scratch=scratch,
            # torchrun and vLLM need a moment beyond what their own programs may take.
            grace_seconds=self.grace_seconds + 10.0,
            log=self.config.switch / "logs" / f"step-{step:06d}.{role}.node-{self.site.rank}.log",
        )

    def _build_trainer(self, step: int, ports: tuple[int, ...]):
        # One step a process: --train-iters stays that of the whole run, since schedules end with it.
        return self._launch("trainer", step, ports, ["--rollouts-from", self.config.rollouts, "--exit-interval", 1])

    def _build_exporter(self, step: int, ports: tuple[int, ...]):
        return self._launch("exporter", step, ports, ["--weight-sync-only"])

    def _launch(self, role: str, step: int, ports: tuple[int, ...], own: list):
        config, launch = self.config, [sys.executable, ROOT / "tools/launch.py"]
        launch += ["--nproc-per-node", config.nproc_per_node, "--grace-seconds", f"{self.grace_seconds:g}"]
        launch += ["--log-dir", self.config.switch / "logs" / f"step-{step:06d}.{role}"]
        environment = self._environment()
        if self.site.count > 1:
            environment |= {
                "NNODES": str(self.site.count), "NODE_RANK": str(self.site.rank), "MASTER_ADDR": self.site.leader,
                "MASTER_PORT": str(ports[0]),
            }
        return [*launch, "-m", "megatron.grpo.train", *self._training_flags(), *own], environment, ()

    def _build_generator(self, step: int, ports: tuple[int, ...]):
        own = ["--rollout-only", "--rollout-steps", 1, "--rollout-engine", "vllm", "--rollout-server", self.ready_file]
        own += ["--rollout-store", self.config.rollouts]
        environment = self._environment()
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment.setdefault("TORCH_COMPILE_DISABLE", "1")
        return [sys.executable, "-m", "megatron.grpo.train", *self._training_flags(), *own], environment, ()

    def _training_flags(self) -> list:
        config = self.config
        return [
            *self.trainer_flags, "--train-iters", config.train_iters, "--save", config.checkpoints, "--load",
            config.checkpoints, "--output-dir", Path(config.run_dir, "train"), "--weight-sync", config.weight_sync,
            "--weight-sync-dir", config.weights,
        ]

    def _build_server(self, step: int, ports: tuple[int, ...]):
        config, environment = self.config, server_environment()
        folder, whole = choose_start(config.weights, Path(config.model), step - 1)
        flags = ["--model", folder.resolve(), *([] if whole else ["--await-sync"])]
        flags += _list_layout(config, self.trainer_flags)
        flags += ["--bind-address", self.site.address if config.uses_ray else LOOPBACK]
        if config.uses_ray:
            flags += ["--distributed-executor-backend", "ray"]
            environment |= self._interface() | self._ray_environment() | {"RAY_ADDRESS": f"{self.site.leader}:{ports[0]}"}
        flags = [*map(str, flags), *self.server_flags]
        command = [self._vllm_program("python"), "-m", "longstraw.rollout.vllm_server", *flags]
        command += ["--ready-file", self.ready_file, "--owner-pid", "SWITCHER" if self.planned else os.getpid()]
        return command, environment, (self.ready_file,)

    def _build_sync(self, step: int, ports: tuple[int, ...]):
        program = [sys.executable, "-m", "longstraw.rollout.vllm_client.catch_up", "--ready-file", self.ready_file]
        program += ["--weight-sync-dir", self.config.weights, "--version", step - 1]
        return program, self._environment(), ()

    def _build_ray(self, step: int, ports: tuple[int, ...]):
        config, head = self.config, self.site.rank == 0
        given = dict(zip(RAY_PORTS, ports))
        arguments = [self._vllm_program("ray"), "start", "--block", "--node-ip-address", self.site.address]
        if head:
            # Only the head's ports can be asked from this host's system; the others' take what theirs gives them.
            arguments += ["--head", "--port", given["gcs"], "--node-manager-port", given["node"]]
            arguments += ["--object-manager-port", given["objects"], "--dashboard-agent-listen-port", given["agent"]]
            arguments += ["--dashboard-agent-grpc-port", given["agent_grpc"], "--metrics-export-port", given["metrics"]]
            arguments += ["--runtime-env-agent-port", given["environments"], "--ray-client-server-port", given["client"]]
            arguments += ["--include-dashboard", "false"]
        else:
            arguments += ["--address", f"{self.site.leader}:{given['gcs']}"]
        arguments += ["--min-worker-port", 0, "--max-worker-port", 0, "--disable-usage-stats"]
        arguments += ["--num-cpus", config.ray_cpus_per_node or config.nproc_per_node, "--temp-dir", self.ray_folder]
        if self.planned or choose_devices(os.environ) != ():
            arguments += ["--num-gpus", config.nproc_per_node]
        return arguments, server_environment() | self._interface() | self._ray_environment(), (self.ray_folder,)

    def _vllm_program(self, name: str) -> Path:
        return Path(PLANNED_VENV, "bin", name) if self.planned else find_vllm_python().with_name(name)

    @property
    def ray_folder(self) -> Path:
        """Ray's own files on this host: of this run alone, and short, as sockets lie below it."""
        name = hashlib.sha256(f"{self.ray_secret} {self.site.rank}".encode()).hexdigest()[:8]
        return Path(tempfile.gettempdir(), f"longstraw-ray-{name}")

    def _ray_environment(self) -> dict[str, str]:
        return {
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.ray_secret, "RAY_USAGE_STATS_ENABLED": "0",
            "VLLM_HOST_IP": self.site.address,
        }

    def _environment(self) -> dict[str, str]:
        """The switcher's own, with the project's folder first on the path of imports."""
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        return dict(os.environ) | {"PYTHONPATH": path} | self._interface()

    def _interface(self) -> dict[str, str]:
        """With several hosts, the network interface on which they reach each other, for gloo; one that is set already
        stands."""
        if self.site.count == 1 or not self.site.interface or "GLOO_SOCKET_IFNAME" in os.environ:
            return {}
        return {"GLOO_SOCKET_IFNAME": self.site.interface}
