"""Generation alone (--rollout-only) in one process, into a store that must be the one that a resident run left.

    rollout_only_run.py FOLDER

FOLDER has data/, and what rollout_engine_ranks.py made: context-store, and the run's flags.
"""

import contextlib
import dataclasses
import io
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from longstraw.rollout.store import RolloutStore
from longstraw.transaction.commit import StepRejected
from megatron.grpo.arguments import Machine, parse_arguments
from megatron.grpo.rollout_only import roll_out_only
from tests.support.recorded_engine import RecordedEngine

FOLDER = Path(sys.argv[1])
SOURCE = RolloutStore(FOLDER / "context-store")
FLAGS = (
    f"--model-preset tiny-qwen3.6 --num-layers 2 --linear-attention-freq 2 --context-parallel-size 2 --prompt-data "
    f"{FOLDER}/data/train.jsonl --tokenizer-path {FOLDER}/data/tokenizer --train-iters 3 --lr 1e-3 --group-size 4 "
    f"--max-response-length 3 --prompt-chunk-size 20 --seed 5 --reward-workers 1 --reward "
    f"tests/ranks/sample_reward.py:letters --output-dir {FOLDER}/unused --rollout-engine vllm --rollout-server nowhere"
)


def generate(store: Path, version: int | None, flags: str = "", **engine) -> tuple[str, RecordedEngine]:
    """Run --rollout-only against an engine that holds `version` -> (what it printed, the engine)."""
    recorded = RecordedEngine(SOURCE, version, **engine)
    argv = f"{FLAGS} --rollout-only --rollout-store {store} {flags}".split()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        roll_out_only(*parse_arguments(argv, Machine(cuda=False, fused_adam=False, world_size=1)), recorded)
    return printed.getvalue(), recorded


def refuse(store: Path, version: int | None, flags: str = "", *, kind: type[Exception] = ValueError, **engine) -> str:
    """The sentence that a run must be refused with."""
    try:
        generate(store, version, flags, **engine)
    except kind as error:
        assert "\n" not in str(error), error
        return str(error)
    raise AssertionError(f"version {version} with {flags!r} was not refused")


def same_step(store: Path, step: int) -> None:
    """The step is, but for who sampled it, the one that the resident run left."""
    found, wanted = RolloutStore(store).read_manifest(step), SOURCE.read_manifest(step)
    assert found == dataclasses.replace(wanted, source="vllm"), (found, wanted)
    assert RolloutStore(store).read(found) == SOURCE.read(wanted)


def check_step_by_step() -> None:
    """The engine's version says which step; what is there is not asked for again; --train-iters ends it."""
    store = FOLDER / "only"
    for version in (0, 1, 2):
        printed, engine = generate(store, version)
        assert RolloutStore(store).list_steps() == list(range(1, version + 2)) and len(engine.calls) == 1
        assert f"step {version + 1}: 1 groups, 4 rollouts, mean reward" in printed, printed
        same_step(store, version + 1)
        printed, engine = generate(store, version)
        assert engine.calls == [] and f"step {version + 1} is in {store} already: 4 rollouts" in printed, printed
    printed, engine = generate(store, 3)
    assert engine.calls == [] and "nothing is left to do" in printed, printed
    assert not (FOLDER / "unused").exists()


def check_steps_bound() -> None:
    """--rollout-steps 3 goes on while the engine holds what each step needs, here one that is moved on between calls."""

    class Moving(RecordedEngine):
        def generate(self, requests, **settings):
            answers = super().generate(requests, **settings)
            self.version += 1
            return answers

    store = FOLDER / "bound"
    argv = f"{FLAGS} --rollout-only --rollout-store {store} --rollout-steps 2".split()
    roll_out_only(*parse_arguments(argv, Machine(cuda=False, fused_adam=False, world_size=1)), Moving(SOURCE, 0))
    assert RolloutStore(store).list_steps() == [1, 2]
    same_step(store, 2)
    message = refuse(FOLDER / "stuck", 0, "--rollout-steps 2", kind=StepRejected)
    assert "holds weights of version 0, not 1" in message and RolloutStore(FOLDER / "stuck").list_steps() == [1], message


def check_refusals() -> None:
    """No weights, no beginning, other settings, a damaged step, a failing engine: one sentence, and nothing is written."""
    empty = FOLDER / "empty"
    assert "holds no weights yet" in refuse(empty, None)
    assert "neither --rollout-store" in refuse(empty, 2) and "nor --load a checkpoint of it" in refuse(empty, 2)
    failed = refuse(empty, 0, kind=StepRejected, failure=ConnectionResetError("the server hung up"))
    assert failed == "--rollout-engine vllm gave no rollouts for step 1: the server hung up", failed
    assert RolloutStore(empty).list_steps() == [] and not list(empty.glob("*.partial"))
    assert "sampled with --sampling-temperature 1.0, unlike this run's" in refuse(
        FOLDER / "only", 1, "--sampling-temperature 0.5"
    )
    torn = FOLDER / "torn-only"
    shutil.copytree(FOLDER / "only", torn)
    (torn / "step-000002.parquet").write_bytes(b"x")
    assert "step-000002.parquet is damaged" in refuse(torn, 1)


def check_checkpoint_says_where() -> None:
    """Without the step before in the store, the checkpoint of it says where the data stood."""
    store = FOLDER / "from-checkpoint"
    generate(store, 2, f"--load {FOLDER}/context-ckpt --save {FOLDER}/unused-save")
    same_step(store, 3)
    assert "asks for the checkpoint" in refuse(FOLDER / "none", 1, f"--load {FOLDER}/context-ckpt --train-iters 9")


def main() -> None:
    for check in (check_step_by_step, check_steps_bound, check_refusals, check_checkpoint_says_where):
        check()
        print(check.__name__, flush=True)


if __name__ == "__main__":
    main()
