"""A complete receipt and a run's metrics to vary."""

from longstraw.receipts.receipt import Check, Model, RankMemory, Receipt, ResidentState, Results, Tokens, Topology, Versions


def make_record(step: int, **changes) -> dict:
    return {"step": step, "reward_mean": 0.1 * step, "loss": -0.01, "kl": 0.0, "grad_norm": 1.5, "seconds": 2.0,
            "peak_bytes": 1000 + step, **changes}


def make_receipt(**changes) -> Receipt:
    return Receipt(**{
        "command": ("train", "--seed", "7"), "seed": 7, "semantics": "exact",
        "started": "2026-01-02T03:04:05+00:00", "finished": "2026-01-02T03:05:05+00:00",
        "versions": Versions(longstraw="0.1.0", torch="2.13.0", megatron_core="0.19.2", python="3.12.1", others={}),
        "topology": Topology(world_size=2, tensor_model_parallel_size=1, context_parallel_size=2, data_parallel_size=1,
                             backend="gloo", device="cpu"),
        "model": Model(preset="tiny", parameters=10, dtype="float32", initial_weights="sha256:0", final_weights="sha256:1"),
        "rollout": {"source": "store", "sampled_by": "vllm", "store": "rollouts", "log_ratio_mean": -0.01},
        "objective": {"group_size": 8, "clip_range_low": 0.2, "loss_constant": None, "importance_level": "token"},
        "tokens": Tokens(prompts=3, responses=24, prompt_tokens=300, response_tokens=48, loss_tokens=47),
        "state": (ResidentState(rank=1, owner=1, kind="kv_pages", residency="host", layers=1, rows=50, bytes=400),),
        "memory": tuple(RankMemory(rank=rank, peak_bytes=5000, categories={"weights": 1000, "graph": 900}) for rank in (0, 1)),
        "seconds": {"capture": 20.0, "replay": 35.5}, "metrics": {"loss": -0.5, "kl": None},
        "results": Results(first_step=1, last_step=3, first_eval_reward_mean=0.25, last_eval_reward_mean=None),
        "checks": (Check(name="first ratio", passed=True, value=1.0, bound=1.0),), **changes})
