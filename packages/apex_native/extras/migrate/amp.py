"""Uses of amp in a script, and whether all of them can be expressed in torch.

amp is rewritten as a whole or not at all: its calls depend on each other.
"""

import re
from collections import defaultdict
from itertools import takewhile

import libcst as cst
from libcst import matchers
from libcst.metadata import QualifiedNameSource

from .calls import UNPACKED, is_unpacked, models_and_optimizers, split
from .forward import Forward
from .gradients import Assignment, function_name
from .imports import apex_imports
from .optimizers import Optimizers
from .order import negated, parts
from .places import (
    ADDED,
    NONE,
    as_bool,
    assigned,
    availability_flags,
    forward_range,
    is_boundary,
    is_own,
    last_name,
    last_names,
    names_in,
    none_fallbacks,
    pairs,
    plain_source,
    source,
)
from .tree import STATEMENTS
from .usage import Loss

HANDLED = {"initialize", "scale_loss", "master_params", "state_dict", "load_state_dict"}
HANDLED |= {"disable_casts"}
JUMPS = matchers.OneOf(
    *(each() for each in (matchers.Break, matchers.Continue, matchers.Return)),
    *(each() for each in (matchers.Yield, matchers.Await)),
)
# Calls that may ask whether Apex is installed, and names of functions that do.
ASKING = re.compile(r"[\w.]*(apex_\w*(avail|install)|(has|have)_apex)\w*\(\)")
AVAILABLE = re.compile(r"(is_)?apex_(is_)?(available|installed)|(has|have)_apex")
# Around the name of amp where it is no value: an import, another value for it, or a test.
IMPORTS = (cst.ImportAlias, cst.AsName, cst.ImportFrom, cst.AssignTarget, cst.NameItem)
TESTS = (cst.Comparison, cst.BooleanOperation, cst.UnaryOperation, cst.If, cst.Assert)
# Attributes of an optimizer that amp has prepared, of which scripts use some.
STASHED = re.compile(
    r"_amp_stash|_amp_lazy_init|_lazy_init_maybe_master_weights|_master_params_to_model_params|"
    r"_(prepare|post)_amp_backward"
)
REGISTERED = ("register_float_function", "register_half_function", "register_promote_function")
# A cast to half.
CAST = re.compile(r"\.half\(|\.(to|type)\(.*(float16|half)", re.I)
# Half types, and functions that cast to them. Variables may be named "half", too.
HALF = re.compile(
    r"b?float16|(torch|th)\.half|(torch\.(cuda\.)?)?(BFloat16|Half)Tensor|"
    r"network_to_half|convert_network|FP16Model"
)
# Calls, and arguments of amp.initialize, whose half types are not those of parameters.
CASTING = re.compile(r"(.*\.)?(autocast|custom_fwd|astype)|(np|numpy)\..*")
AMP_TYPES = ("cast_model_type", "cast_model_outputs")
# A call that looks for a module, with the name of Apex.
PROBED = re.compile(
    r".*(find|spec|import|module|package|install|avail|exist|version|distribution|require)\w*"
    r":apex(\.\w+)*"
)
# A dictionary or list of the names of modules, or of what a module has.
NAMESPACE = re.compile(r"\bsys\.modules\b|\b(globals|locals|vars|dir)\(\)")
NO_MASTERS = "O2, O3 and O5 cast the model; --opt-level O1 or O4 replaces them by autocast"
IGNORED = {"opt_level", "verbosity", "models", "optimizers", "num_losses"}
IGNORED |= {"keep_batchnorm_fp32", "master_weights"}  # no effect where weights are not cast


def _leaves_half(call: cst.Call) -> bool:
    """Return whether a call of ``amp.initialize`` may leave parameters half."""
    positional, keywords = split(call)
    if is_unpacked(call) or len(positional) > 2:
        return True
    given = {name: source(arg.value).strip("\"'") for name, arg in keywords.items()}
    level = given.get("opt_level", "O1")
    if level in ("O2", "O5"):
        return given.get("master_weights", "None") not in ("True", "None")
    return level not in ("O0", "O1", "O4") or given.get("cast_model_type", "None") != "None"


