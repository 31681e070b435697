"""A module whose weights have a version, by which torch converts older ones."""

from typing import Any

from torch import nn


class Versioned(nn.Linear):
    """Layer that doubles the weights of files without its version."""

    _version = 2

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        if local_metadata.get("version") != self._version:
            state_dict[f"{prefix}weight"] = 2 * state_dict[f"{prefix}weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
