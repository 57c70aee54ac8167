"""Flags of tools/switch_topology: the run, its hosts and the rollout side. Every field is a flag.

Left out: what the trainer and the engine take by themselves, which stands behind `--` on the command line; deadlines
are `longstraw.rollout.topology.config`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Optional


@dataclass(frozen=True, kw_only=True)
class SwitchConfig:
    """One run that trains and generates in turn."""

    run_dir: str
    """Folder of the run, on a file system that all hosts share: checkpoints/, rollouts/, weights/, train/ (metrics,
    receipt), switch/ (journal, logs). The same command goes on with what lies there."""

    model: str
    """Hugging Face folder of the weights that the run starts from, the same that the trainer starts from: the engine
    serves them for the first step, and takes its architecture from it."""

    train_iters: int
    """Steps of the whole run: --train-iters of the trainer."""

    nproc_per_node: int = 1
    """Ranks of the trainer on each host: its GPUs."""

    num_nodes: int = 1
    """Hosts of the run."""

    node_rank: int = 0
    """Which of them this is. The first one leads, serves and generates."""

    rendezvous: Optional[str] = None
    """Name or address of the first host, at which the others reach its switcher: HOST, or HOST:PORT where only certain
    ports are open. Needed with --num-nodes above 1."""

    weight_sync: Literal["full", "delta", "lora"] = "full"
    """How a step's weights reach the engine: --weight-sync of the trainer. Its other flags of the kind are given among
    its own."""

    weight_sync_dir: Optional[str] = None
    """Folder of the weights for the engine, on a fast file system that trainer and server share: /dev/shm or node-local
    on one host. Default: RUN_DIR/weights."""

    rollout_tensor_parallel_size: int = 1
    """Ranks that the engine cuts each layer over."""

    rollout_pipeline_parallel_size: int = 1
    """Ranks that the engine divides the layers among."""

    rollout_backend: Optional[Literal["mp", "ray"]] = None
    """mp: the engine's ranks are processes of the first host. ray: they are spread over all hosts by a Ray cluster that
    is started for the rollout and ended after it. Default: ray where they are more than --nproc-per-node."""

    ray_cpus_per_node: int = 0
    """With Ray and no GPUs: processors that each host offers to the engine's ranks, one for each. Default:
    --nproc-per-node."""

    plan: bool = False
    """Print the commands of every state and host, and end."""

    def __post_init__(self) -> None:
        """Refuse what cannot be run.

        Raises:
            ValueError: in one sentence that names the flags.
        """
        for name in ("run_dir", "model"):
            if not getattr(self, name):
                raise ValueError(f"--{name.replace('_', '-')} must name a folder")
        for name in ("train_iters", "nproc_per_node", "num_nodes", "rollout_tensor_parallel_size",
                     "rollout_pipeline_parallel_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        if self.ray_cpus_per_node < 0:
            raise ValueError(f"--ray-cpus-per-node must not be negative, not {self.ray_cpus_per_node}")
        if not 0 <= self.node_rank < self.num_nodes:
            raise ValueError(f"--node-rank {self.node_rank} numbers none of --num-nodes {self.num_nodes} hosts")
        if self.num_nodes > 1 and not self.rendezvous:
            raise ValueError(f"--num-nodes {self.num_nodes} needs --rendezvous, the name or address of the first host")
        ranks, devices = self.rollout_ranks, self.num_nodes * self.nproc_per_node
        if ranks > devices:
            raise ValueError(
                f"--rollout-tensor-parallel-size {self.rollout_tensor_parallel_size} x --rollout-pipeline-parallel-size "
                f"{self.rollout_pipeline_parallel_size} are {ranks} ranks, more than the {devices} devices of --num-nodes "
                f"{self.num_nodes} x --nproc-per-node {self.nproc_per_node}"
            )
        if self.rollout_backend == "mp" and ranks > self.nproc_per_node:
            raise ValueError(
                f"--rollout-backend mp runs all {ranks} ranks of the engine on the first host, which has --nproc-per-node "
                f"{self.nproc_per_node} devices: use ray"
            )

    @property
    def rollout_ranks(self) -> int:
        """Ranks of the engine."""
        return self.rollout_tensor_parallel_size * self.rollout_pipeline_parallel_size

    @property
    def uses_ray(self) -> bool:
        """Whether the engine's ranks are Ray's."""
        return self.rollout_backend == "ray" or (self.rollout_backend is None and self.rollout_ranks > self.nproc_per_node)

    @property
    def checkpoints(self) -> Path:
        """--save and --load of the trainer."""
        return Path(self.run_dir, "checkpoints")

    @property
    def rollouts(self) -> Path:
        """--rollout-store of the generator, --rollouts-from of the trainer."""
        return Path(self.run_dir, "rollouts")

    @property
    def weights(self) -> Path:
        """--weight-sync-dir of the trainer."""
        return Path(self.weight_sync_dir or Path(self.run_dir, "weights"))

    @property
    def switch(self) -> Path:
        """What the switcher writes."""
        return Path(self.run_dir, "switch")