def _casts_no_parameter(node: cst.CSTNode) -> bool:
    """Return whether half types in `node` are those of autocast, of amp or of NumPy."""
    if isinstance(node, cst.Arg):
        return node.keyword is not None and node.keyword.value in AMP_TYPES
    return isinstance(node, cst.Call) and bool(CASTING.fullmatch(source(node.func)))


def _line(node: cst.CSTNode) -> str:
    body = node.body if isinstance(node, cst.SimpleStatementLine) else []
    return source(body[0]) if len(body) == 1 else ""


class Analysis(Optimizers):
    """Visitor that collects `usage` from a module."""

    def __init__(self, level: str = "", loss_scale: str = "") -> None:
        super().__init__()
        self.level, self.loss_scale = level, loss_scale  # in place of the script's
        self.enabled: cst.BaseExpression | None = None
        self.registered: list[str] = []
        self.local: defaultdict[cst.CSTNode, list[Assignment]] = defaultdict(list)  # by function
        self.globals: set[str] = set()  # names that functions declare as global
        self.names: list[cst.Name] = []
        self.imported: set[str] = set()  # names of what is imported from Apex

    def visit_Module(self, node: cst.Module) -> None:
        """Find names that stand for a failed import."""
        self.usage.fallbacks = none_fallbacks(node)
        self.usage.flags = availability_flags(node)
        self.imported = {local.split(".")[0] for _, _, local in apex_imports(node)}

    def visit_Import(self, node: cst.Import | cst.ImportFrom) -> None:
        self.imports += [(name.split(".")[0], node, True) for _, _, name in apex_imports(node)]

    visit_ImportFrom = visit_Import

    def visit_Call(self, node: cst.Call) -> None:
        name = self.name(node.func)
        attribute = node.func.attr.value if isinstance(node.func, cst.Attribute) else ""
        self.calls.append((attribute or source(node.func), node))
        self.usage.has_half |= bool(CAST.search(source(node)))
        self.usage.has_load |= attribute == "load_state_dict"
        self._find_steps(node, attribute)
        if name.startswith("apex.amp."):
            self._visit_amp(node, name.removeprefix("apex.amp."))

    def _find_steps(self, node: cst.Call, attribute: str) -> None:
        """Find steps, flags, changes of containers, and gradients that are clipped."""
        if attribute == "step" and isinstance(node.func, cst.Attribute):
            self.steps.append((source(node.func.value), node))
        elif attribute == "zero_grad" and isinstance(node.func, cst.Attribute):
            self.resets.append((source(node.func.value), node))
        elif attribute == "add_argument" and "store_true" in source(node):
            texts = [source(arg.value).strip("\"'") for arg in node.args if arg.keyword is None]
            self.flags |= {text.lstrip("-").replace("-", "_") for text in texts}
        elif matchers.matches(self.parent(node), ADDED):
            assert isinstance(node.func, cst.Attribute)
            self.assigned += [(node.func.value, arg.value) for arg in node.args]
        elif "clip_grad" in source(node.func):
            self._add_reader(node, "")

    def _visit_amp(self, node: cst.Call, short: str) -> None:
        """Record a call of amp's function `short`."""
        if short in REGISTERED and isinstance(self.parent(node), cst.Expr):
            self.registered.append(short)
        elif short not in HANDLED:
            self.usage.reasons.append(f"amp.{short} has no equivalent here")
        elif short == "initialize":
            self._initialize(node)
        elif short == "scale_loss":
            self._scale_loss(node)
        elif short == "master_params":
            self._add_reader(node, "")
        elif short != "disable_casts":
            self.states.append(node)

    def visit_Attribute(self, node: cst.Attribute) -> None:
        """Find amp's state, which scripts read and set directly, amp as a value, and gradients."""
        self._check_value(node)
        if node.attr.value == "half":
            self._find_half(node, source(node))
        self.usage.has_allreduce |= node.attr.value in ("disable_allreduce", "enable_allreduce")
        self._check_stashed(node.attr.value)
        parent = self.parent(node)
        is_called = isinstance(parent, cst.Call) and parent.func is node
        if node.attr.value == "step" and not is_called:
            self.bound_steps.append((source(node.value), node))
        if node.attr.value != "grad":
            return
        is_reset = isinstance(parent, cst.AssignTarget) or source(parent).endswith(".grad.zero_")
        is_test = re.search(r"\.grad is (not )?None$", source(parent))
        self.resets += [("", node)] if is_reset else []
        is_function = source(node).endswith("autograd.grad")
        if not is_reset and not is_function and not is_test:
            self._add_reader(node, source(node))

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        """Find gradients that ``getattr(parameter, "grad")`` reads, and ``find_spec("apex")``."""
        call = self.parent(self.parent(node))
        text = source(node).strip("\"'")
        self._find_half(node, text)
        if (
            isinstance(call, cst.Call)
            and self.parent(node) in call.args[:1]
            and PROBED.fullmatch(f"{source(call.func)}:{text}")
        ):
            self._add_probe(call)
        elif re.fullmatch(r"apex(\.\w+)*", text) or text in self.imported:
            inner = (cst.BaseSmallStatement, *STATEMENTS)
            path = takewhile(lambda each: not isinstance(each, inner), self.parents(node))
            expression = [node, *path][-1]
            if NAMESPACE.search(source(expression)):
                self._add_probe(expression)
        if isinstance(call, cst.Call) and "attr" in source(call.func):
            self._check_stashed(text)
            if text == "grad":
                self._add_reader(call, source(call))

    def _find_half(self, node: cst.CSTNode, name: str) -> None:
        """Find half types by `name`, but for those of autocast, amp and NumPy."""
        if HALF.fullmatch(name) and not source(self.parent(node)).startswith(("np.", "numpy.")):
            self.usage.has_half |= not any(map(_casts_no_parameter, self.parents(node)))

    def _add_probe(self, node: cst.CSTNode) -> None:
        self.usage.probes.add(node)
        self.usage.reasons.append(f"{source(node)} may find no Apex after the conversion")

    def _check_stashed(self, attribute: str) -> None:
        if STASHED.fullmatch(attribute):
            self.usage.reasons.append(f"{attribute} has no equivalent here")

    def _add_reader(self, node: cst.CSTNode, grad: str) -> None:
        self.readers.append((self.statement(node), grad))
        self.has_value |= any(isinstance(each, cst.Lambda) for each in self.parents(node))

    def visit_Name(self, node: cst.Name) -> None:
        """Find amp as a value, half types, and names that may be those of scaled losses."""
        self._find_half(node, node.value)
        parent = self.parent(node)
        is_attribute = isinstance(parent, cst.Attribute) and parent.attr is node
        is_keyword = isinstance(parent, cst.Arg) and parent.keyword is node
        if not (is_attribute or is_keyword):
            self._check_value(node)
            self.names.append(node)

    def visit_Decorator(self, node: cst.Decorator) -> None:
        """Find ``amp.float_function`` and its like, which register a function."""
        name = self.name(node.decorator)
        if name.startswith("apex.amp."):
            self.registered.append(name.removeprefix("apex.amp."))

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self.defined[node.name.value].append(node)

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self.classes.add(node.name.value)
        bases = [source(base.value).rpartition(".")[2] for base in node.bases]
        self.usage.has_function |= "Function" in bases

    def visit_Assign(self, node: cst.Assign) -> None:
        self.assigned += pairs(node)
        names = {source(target) for target, value in pairs(node) if source(value) == NONE}
        # After a failed import, the conditions are those of the import.
        is_failed = any(isinstance(each, cst.ExceptHandler) for each in self.parents(node))
        self.imports += [(name, node, is_failed) for name in names & self.imported]

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        if node.value:
            self.assigned.append((node.target, node.value))

    def visit_AugAssign(self, node: cst.AugAssign) -> None:
        if isinstance(node.value, (cst.Name, cst.List, cst.ListComp)):
            self.assigned.append((node.target, node.value))

    def visit_For(self, node: cst.For) -> None:
        self.loop_names |= names_in(node.target)
        pair = node.target.elements if isinstance(node.target, cst.Tuple) else ()
        self.assigned.append((pair[-1].value if pair else node.target, node.iter))

    def visit_Nonlocal(self, node: cst.Nonlocal) -> None:
        self.globals |= {item.name.value for item in node.names}

    def visit_Global(self, node: cst.Global) -> None:
        """Reject ``global amp``, which an import in a function follows."""
        self.globals |= {item.name.value for item in node.names}
        if self.globals & {"amp", "apex"}:
            self.usage.reasons.append("amp is imported as a global name")

    def _check_value(self, node: cst.Attribute | cst.Name) -> None:
        """Find names that are passed to a function or assigned, and ``amp`` as a value."""
        parent = self.parent(node)
        if isinstance(parent, (cst.Arg, cst.Assign, cst.DictElement, cst.Element, cst.Return)):
            self.values.add(node.value if isinstance(node, cst.Name) else node.attr.value)
        is_test = isinstance(parent, TESTS) or isinstance(parent, cst.IfExp) and parent.test is node
        names = self.qualified_names(node)
        is_called = isinstance(parent, cst.Call) and parent.func is node
        is_clip = any(re.match(r"torch\.nn\.utils\..*clip_grad", each.name) for each in names)
        is_value = not (is_called or isinstance(parent, (*IMPORTS, cst.Attribute, cst.Decorator)))
        self.has_value |= is_clip and is_value
        name = self.name(node)
        if name.startswith("apex.amp._amp_state") and not isinstance(parent, IMPORTS):
            self._set_scale(node)
        elif is_test and name in ("apex", "apex.amp"):
            self.questions.append(node)
        elif is_value and not is_test and re.match(r"apex($|\.amp\b)", name):
            what = name.removeprefix("apex.")
            self.usage.reasons.append(f"{what} is passed as a value, to what may call it")

    def _set_scale(self, node: cst.CSTNode) -> None:
        """Accept a statement that sets the loss scale to a constant."""
        statement = self.statement(node)
        code = re.fullmatch(r".*\.loss_scalers\[0\]\._loss_scale = (\d[\d*. ]*)", _line(statement))
        if code and self.usage.init_scale_statement in (None, statement):
            self.usage.init_scale, self.usage.init_scale_statement = code[1], statement
        else:
            self.usage.reasons.append("amp._amp_state has no equivalent here")

    def _check_initial_scale(self) -> None:
        """Require that the script sets the scale where it initializes amp, and only then."""
        node, start = self.usage.init_scale_statement, self.starts[0]
        if node is None:
            return
        is_beside = self.function(node) is self.function(start)
        is_once = self.loop(node) is self.loop(start) and self.tests(node) <= self.tests(start)
        if not is_beside or not is_once:
            self.usage.reasons.append("amp._amp_state is set elsewhere than amp.initialize")

    def _initialize(self, node: cst.Call) -> None:
        usage = self.usage
        self.starts.append(node)
        usage.may_cast |= _leaves_half(node)
        line = self.parent(self.parent(node))
        if not isinstance(line, (cst.SimpleStatementLine, cst.SimpleStatementSuite)):
            usage.reasons.append("amp.initialize is part of a larger expression")
        elif len(line.body) != 1 or isinstance(line, cst.SimpleStatementSuite):
            usage.reasons.append("amp.initialize shares its line with another statement")
        target = self.parent(node)
        if isinstance(target, cst.Assign) and len(target.targets) > 1:
            usage.reasons.append("amp.initialize is assigned to several targets")
        if is_unpacked(node):
            usage.reasons.append(UNPACKED)
            return
        _, keywords = split(node)
        stated = keywords.get("opt_level")
        written = source(stated.value) if stated else "O1"
        is_literal = not stated or isinstance(stated.value, cst.SimpleString)
        level = self.level or (written.strip("\"'") if is_literal else written)
        if usage.level not in ("", level):
            usage.reasons.append("amp.initialize is called with more than one level")
        usage.level = level
        if self.level and not is_literal:
            usage.ignored_level = written
        if usage.level in ("O2", "O3", "O5"):
            usage.reasons.append(NO_MASTERS)
        elif usage.level not in ("O0", "O1", "O4"):
            usage.reasons.append(
                f"opt_level is {usage.level}, known only when the script runs; "
                "give --opt-level O0, O1 or O4"
            )
        self._check_loss_scale(keywords)
        self.enabled = keywords["enabled"].value if "enabled" in keywords else None
        other = set(keywords) - IGNORED - {"loss_scale", "enabled"}
        if other or not 1 <= len(models_and_optimizers(node)) <= 2:
            usage.reasons.append(f"amp.initialize has arguments of its own: {sorted(other)}")

    def _check_loss_scale(self, keywords: dict[str, cst.Arg]) -> None:
        """Require a dynamic loss scale at O1, the only level with one."""
        if "loss_scale" not in keywords or not self.usage.scaled or self.loss_scale:
            return
        scale = source(keywords["loss_scale"].value)
        if scale.strip("\"'") not in ("dynamic", "None"):
            self.usage.reasons.append(
                f"loss_scale is {scale}; --loss-scale dynamic replaces it by GradScaler's"
            )

    def _scale_loss(self, node: cst.Call) -> None:
        item = self.parent(node)
        positional, _ = split(node)
        has_other_args = is_unpacked(node) or len(positional) not in (2, 3)
        if has_other_args or not isinstance(item, cst.WithItem) or item.asname is None:
            self.usage.reasons.append("amp.scale_loss is not of the form of Apex's documentation")
            return
        statement = self.parent(item)
        assert isinstance(statement, cst.With)
        body = statement.body  # an indented block, or statements on the same line
        is_line = isinstance(body, cst.SimpleStatementSuite)
        if len(statement.items) > 1 or (is_line and len(body.body) > 1):
            self.usage.reasons.append("amp.scale_loss shares its statement with something else")
        value, optimizer = positional[0].value, source(positional[1].value)
        alias = source(item.asname.name.with_changes(lpar=[], rpar=[]))
        self.usage.losses.append(Loss(statement, value, alias, optimizer))

    def leave_Module(self, original_node: cst.Module) -> None:
        """Check what takes knowledge of the whole module."""
        usage = self.usage
        self.jumps = matchers.findall(original_node, JUMPS)
        self._check_aliases()
        self._find_questions()
        if not self.starts and self.level == "O0":
            usage.level = "O0"  # stated, and nothing else matters: all of amp is removed
            return
        if not self.starts:
            usage.reasons.append(
                "amp.initialize is not in this file; --opt-level O0 converts it for that level"
            )
        if usage.level != "O0":
            usage.reasons += [f"amp.{name} has no equivalent here" for name in self.registered]
        if usage.reasons:
            return
        test = self._condition(self.starts[0])
        self._check_initial_scale()
        self._check_questions()
        for other in self.starts[1:]:
            self._check_repeated(other)
        usage.condition = as_bool(test, self.flags) if test else ""
        self._check_reached()
        if usage.has_autocast and not usage.losses:
            usage.reasons.append("amp.scale_loss is not in this file")
        forward = Forward(set().union(*self.prepared(0)), {loss.optimizer for loss in usage.losses})
        original_node.visit(forward)
        self.models = forward.models
        for loss in usage.losses:
            self._add_autocast(loss, forward)
        if usage.has_autocast:
            self._check_outputs(forward)
            self._check_refused(original_node)
        if usage.scaled and not usage.reasons:
            self.check_scalers(original_node)

    def _find_questions(self) -> None:
        """Find calls of ``is_apex_available()`` and its like, imported from another file.

        Others may return an option.
        """
        for name, call in self.calls:
            if name in self.defined or not ASKING.fullmatch(source(call)):
                continue
            names = self.qualified_names(call.func)
            is_imported = {each.source for each in names} == {QualifiedNameSource.IMPORT}
            if is_imported and AVAILABLE.fullmatch(name):
                self.usage.questions.add(source(call))
            else:
                self.usage.reasons.append(f"{source(call)} may ask for Apex, or for an option")

    def _check_questions(self) -> None:
        """Require that Apex is imported under the conditions of each test for it, and no others.

        The test may be in place of an option.
        """
        for node in self.questions:
            around = self.parents(node)
            name = source(node).split(".")[0]
            needed = [self._options(each, yes) for one, each, yes in self.imports if one == name]
            known = self._options(node, True).union(
                *(parts(each, True) for each in around if isinstance(each, cst.BooleanOperation))
            )
            if not set().union(*needed) <= known:
                self.usage.reasons.append(f"{source(node)} is tested in place of an option")

    def _options(self, node: cst.CSTNode, is_import: bool) -> set[tuple[str, bool]]:
        """Return the conditions of an import, or of None in place of it, the opposite ones."""
        return {
            (test, holds is is_import)
            for each, is_body in self.conditions(node)
            for test, holds in parts(each.test, is_body)
            if not isinstance(self.simplified(each.test), bool)
        }

    def _check_aliases(self) -> None:
        """Require that a scaled loss is not used after its block: its name is removed."""
        losses = self.usage.losses
        aliases = {loss.alias for loss in losses if loss.alias not in names_in(loss.value)}
        blocks = {loss.statement for loss in losses}
        functions = {self.function(block) for block in blocks}
        for name in self.names:
            is_alias = name.value in aliases and self.function(name) in functions
            if is_alias and not blocks & {*self.parents(name)}:
                self.usage.reasons.append(f"{name.value} is used outside of amp.scale_loss")

    def _condition(self, node: cst.Call) -> cst.BaseExpression | None:
        """Return the condition of ``amp.initialize`` which its uses do not share, or None."""
        parent = self.parent(node)
        if not isinstance(parent, (cst.Assign, cst.Expr)):
            self.usage.reasons.append("amp.initialize is part of an expression")
        blocks = (cst.For, cst.While, cst.Try, cst.Match, cst.ClassDef)
        if any(isinstance(each, blocks) for each in self.parents(node)):
            self.usage.reasons.append("amp.initialize is in a loop, a match, a try or a class")
        self.usage.start = self.statement(node)
        found: list[cst.BaseExpression] = []
        for each, holds in self.conditions(node):
            shared = all(each in self.parents(loss.statement) for loss in self.usage.losses)
            test = self.simplified(each.test)
            if shared and self.usage.losses:
                continue
            if not holds or test is False or isinstance(self.parent(each), cst.If):
                self.usage.reasons.append("amp.initialize is in an else or an elif")
            elif not isinstance(test, bool):
                found.append(test)
                self.usage.start = each
        if len(found) > 1:
            self.usage.reasons.append("amp.initialize has more than one condition")
        if found and self.enabled:
            self.usage.reasons.append("amp.initialize is conditional, and has an argument enabled")
        return found[0] if found else self.enabled

    def _check_repeated(self, node: cst.Call) -> None:
        """Require that another ``amp.initialize`` follows the first one."""
        first = self.starts[0]
        is_plain = isinstance(self.parent(node), (cst.Assign, cst.Expr))
        around = {each for each, holds in self.conditions(first) if holds}
        follows = self.function(node) is self.function(first) and around <= {*self.parents(node)}
        if not is_plain or not follows or self.enabled:
            self.usage.reasons.append("amp.initialize is called in more than one place")

    def _check_reached(self) -> None:
        """Require that nothing but its own conditions decides whether amp is initialized.

        A function that trains, too, may be called conditionally, and may return before.
        """
        start = self.starts[0]
        here = self.function(start)
        if not isinstance(here, cst.FunctionDef):
            return
        reached = self.reached({here.name.value})
        training = {self.function(loss.statement) for loss in self.usage.losses}
        if all(isinstance(one, cst.FunctionDef) and one.name.value in reached for one in training):
            return
        line = self.line(start)
        returns = [self.line(one) for one in self.jumps if isinstance(one, cst.Return)]
        first = self.line(here)
        if any(first < one < line for one in returns):
            self.usage.reasons.append("a return is in front of amp.initialize")
        for name, call in self.calls:
            if name == here.name.value and any(self.conditions(call)):
                self.usage.reasons.append(f"{name}, which initializes amp, is called conditionally")

    def _add_autocast(self, loss: Loss, forward: Forward) -> None:
        """Record the statements that compute a loss, and the condition of autocast there."""
        usage = self.usage
        wanted = loss.wanted = names_in(loss.value)
        ranges = [
            (block, forward_range(block.body, index, wanted))
            for block, index in self.levels(loss.statement)
        ]
        enabled = loss.enabled = self._enabled(loss, wanted) if usage.has_autocast else ""
        for block, lines in ranges:
            for line in lines:
                if usage.autocast.setdefault(block, {}).setdefault(line, enabled) != enabled:
                    usage.reasons.append("losses of the same statements have different conditions")
        if not usage.has_autocast:
            return
        if not any(lines for _, lines in ranges):
            usage.reasons.append("the loss is not computed in the function of its amp.scale_loss")
        covered = [block.body[line] for block, lines in ranges for line in lines]
        covered = [line for line in covered if not is_boundary(line)]
        loss.covered = set(covered)
        if not any(forward.runs(line) for line in covered):
            usage.reasons.append(
                "no forward pass of the model is among the statements that compute the loss"
            )

    def _check_outputs(self, forward: Forward) -> None:
        """Require that forward passes are under autocast if a loss may be computed from them."""
        losses = self.usage.losses
        covered = {line for each in losses for line in each.covered}
        called = [(name, call) for name, call in self.calls if covered & {*self.parents(call)}]
        inside = self.reached({name for name, call in called if is_own(name, call)})
        known = {*self.leading(each.statement for each in losses), *(call for _, call in called)}
        for target, value in self.assigned:
            self.local[self.function(target)].append((target, value))
        for call in forward.outputs():
            is_known = call in known or function_name(self.function(call)) in inside
            if not is_known and any(self._may_reach(call, loss) for loss in losses):
                self.usage.reasons.append(
                    f"{source(call.func)} is called outside of autocast, and the loss may be "
                    "computed from what it returns or changes"
                )

    def _check_refused(self, module: cst.Module) -> None:
        """Require that nothing is used that autocast on GPUs refuses, or casts to another type."""
        names = names_in(module)
        if names & {"BCELoss", "binary_cross_entropy"}:
            self.usage.reasons.append("autocast refuses BCELoss on GPUs; use BCEWithLogitsLoss")
        called = {name.rpartition(".")[2] for name, _ in self.calls}
        if self.usage.level == "O4" and "DataParallel" in called:
            self.usage.reasons.append(
                "DataParallel's threads cast to float16, whatever autocast is given; use "
                "DistributedDataParallel, or O1"
            )

    def _may_reach(self, call: cst.Call, loss: Loss) -> bool:
        """Return whether the loss may be computed from the output of a forward pass elsewhere."""
        line, here = self.statement(call), self.function(loss.statement)
        inputs = loss.wanted - {name for each in loss.covered for name in assigned(each)}
        held = self._held(line)
        if self.function(line) is here:
            is_before = self.line(line) < self.line(loss.statement)
            blocks = {block for block, _ in self.levels(loss.statement)}
            if is_before and isinstance(line, cst.SimpleStatementLine) and not assigned(line):
                is_repeated = self.loop(loss.statement) in (None, *self.parents(line))
                called = call.func.value if isinstance(call.func, cst.Subscript) else call.func
                if is_repeated and last_name(called) in self.models:
                    return True  # by way of a hook, which keeps the output
                held |= names_in(line) - self.models if is_repeated else set()
            is_outer = is_before and blocks & {*self.parents(line)}
            if held & (loss.wanted if is_outer else inputs):
                return True
        else:
            pairs_here = self.local[self.function(line)]
            targets = [source(one) for one, _ in pairs_here if self.statement(one) is line]
            attributes = {*re.findall(r"\.(\w+)", " ".join(targets))}
            is_module = isinstance(self.function(line), cst.Module)
            shared = held if is_module else held & (self.globals | self._changed(pairs_here))
            if attributes & loss.wanted or shared & inputs:
                return True
        return self._is_argument(call, held, here)

    def _changed(self, pairs: list[tuple[cst.BaseExpression, cst.BaseExpression]]) -> set[str]:
        """Return the names of containers of others that a function changes by these assignments."""
        own: set[str] = set()
        changed: set[str] = set()
        for target, _ in pairs:
            if isinstance(target, cst.Subscript):
                changed |= last_names(target.value)
            elif isinstance(self.parent(target), cst.Attribute):  # as by append()
                changed |= last_names(target)
            else:
                own |= last_names(target)
        return changed - own

    def _held(self, line: cst.CSTNode) -> set[str]:
        """Return the names that may hold what a statement assigns, also by way of others."""
        found = names_in(line.target) if isinstance(line, cst.For) else {*assigned(line)}
        size = 0
        while size != len(found):
            size = len(found)
            for target, value in self.local[self.function(line)]:
                found |= names_in(target) if names_in(value) & found else set()
        return found

    def _is_argument(self, call: cst.Call, held: set[str], here: cst.CSTNode) -> bool:
        """Return whether a function is given the output of a forward pass, or one of the names."""
        return any(
            call in {*matchers.findall(arg.value, matchers.Call())}
            or names_in(arg.value) & held
            and self.function(call) is self.function(other)
            for other in self.possible_callers(here)
            for arg in other.args
        )

    def _enabled(self, loss: Loss, computed: set[str]) -> str:
        """Return the condition of autocast, and merge branches that become equal.

        It must not depend on the names `computed` in the forward pass.
        """
        usage, same, own = self.usage, not self.usage.condition, ""
        for each, holds in self.conditions(loss.statement):
            test = self.simplified(each.test if holds else negated(each.test))
            is_same = self.is_of_amp(test)
            same = same or is_same
            other = each.orelse if holds else each.body
            has_amp = any(other in {*self.parents(one.statement)} for one in usage.losses)
            if other is None or has_amp or ".backward(" not in plain_source(other):
                continue
            if self._becomes_equal(each, loss):
                usage.merged.add(each)
                if not isinstance(test, bool) and not names_in(test) & computed:
                    own = own or as_bool(test, self.flags)
            elif not is_same and test is not True:
                usage.reasons.append(f"amp.initialize lacks the condition {source(each.test)}")
        if same:
            return usage.condition
        if not usage.scaled and not own:
            usage.reasons.append("amp.scale_loss lacks the condition of amp.initialize")
        return "scaler.is_enabled()" if usage.scaled else own

    def _becomes_equal(self, node: cst.If, loss: Loss) -> bool:
        """Return whether the other branch is the same backward pass without amp."""
        if not isinstance(node.orelse, cst.Else) or isinstance(self.parent(node), cst.If):
            return False
        branches = [node.body, node.orelse.body]
        with_amp = [block for block in branches if [*block.body] == [loss.statement]]
        if len(with_amp) != 1:
            return False
        branches.remove(with_amp[0])
        scaled = source(loss.statement.body).strip()
        value = source(loss.value)
        value = (
            value if value.isidentifier() or isinstance(loss.value, cst.Attribute) else f"({value})"
        )
        plain = re.sub(rf"\b{re.escape(loss.alias)}\b", lambda _: value, scaled)
        return plain == source(branches[0]).strip()
