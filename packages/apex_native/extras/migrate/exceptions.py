"""Exceptions that a script may catch between a backward pass and the next step."""

import re

import libcst as cst

from .gradients import decorators
from .parameters import Parameters
from .places import last_name, plain_source
from .tree import LOOPS

ENDS = re.compile(r"^raise\b|exit\(")  # the last statement of a handler that ends the script
# Last names of context managers and decorators that let exceptions pass, and of others.
PASSING = re.compile(
    r"^(scale_loss|open|\w*main|command|train|lock|join|progress|staticmethod|property|"
    r"(class|context|cached_)\w+|skip_synchronize)$|tqdm|range|no_sync|autocast|null|prof|record|"
    r"time|watch|grad|log|bar",
    re.IGNORECASE,
)
CATCHING = re.compile("retry|backoff|catch|suppress|err|exc|ignore|guard|safe", re.IGNORECASE)


class Exceptions(Parameters):
    """Search for what may catch an exception, after which the script continues."""

    def is_caught(self, node: cst.CSTNode) -> bool:
        """Return whether an exception at a node may be caught in a loop, which continues."""
        calls: list[tuple[cst.CSTNode, bool]] = [(node, False)]
        for call, is_caught in calls:  # and the calls of the function, and of its callers
            catching = self._catching(call)
            for each in self.parents(call):
                is_caught |= each in catching
                if is_caught and isinstance(each, LOOPS):
                    return True
            here = self.function(call)
            is_caught |= not all(map(self._passes, decorators(here)))
            callers = self.possible_callers(here)
            if is_caught and not callers and isinstance(here, cst.FunctionDef):
                return True  # it may be called in a loop of another file
            calls += [(one, is_caught) for one in callers if (one, is_caught) not in calls]
        return False

    def _catching(self, node: cst.CSTNode) -> list[cst.CSTNode]:
        """Return the statements around a node that may catch an exception and continue."""
        path = [node, *self.parents(node)]
        return [
            each
            for each in path
            if isinstance(each, (cst.Try, cst.TryStar))
            and each.body in path
            and not all(ENDS.search(plain_source(one.body.body[-1])) for one in each.handlers)
            or isinstance(each, cst.With)
            and not all(self._passes(one.item) for one in each.items)
        ]

    def _passes(self, manager: cst.BaseExpression) -> bool:
        """Return whether a context manager or decorator lets exceptions pass, by its name."""
        function = manager.func if isinstance(manager, cst.Call) else manager
        names = self.qualified_names(function)
        name = last_name(function)
        is_torch = any(each.name.startswith("torch.") for each in names)
        return is_torch or bool(PASSING.search(name)) and not CATCHING.search(name)
