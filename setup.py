"""Which packages a build contains; everything else about the project is declared in pyproject.toml.

`megatron` is a namespace that megatron-core's wheel shares with `megatron.grpo`, so it never gets an
`__init__.py` here, and `find_packages` alone would miss it.
"""

from setuptools import find_namespace_packages, find_packages, setup

setup(
    packages=find_packages(include=["longstraw*"]) + find_namespace_packages(include=["megatron.grpo*"]),
    package_data={"longstraw": ["**/*.json"], "megatron.grpo": ["**/*.json"]},
)
