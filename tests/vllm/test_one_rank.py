"""One vLLM rank: log-probabilities, sampling, every kind of weight sync, and what is refused."""

import shutil
import subprocess
import threading
import time

import psutil
import pytest
import torch
from model_scores import largest_difference, score_rows

from longstraw.rollout.config import SamplingConfig
from longstraw.rollout.lifetime import list_shared_files
from longstraw.rollout.protocol import PromptRequest, WeightVersionError
from longstraw.rollout.sampling import truncate
from longstraw.rollout.vllm_client import EngineError, VllmEngine
from longstraw.rollout.vllm_client.engine import read_ready_file
from longstraw.rollout.weight_export import open_folder
from longstraw.rollout.weight_folder import (
    DELTA_FILE, MANIFEST, FolderManifest, read_manifest, version_folder, write_manifest,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BAR = 1e-5
PROMPT = tuple((7 * i) % 120 for i in range(150))
SAMPLING = SamplingConfig(max_response_length=12, sampling_temperature=0.7)


@pytest.fixture(scope="module")
def owner():
    """The process that the server serves."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def running(start_server, versions, owner):
    flags = ["--model", str(version_folder(versions / "full", 0)), "--max-lora-rank", "4"]
    return start_server(*flags, owner_pid=owner.pid)


@pytest.fixture
def engine(running):
    return running.engine


def ask(engine, version=0, *, prompt=PROMPT, prompt_id="a", group_size=3, sampling=SAMPLING, seed=1, stop_ids=(), **more):
    request = PromptRequest(prompt_id=prompt_id, token_ids=prompt, weight_version=version)
    return engine.generate(
        [request], group_size=group_size, sampling=sampling, seed=seed, stop_ids=frozenset(stop_ids), **more
    )[0]


def sync_to(engine, root, version):
    """From the root's whole weights to a version."""
    engine.sync(version_folder(root, 0), 0)
    return engine.follow(root, version)


def test_log_probabilities_are_the_converted_models(engine, versions):
    samples = ask(engine)
    assert all(sample.weight_version == 0 and len(sample.token_ids) == 12 for sample in samples)
    assert largest_difference(version_folder(versions / "full", 0), PROMPT, samples, temperature=0.7) <= BAR
    assert largest_difference(version_folder(versions / "full", 2), PROMPT, samples, temperature=0.7) > 1e3 * BAR


def test_samples_follow_from_seed_prompt_and_place(engine):
    first = ask(engine)
    assert ask(engine) == first and len({sample.token_ids for sample in first}) == 3
    assert [s.token_ids for s in ask(engine, seed=2)] != [s.token_ids for s in first]
    assert [s.token_ids for s in ask(engine, prompt_id="b")] != [s.token_ids for s in first]
    assert [s.token_ids for s in ask(engine, group_size=2)] == [s.token_ids for s in first[:2]]


def test_several_prompts_stop_tokens_and_the_token_limit(engine):
    requests = [PromptRequest(prompt_id=str(i), token_ids=PROMPT[i:], weight_version=0) for i in range(3)]
    stop_ids = frozenset(range(0, 64, 2))
    groups = engine.generate(
        requests, group_size=2, sampling=SAMPLING, seed=1, stop_ids=stop_ids, num_tokens=64
    )
    samples = [sample for group in groups for sample in group]
    assert [sample.prompt_id for sample in samples] == ["0", "0", "1", "1", "2", "2"]
    assert max(token for sample in samples for token in sample.token_ids) < 64
    assert {sample.finish_reason for sample in samples} >= {"stop"}
    for sample in samples:
        ends = [token in stop_ids for token in sample.token_ids]
        assert not any(ends[:-1]) and ends[-1] == (sample.finish_reason == "stop")
        assert ends[-1] or len(sample.token_ids) == SAMPLING.max_response_length
        assert len(sample.logprobs) == len(sample.token_ids)


@pytest.mark.parametrize("top_k, top_p", [(5, 1.0), (0, 0.5)])
def test_log_probabilities_are_of_what_was_sampled_from(engine, versions, top_k, top_p):
    sampling = SamplingConfig(max_response_length=12, sampling_temperature=1.3, sampling_top_k=top_k, sampling_top_p=top_p)
    for sample in ask(engine, sampling=sampling, num_tokens=100):
        rows = score_rows(version_folder(versions / "full", 0), PROMPT, sample.token_ids) / 1.3
        rows[:, 100:] = -torch.inf
        rows = rows.masked_fill(~truncate(rows, top_k=top_k, top_p=top_p), -torch.inf)
        own = torch.log_softmax(rows, -1).gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        assert (own - torch.tensor(sample.logprobs)).abs().max() <= BAR


def test_a_cached_prefix_does_not_outlive_a_weight_sync(engine, versions):
    ask(engine, group_size=1)
    ask(engine, group_size=1)
    assert engine.cached_tokens == (128,)
    result = engine.follow(versions / "full", 2)
    assert [(one.kind, one.weight_version) for one in result] == [("full", 2)]
    assert engine.weight_version == 2
    samples = ask(engine, 2, group_size=1)
    assert engine.cached_tokens == (0,) and samples[0].weight_version == 2
    engine.follow(versions / "full", 0)


def test_full_and_delta_syncs_lead_to_the_same_bits(engine, versions):
    """Of every tensor as it was loaded; and the model computes with them, the tied output layer too."""
    assert [one.kind for one in sync_to(engine, versions / "full", 2)] == ["full"]
    wanted = {name: entry.checksum for name, entry in read_manifest(version_folder(versions / "full", 2)).tensors.items()}
    assert engine.checksums() == wanted
    samples = ask(engine, 2)
    assert largest_difference(version_folder(versions / "full", 2), PROMPT, samples, temperature=0.7) <= BAR
    results = sync_to(engine, versions / "delta", 2)
    assert [(one.kind, one.weight_version) for one in results] == [("delta", 1), ("delta", 2)]
    assert engine.checksums() == wanted
    assert ask(engine, 2) == samples


def test_an_adapter_is_the_merged_model(engine, versions):
    results = sync_to(engine, versions / "lora", 2)
    assert [(one.kind, one.weight_version) for one in results] == [("lora", 2)]
    samples = ask(engine, 2)
    assert largest_difference(version_folder(versions / "merged", 2), PROMPT, samples, temperature=0.7) <= BAR
    assert largest_difference(version_folder(versions / "lora", 0), PROMPT, samples, temperature=0.7) > 1e2 * BAR
    engine.sync(version_folder(versions / "lora", 1), 1)  # an adapter follows on any other of the same weights
    assert ask(engine, 1) != samples


def test_adapters_around_steps_that_left_the_weights_alone(engine, versions, tmp_path):
    """Before the first adapter, and between two: each is served, and an unchanged version answers as the one before."""
    for number, source in ((0, 0), (2, 1), (4, 2)):
        shutil.copytree(version_folder(versions / "lora", source), version_folder(tmp_path, number))
        path = version_folder(tmp_path, number) / MANIFEST
        path.write_text(path.read_text().replace(f'"version": {source}', f'"version": {number}'))
    for number in (1, 3):
        open_folder(version_folder(tmp_path, number))
        lineage = read_manifest(version_folder(tmp_path, number - 1)).lineage
        unchanged = FolderManifest(kind="unchanged", version=number, base_version=number - 1, lineage=lineage)
        write_manifest(version_folder(tmp_path, number), unchanged)
    engine.sync(version_folder(tmp_path, 0), 0)
    answers = {0: ask(engine)}
    for number in (1, 2, 3, 4):
        engine.follow(tmp_path, number)
        assert engine.weight_version == number
        answers[number] = ask(engine, number)
    words = [[sample.token_ids for sample in answers[number]] for number in range(5)]
    assert words[0] == words[1] != words[2] == words[3] != words[4]
    assert largest_difference(version_folder(versions / "merged", 2), PROMPT, answers[4], temperature=0.7) <= BAR
    engine.sync(version_folder(tmp_path, 0), 0)
    engine.follow(tmp_path, 4)  # at once, as an engine does that starts anew
    assert ask(engine, 4) == answers[4]


def test_only_the_weights_that_are_asked_for_answer(engine, versions, tmp_path):
    sync_to(engine, versions / "full", 0)
    with pytest.raises(WeightVersionError, match="holds weights of version 0, not 1"):
        ask(engine, 1)
    with pytest.raises(ValueError, match="holds version 2, not 1"):
        engine.sync(version_folder(versions / "full", 2), 1)
    with pytest.raises(ValueError, match="builds on version 1, and the engine holds version 0"):
        engine.sync(version_folder(versions / "delta", 2), 2)
    other = tmp_path / "another model's version 0"
    shutil.copytree(version_folder(versions / "merged", 2), other)
    text = (other / MANIFEST).read_text()
    (other / MANIFEST).write_text(text.replace('"version": 2', '"version": 0'))
    engine.sync(other, 0)
    with pytest.raises(ValueError, match="to weights with checksum sha256:.* these have"):
        engine.sync(version_folder(versions / "delta", 1), 1)
    with pytest.raises(ValueError, match="adapts other weights"):
        engine.sync(version_folder(versions / "lora", 2), 2)
    assert largest_difference(other, PROMPT, ask(engine), temperature=0.7) <= BAR
    sync_to(engine, versions / "full", 0)


def test_an_unfinished_or_damaged_folder_is_refused_and_the_weights_stay(engine, versions, tmp_path):
    sync_to(engine, versions / "full", 0)
    before = ask(engine)
    for name, root, spoil, message in (
        ("no manifest", "full", lambda folder: (folder / MANIFEST).unlink(), "holds no complete weights"),
        ("cut short", "full", lambda folder: cut(next(folder.glob("*.safetensors"))), "bytes instead of"),
        ("flipped", "delta", lambda folder: flip(folder / DELTA_FILE), "is not what was written"),
    ):
        folder = tmp_path / name
        shutil.copytree(version_folder(versions / root, 1), folder)
        spoil(folder)
        with pytest.raises(ValueError, match=message):
            engine.sync(folder, 1)
        assert ask(engine) == before


def test_tensors_that_arrive_damaged_leave_no_weights(engine, versions, tmp_path):
    folder = tmp_path / "flipped"
    shutil.copytree(version_folder(versions / "full", 1), folder)
    flip(next(folder.glob("model-*.safetensors")))
    with pytest.raises(ValueError, match="not as written"):
        engine.sync(folder, 1)
    for version in (0, 1):
        with pytest.raises(WeightVersionError, match="holds no weights"):
            ask(engine, version)
    engine.follow(versions / "full", 1)
    assert largest_difference(version_folder(versions / "full", 1), PROMPT, ask(engine, 1), temperature=0.7) <= BAR
    engine.follow(versions / "full", 0)


def test_strangers_and_nonsense(engine, running, versions):
    ready = read_ready_file(running.server.ready_file)
    assert ready["host"] == "127.0.0.1" and running.server.ready_file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(EngineError, match="wrong token"):
        VllmEngine(ready | {"token": "0" * 64})
    with pytest.raises(ValueError, match="maximum context length is 512 tokens"):
        ask(engine, prompt=tuple(range(100)) * 6)
    with pytest.raises(ValueError, match="unknown operation"):
        engine._call("reload", 10, {})
    with pytest.raises(ValueError, match="no ready file"):
        VllmEngine(version_folder(versions / "full", 0) / MANIFEST)
    assert ask(engine)


def test_nothing_of_the_server_listens_beyond_this_machine(running):
    """vLLM's own sockets included."""
    process = psutil.Process(running.server.process.pid)
    listening = [c for one in (process, *process.children(recursive=True)) for c in one.net_connections()
                 if c.status == psutil.CONN_LISTEN]  # fmt: skip
    assert listening and all(c.laddr.ip in ("127.0.0.1", "::1") for c in listening), listening


def test_a_deadline_ends_the_work_and_status_is_answered_meanwhile(running):
    long = SamplingConfig(max_response_length=350)
    with VllmEngine(running.server.ready_file, generate_seconds=1.0) as late:
        seen = []

        def watch():
            with VllmEngine(running.server.ready_file) as other:
                for _ in range(8):
                    seen.append(other.status()["state"])
                    time.sleep(0.1)

        watcher = threading.Thread(target=watch)
        watcher.start()
        with pytest.raises(EngineError, match="not answered within 1 s"):
            ask(late, group_size=16, sampling=long)
        watcher.join()
        assert "generate" in seen
        late.generate_seconds = 60.0
        assert len(ask(late)) == 3
    hung = VllmEngine(running.server.ready_file)
    threading.Timer(0.5, hung.close).start()
    with pytest.raises((EngineError, ValueError, OSError)):
        ask(hung, group_size=16, sampling=long)
    started = time.monotonic()
    assert ask(running.engine) and time.monotonic() - started < 20  # the one that hung up is not worked for


def test_the_server_ends_with_its_owner_and_leaves_nothing(running, owner):
    process = psutil.Process(running.server.process.pid)
    tree = [process, *process.children(recursive=True)]
    shared = list_shared_files(tree)
    owner.kill()
    owner.wait()
    assert running.server.process.wait(30) == 0
    _, alive = psutil.wait_procs(tree[1:], timeout=5)
    assert not alive and not [path for path in shared if path.exists()]
    assert not running.server.ready_file.exists()
    with pytest.raises((EngineError, OSError)):
        VllmEngine({"host": "127.0.0.1", "port": running.engine.port, "token": ""})


def flip(path):
    """Change one bit near the end of a file."""
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])
