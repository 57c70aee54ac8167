"""Where a step's rollouts come from and where they go: flags of the training program.

Left out: how responses are sampled (`longstraw.rollout.config`) and what disagreement with the sampler does to the loss.
"""

from dataclasses import dataclass
from typing import Literal, Optional


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Rollout source and store."""

    rollout_engine: Literal["resident", "vllm"] = "resident"
    """Who samples: `resident`, this program from the prompt state that it has captured, or `vllm`, a server that
    --rollout-server names. Evaluations are always sampled by this program."""

    rollout_server: Optional[str] = None
    """File of the vLLM server that samples: the --ready-file that longstraw.rollout.vllm_server writes once it can answer.
    With --weight-sync-dir the server is brought to each step's weights from there. While the trainer waits for it, an answer
    must come within --distributed-timeout-minutes."""

    rollout_store: Optional[str] = None
    """Folder that each step's rollouts and rewards are written to, as Parquet with a manifest, before the step trains on
    them."""

    rollouts_from: Optional[str] = None
    """Train on the rollouts and rewards that --rollout-store has left in this folder, step by step; nothing is sampled but
    for evaluations. Data and sampling flags must be those of the run that wrote it; the parallel sizes need not be."""

    rollout_only: bool = False
    """Sample and score into --rollout-store, by --rollout-engine vllm, and end: one process, no model. Takes the training
    run's command line with this flag added. A step that is in the store already is not sampled again."""

    rollout_steps: int = 1
    """Steps that --rollout-only samples at most, beginning with the one that trains the weights that the engine holds. Those
    after it need --weight-sync-dir to have their weights, or an engine that somebody moves on meanwhile."""

    rollout_router_replay: bool = False
    """In the replay, send each row of a response to the experts that the sampler sent it to, with live gates, instead of
    letting the router choose. The resident engine and stores that it wrote have these choices; vLLM's server returns none."""

    def __post_init__(self) -> None:
        """Refuse sources that exclude each other.

        Raises:
            ValueError: in one sentence that names the flags.
        """
        if self.rollout_engine not in ("resident", "vllm"):
            raise ValueError(f"--rollout-engine must be resident or vllm, not {self.rollout_engine!r}")
        for name in ("rollout_server", "rollout_store", "rollouts_from"):
            if getattr(self, name) == "":
                raise ValueError(f"--{name.replace('_', '-')} must name a path")
        if self.rollout_engine == "vllm" and not self.rollout_server:
            raise ValueError("--rollout-engine vllm needs --rollout-server, the file that the server writes when it is ready")
        if self.rollout_server and self.rollout_engine != "vllm":
            raise ValueError(f"--rollout-server {self.rollout_server} is read only with --rollout-engine vllm")
        if self.rollouts_from:
            for flag, given in (
                ("--rollout-engine vllm", self.rollout_engine == "vllm"), ("--rollout-only", self.rollout_only),
                (f"--rollout-store {self.rollout_store}", self.rollout_store),
            ):
                if given:
                    raise ValueError(
                        f"--rollouts-from {self.rollouts_from} samples nothing, which {flag} would: use one of them"
                    )
        if self.rollout_only and self.rollout_engine != "vllm":
            raise ValueError("--rollout-only builds no model to sample from: it needs --rollout-engine vllm")
        if self.rollout_only and not self.rollout_store:
            raise ValueError("--rollout-only needs --rollout-store, the folder of the rollouts")
        if self.rollout_router_replay and self.rollout_engine == "vllm":
            raise ValueError(
                "--rollout-router-replay needs the sampler's choices of experts, which the server of --rollout-engine vllm "
                "does not return"
            )
        if self.rollout_steps < 1:
            raise ValueError(f"--rollout-steps must be at least 1, not {self.rollout_steps}")
