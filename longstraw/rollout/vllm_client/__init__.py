"""The training environment's side of vLLM: start the server process, talk to it, end it. Nothing of vLLM is imported."""

from longstraw.rollout.vllm_client.engine import EngineError, VllmEngine
from longstraw.rollout.vllm_client.process import Server, launch_server, stop, wait_until_ready

__all__ = ["EngineError", "Server", "VllmEngine", "launch_server", "stop", "wait_until_ready"]
