"""Stands where an engine stands on a Ray cluster, in vLLM's environment: one worker process on each of two Ray nodes.

    ray_pair.py READY_FILE VERSION      writes where its workers run once both have answered; ends on SIGTERM
"""

import json
import os
import signal
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote(num_cpus=1)
class Worker:
    """Says where it is, and hears from the other."""

    def place(self):
        return os.getpid(), ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()

    def ask(self, other):
        return ray.get(other.place.remote())


def main(ready_file: str, version: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
    group = placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
    ray.get(group.ready(), timeout=60)
    workers = [
        Worker.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)).remote() for index in range(2)
    ]
    places = ray.get([worker.place.remote() for worker in workers])
    assert [ray.get(workers[index].ask.remote(workers[1 - index])) for index in range(2)] == places[::-1]
    with open(ready_file + ".new", "w") as file:
        json.dump({"weight_version": version, "workers": places, "port": 0}, file)
    os.replace(ready_file + ".new", ready_file)
    signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
