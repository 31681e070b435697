"""The record of a migration: what was changed, what was left, and why."""

from dataclasses import dataclass, field

PREFIX = "# apex-native migrate: "


@dataclass
class Report:
    """Changes and calls left, each a line of the original script and a text."""

    changed: list[tuple[int, str]] = field(default_factory=list)
    left: list[tuple[int, str]] = field(default_factory=list)

    def lines(self, path: str) -> list[str]:
        """Return the report, one entry a line, in the form of a compiler's messages."""
        lines = [f"{path}:{line}: changed: {what}" for line, what in sorted(set(self.changed))]
        lines += [f"{path}:{line}: left: {why}" for line, why in sorted(set(self.left))]
        lines.append(f"{path}: {len(set(self.changed))} changed, {len(set(self.left))} left")
        return lines
