"""Ray over two hosts: the switcher starts it with addresses, ports and resources of its own before the engine, and ends
it after.

vLLM takes no Ray on a CPU, so tests/support/ray_pair.py stands where the engine stands: one worker process on each
host.
"""

import json
import signal
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.support.two_hosts import explain_absence, hosts, switches  # noqa: F401

pytestmark = [
    pytest.mark.vllm, pytest.mark.timeout(600),
    pytest.mark.skipif(bool(explain_absence()), reason=f"NOT TESTED: Ray over two hosts: {explain_absence()}"),
]


def test_ray_spans_the_hosts_while_the_engine_serves_and_is_gone_after_it(switches, monkeypatch):
    monkeypatch.setenv("QUICK_SWITCH_RAY", "1")
    both = switches(1, rollout_up_seconds=250.0)
    both[0].hold("generating", 1)
    for switch in both:
        switch.start()
    both[0].wait_for("done", "rollout_up", 1, 270)
    workers = json.loads((both[0].folder / "ready.json").read_text())["workers"]
    assert sorted(address for _, address, _ in workers) == ["198.18.41.1", "198.18.41.2"]
    assert len({pid for pid, _, _ in workers}) == len({node for _, _, node in workers}) == 2
    both[0].process.send_signal(signal.SIGTERM)
    assert [switch.wait(30) for switch in both] == [75, 75]
    for switch in both:
        switch.check_nothing_left()
    assert not any(psutil.pid_exists(pid) for pid, _, _ in workers)
    assert not list(Path(tempfile.gettempdir()).glob("longstraw-ray-*"))
