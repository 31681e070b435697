"""Forward passes: the statements that run a model which amp prepares."""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import libcst as cst
from libcst import matchers

from .places import NONE, last_name, last_names, names_in, source

# In names of functions that return a model, as classes do, and run none.
WRAPPERS = ("parallel", "ddp", "compile", "script", "convert", "wrap", "initialize", "copy")
# Methods of modules that do not compute an output.
OTHER_METHODS = {"train", "eval", "parameters", "named_parameters", "buffers", "modules", "to"}
OTHER_METHODS |= {"children", "state_dict", "load_state_dict", "zero_grad", "cuda", "cpu", "apply"}
OTHER_METHODS |= {"half", "float", "requires_grad_", "no_sync", "share_memory", "named_modules"}
OTHER_METHODS |= {"items", "keys", "values"}


def _ends(value: cst.BaseExpression) -> set[str]:
    """Return the first and the last name of ``a.b.c``, without ``self`` and indices."""
    names = re.sub(r"\[[^][]*\]", "", source(value)).removeprefix("self.").split(".")
    return {names[0], names[-1]}


def _makes_model(call: cst.Call) -> bool:
    """Return whether a call of a model seems to return another model, as DataParallel does."""
    name = last_name(call.func)
    return name[:1].isupper() or any(word in name.lower() for word in WRAPPERS)


class Forward(cst.CSTVisitor):
    """Names of the models and of the functions that run them, in a module that it has visited.

    Args:
        models: what ``amp.initialize`` is given and returns.
        optimizers: names of the optimizers, whose ``step`` runs no model.
    """

    def __init__(self, models: set[str], optimizers: set[str]) -> None:
        super().__init__()
        self.models, self.optimizers = set(models), optimizers
        self.functions: dict[str, list[cst.FunctionDef]] = {}
        self.runners: set[str] = set()  # functions that run a model
        self._assigned: list[tuple[cst.BaseExpression, cst.BaseExpression]] = []
        self._calls: list[cst.Call] = []

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self.functions.setdefault(node.name.value, []).append(node)

    def visit_Assign(self, node: cst.Assign) -> None:
        self._assigned += [(target.target, node.value) for target in node.targets]

    def visit_Call(self, node: cst.Call) -> None:
        self._calls.append(node)

    def leave_Module(self, original_node: cst.Module) -> None:
        """Follow the models through assignments and arguments, then find what runs them."""
        size = 0
        while size != len(self.models):
            size = len(self.models)
            for target, value in self._assigned:
                self._follow(target, value)
            for call in self._calls:
                self.models.update(self._parameters(call))
        size = -1
        while size != len(self.runners):
            size = len(self.runners)
            for name, functions in self.functions.items():
                if any(self.runs(function.body) for function in functions):
                    self.runners.add(name)

    def _follow(self, target: cst.BaseExpression, value: cst.BaseExpression) -> None:
        parts = last_names(value)
        if last_name(target) in self.models:
            self.models |= parts
        elif isinstance(value, cst.Call):
            given = {last_name(arg.value) for arg in value.args}
            if _makes_model(value) and given & self.models:
                self.models.add(last_name(target))
        elif parts & self.models:
            self.models.add(last_name(target))
        self.models -= {"", NONE}

    def _parameters(self, call: cst.Call) -> Iterator[str]:
        """Yield the parameters of functions of the module that are given a model in a call."""
        for function in self.functions.get(last_name(call.func), ()):
            names = [param.name.value for param in function.params.params]
            names = names[1:] if names[:1] in (["self"], ["cls"]) else names
            for index, arg in enumerate(call.args):
                if last_name(arg.value) in self.models and not arg.star:
                    yield from [arg.keyword.value] if arg.keyword else names[index : index + 1]

    def outputs(self) -> list[cst.Call]:
        """Return the calls of models, of their methods, and of functions that run them."""
        return [
            call
            for call in self._calls
            if self._is_forward(call)
            and (last_name(call.func) in self.runners or _ends(call.func) & self.models)
        ]

    def runs(self, node: cst.CSTNode) -> bool:
        """Return whether code calls a model, or a function that runs one."""
        return any(self._is_forward(call) for call in _calls_in(node))

    def _is_forward(self, call: cst.Call) -> bool:
        """Return whether a call is of a model, its method with data, or a function that runs it.

        Functions of other files, such as ``penalty(model, 2)``, may need its parameters alone.
        """
        name = last_name(call.func)
        owner = source(call.func.value) if isinstance(call.func, cst.Attribute) else ""
        if owner in self.optimizers or name in OTHER_METHODS:
            return False
        if name in {*self.runners, *self.models} or name == "self" and "forward" in self.runners:
            return True
        return bool(call.args) and bool(names_in(call.func) & self.models)


@lru_cache(2**14)  # functions are asked about until nothing changes
def _calls_in(node: cst.CSTNode) -> Sequence[Any]:
    return matchers.findall(node, matchers.Call())
