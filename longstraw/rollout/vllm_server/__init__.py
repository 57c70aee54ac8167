"""vLLM in a process and a Python environment of its own, driven over a socket.

Runs under vLLM's interpreter with the project's folder on PYTHONPATH: it may import torch, vllm, safetensors and the
parts of longstraw that need nothing else.
"""
