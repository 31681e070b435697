"""Facts about amp in a script, which the analysis collects and the rewriting uses."""

from dataclasses import dataclass, field

import libcst as cst

from .places import source


@dataclass
class Loss:
    """A call of ``amp.scale_loss``."""

    statement: cst.With
    value: cst.BaseExpression
    alias: str
    optimizer: str
    enabled: str = ""  # the condition of autocast, "" if there is none
    wanted: set[str] = field(default_factory=set)  # names that it is computed from
    covered: set[cst.CSTNode] = field(default_factory=set)  # statements under autocast


@dataclass
class Usage:
    """Facts about amp in a script. It stays unchanged if there is a reason in `reasons`."""

    level: str = ""
    has_allreduce: bool = False  # a method of Apex's DDP without an equivalent is used
    has_function: bool = False  # a class is derived from autograd.Function
    has_half: bool = False  # half types are used other than by autocast and amp
    has_load: bool = False  # the state of something is loaded
    may_cast: bool = False  # amp.initialize, if it is left, may leave parameters half
    reasons: list[str] = field(default_factory=list)
    # Classes used without a call, by the name of the class or of what creates it.
    referenced: dict[str, str] = field(default_factory=dict)
    compared: set[str] = field(default_factory=set)  # torch's classes that isinstance() is given
    fallbacks: set[str] = field(default_factory=set)  # names with None in place of Apex
    flags: set[str] = field(default_factory=set)  # names that are True if Apex can be imported
    questions: set[str] = field(default_factory=set)  # calls such as is_apex_available()
    probes: set[cst.CSTNode] = field(default_factory=set)  # which look for Apex by its name
    init_scale: str = ""  # to which the script sets the scale of amp
    init_scale_statement: cst.CSTNode | None = None
    condition: str = ""  # of amp.initialize, "" if it always runs
    start: cst.CSTNode | None = None  # the statement at which the scalers are created
    is_global: bool = False  # a function creates the scalers, and another one uses them
    ignored_level: str = ""  # the variable in place of which --opt-level stands
    losses: list[Loss] = field(default_factory=list)
    scalers: dict[str, str] = field(default_factory=dict)  # by optimizer
    autocast: dict[cst.CSTNode, dict[int, str]] = field(default_factory=dict)  # by block, line
    unscale: dict[cst.CSTNode, list[str]] = field(default_factory=dict)  # in front of statements
    unscaled: set[cst.CSTNode] = field(default_factory=set)  # losses, after which it comes
    merged: set[cst.CSTNode] = field(default_factory=set)  # ifs whose branches become equal

    def is_available(self, node: cst.CSTNode, name: str) -> bool:
        """Return whether `node`, with this name of Apex, asks whether Apex can be imported."""
        is_flag = isinstance(node, cst.Name) and node.value in self.flags
        is_call = bool(self.level) and isinstance(node, cst.Call) and source(node) in self.questions
        return is_flag or is_call or name in ("apex", "apex.amp")

    @property
    def scaled(self) -> bool:
        """Return whether the losses are scaled, as at O1."""
        return self.level == "O1"

    @property
    def has_autocast(self) -> bool:
        """Return whether forward passes run under autocast."""
        return self.level in ("O1", "O4")

    def grad_scaler(self) -> str:
        """Return the expression that creates a GradScaler."""
        init_scale = self.init_scale and f", init_scale={self.init_scale}"
        enabled = self.condition and f", enabled={self.condition}"
        return f'torch.amp.GradScaler("cuda"{init_scale}{enabled})'

    def context(self, enabled: str) -> str:
        """Return the expression of the context manager for forward passes.

        Apex casts weights again for each backward pass. Autocast's cache would still have them
        after a step, or another change, among the statements.
        """
        device, dtype = '"cuda"', "torch.float16"
        if not self.scaled:
            device, dtype = '"cuda" if torch.cuda.is_available() else "cpu"', "torch.bfloat16"
        enabled = enabled and f", enabled={enabled}"
        return f"torch.autocast({device}, {dtype}{enabled}, cache_enabled=False)"

    def no_autocast(self) -> str:
        """Return the expression of the context manager in place of ``amp.disable_casts()``."""
        return (
            self.context("False") if self.level == "O4" else 'torch.autocast("cuda", enabled=False)'
        )
