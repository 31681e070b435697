"""A module whose weights have a version, by which torch converts older ones, and extra state."""

from typing import Any

from torch import nn


class Versioned(nn.Linear):
    """Layer that doubles the weights of files without its version."""

    _version = 2
    count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        if local_metadata.get("version") != self._version:
            state_dict[f"{prefix}weight"] = 2 * state_dict[f"{prefix}weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
