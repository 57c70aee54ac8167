"""Two vLLM ranks: started without weights, synced both ways, killed."""

import os
import signal
import time

import psutil
import pytest
from model_scores import largest_difference

from longstraw.rollout.config import SamplingConfig
from longstraw.rollout.lifetime import list_shared_files
from longstraw.rollout.protocol import PromptRequest, WeightVersionError
from longstraw.rollout.weight_folder import read_manifest, version_folder

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BAR = 1e-5
PROMPT = tuple((7 * i) % 120 for i in range(150))


@pytest.fixture(scope="module")
def running(start_server, versions):
    folder = version_folder(versions / "full", 0)
    return start_server("--model", str(folder), "--await-sync", "--tensor-parallel-size", "2")


def ask(engine, version):
    request = PromptRequest(prompt_id="a", token_ids=PROMPT, weight_version=version)
    sampling = SamplingConfig(max_response_length=12, sampling_temperature=0.7)
    return engine.generate([request], group_size=3, sampling=sampling, seed=1, stop_ids=frozenset())[0]


def check_sleep(engine):
    """No weights, no answer."""
    assert engine.weight_version is None
    with pytest.raises(WeightVersionError, match="a weight sync must complete first"):
        ask(engine, 0)


def test_nothing_is_generated_before_a_completed_sync(running, versions):
    engine, root = running.engine, versions / "full"
    check_sleep(engine)
    engine.follow(root, 0)
    wanted = {name: entry.checksum for name, entry in read_manifest(version_folder(root, 0)).tensors.items()}
    assert engine.checksums() == wanted and len(wanted) > 30
    assert largest_difference(version_folder(root, 0), PROMPT, ask(engine, 0), temperature=0.7) <= BAR
    engine.sleep()
    check_sleep(engine)
    with pytest.raises(ValueError, match="the engine holds no weights"):
        engine.sync(version_folder(versions / "delta", 1), 1)
    engine.wake()
    check_sleep(engine)


def test_full_and_delta_syncs_at_two_ranks(running, versions):
    engine = running.engine
    engine.follow(versions / "full", 2)
    samples, checksums = ask(engine, 2), engine.checksums()
    assert largest_difference(version_folder(versions / "full", 2), PROMPT, samples, temperature=0.7) <= BAR
    engine.sleep()
    assert [one.kind for one in engine.follow(versions / "delta", 2)] == ["full", "delta", "delta"]
    assert engine.checksums() == checksums and ask(engine, 2) == samples


def test_a_killed_server_takes_its_workers_along(running):
    """kill -9 of the server: the kernel ends the workers; shared memory and ports are free."""
    process = psutil.Process(running.server.process.pid)
    tree = [process, *process.children(recursive=True)]
    shared, ports = list_shared_files(tree), listening_ports(tree)
    assert len(tree) >= 3 and shared and ports
    os.kill(process.pid, signal.SIGKILL)
    assert running.server.process.wait(10) == -signal.SIGKILL
    _, alive = psutil.wait_procs(tree[1:], timeout=10)
    assert not alive, alive
    late = time.monotonic() + 10
    while time.monotonic() < late and any(path.exists() for path in shared):
        time.sleep(0.05)
    assert not [path for path in shared if path.exists()]
    assert not ports & listening_ports(psutil.process_iter())


@pytest.fixture
def stages(start_server, versions):
    """Two ranks with half of the layers each, that take prompts 64 tokens at a time."""
    folder = version_folder(versions / "full", 0)
    flags = ["--pipeline-parallel-size", "2", "--max-num-batched-tokens", "64"]
    return start_server("--model", str(folder), "--await-sync", *flags)


def test_two_stages_prompts_in_pieces_and_a_killed_worker(stages, versions):
    """A prompt's passes leave no mark on its samples: the second answer finds most of the prompt cached, and is the first.

    An engine that has lost a rank is no engine: it ends, and says so by its exit code.
    """
    running, engine = stages, stages.engine
    for kind in ("full", "delta"):
        engine.follow(versions / kind, 2)
        pieces, cached = ask(engine, 2), ask(engine, 2)
        assert [one.token_ids for one in pieces] == [one.token_ids for one in cached]
        for samples in (pieces, cached):
            assert largest_difference(version_folder(versions / "full", 2), PROMPT, samples, temperature=0.7) <= BAR
        engine.sleep()
    workers = [p for p in psutil.Process(running.server.process.pid).children(recursive=True) if "Worker" in p.name()]
    assert len(workers) == 2, workers
    shared = list_shared_files(workers)
    workers[1].kill()
    assert running.server.process.wait(30) == 1
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert not alive and not [path for path in shared if path.exists()] and not running.server.ready_file.exists()
    assert "has ended" in running.server.log.read_text()


def listening_ports(processes):
    found = set()
    for process in processes:
        try:
            found |= {c.laddr.port for c in process.net_connections() if c.status == psutil.CONN_LISTEN}
        except psutil.Error:
            continue
    return found
