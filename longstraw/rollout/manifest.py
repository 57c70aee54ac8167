"""What a step's rollouts say of themselves: which step, which weights, how they were sampled, where the data stood.

A manifest is the small JSON file beside a step's rollouts (`longstraw.rollout.store`). It is written last, so a step with
a manifest is whole. `explain_difference` is what a trainer holds it to before it trains on the step.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

FORMAT_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class StepManifest:
    """One step of a rollout store."""

    step: int
    """The optimizer step that trains on these rollouts, from 1 on."""

    weight_version: int
    """Optimizer steps behind the weights that sampled: step - 1."""

    source: str
    """Who sampled: resident or vllm."""

    settings: Mapping[str, Any]
    """How: sampling settings, group size, group filter, prompts of a step, the tokenizer's and the stop tokens' fingerprint."""

    data_before: Mapping[str, Any]
    """Where the order of the prompts stood before the step (`PromptOrder.state_dict`)."""

    data_after: Mapping[str, Any]
    """Where it stands after the step: the next one's prompts begin there."""

    groups: int
    """Groups that the step trains on; those that the group filter left out are in the file too."""

    rows: int
    """Rollouts in the file."""

    lineage: str = ""
    """Which weights of that version sampled (`megatron.grpo.weight_lineage`); empty where the engine did not know."""

    bytes: int = 0
    """Size of the file; the store fills it in."""

    checksum: str = ""
    """SHA-256 of the file; the store fills it in."""

    def to_json(self) -> str:
        """As the file holds it."""
        return json.dumps({"format_version": FORMAT_VERSION} | asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "StepManifest":
        """Reads what `to_json` wrote. Raises ValueError, in words that follow the file's name, for anything else."""
        try:
            plain = json.loads(text)
            version = plain.pop("format_version")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"is no manifest of rollouts ({error})") from None
        if version != FORMAT_VERSION:
            raise ValueError(f"has format version {version}, and this program reads version {FORMAT_VERSION}")
        kinds = {field.name: field.type for field in fields(cls)}
        if set(plain) != set(kinds):
            raise ValueError(f"is no manifest of rollouts: it holds {sorted(plain)}")
        for name, kind in kinds.items():
            wanted = kind if kind in (int, str) else dict
            if not isinstance(plain[name], wanted) or isinstance(plain[name], bool):
                raise ValueError(f"is no manifest of rollouts: {name} is {plain[name]!r}")
        return cls(**plain)


def explain_difference(manifest: StepManifest, settings: Mapping[str, Any]) -> str:
    """One clause, naming flags, where rollouts were sampled otherwise than a trainer with these settings assumes; else "".

    settings: as in the manifest, of the trainer; names are destinations of flags.
    """
    for name in sorted({*settings, *manifest.settings}):
        found, wanted = manifest.settings.get(name), settings.get(name)
        if found != wanted:
            shown = "another tokenizer" if name == "tokenizer_path" else f"--{name.replace('_', '-')} {found}"
            now = f"--{name.replace('_', '-')} {wanted}" if name != "tokenizer_path" else "--tokenizer-path"
            return f"sampled with {shown}, unlike this run's {now}"
    return ""
