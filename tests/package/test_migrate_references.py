"""``apex-native migrate``: classes of Apex that a script also uses without calling them."""

import pytest
from migrated_scripts import migrate

pytest.importorskip("libcst", reason="needs libcst, which the extra `migrate` installs")

pytestmark = pytest.mark.xdist_group("package")

WITHOUT_CALL = "without calling it, as isinstance() does"
STILL_USED = "what this imports from Apex may be used in a way that migrate does not rewrite"
NORM = "from apex.normalization import FusedLayerNorm as LN\nm = LN(8)\n"
SCRIPTS = [
    NORM + "norms = [each for each in n.modules() if isinstance(each, (nn.GroupNorm, LN))]\n",
    NORM + "is_norm = type(m) is LN\n",
    NORM + "Norm = LN if fused else nn.LayerNorm\n",
    NORM + "class Mine(LN):\n    pass\n",
    NORM + "import apex\nx = isinstance(m, apex.normalization.fused_layer_norm.FusedLayerNorm)\n",
    "from apex.parallel import DistributedDataParallel as DDP\nm = DDP(m)\n"
    "n = m.module if isinstance(m, DDP) else m\n",
    "import apex\nm = apex.parallel.convert_syncbn_model(m)\n"
    "x = isinstance(m, apex.parallel.SyncBatchNorm)\n",
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_calls_of_a_class_with_other_uses_are_left(tmp_path, script):
    code, report = migrate(tmp_path, script, status=1)
    assert WITHOUT_CALL in report and "0 changed" in report
    assert [line for line in code.splitlines() if "# apex-native" not in line] == (
        script.splitlines()
    )


@pytest.mark.parametrize(
    "line",
    [
        "assert FusedAdam is not None",
        "if not FusedAdam:\n    raise SystemExit",
        "if FusedAdam and args.fast:\n    pass",
        "assert 1 if FusedAdam else 0",
        "def f(o: FusedAdam) -> None: ...",
        "def f(o: Optional[FusedAdam]) -> None: ...",
        "f(FusedAdam=1)",
        "self.FusedAdam()",
    ],
)
def test_other_uses_that_do_not_depend_on_the_class_are_ignored(tmp_path, line):
    script = f"from apex.optimizers import FusedAdam\no = FusedAdam(p)\n{line}\n"
    has_import = line[0] in "aid"
    code, report = migrate(tmp_path, script, status=int(has_import))
    assert "o = torch.optim.AdamW(" in code
    assert (STILL_USED in report) == has_import


def test_import_that_no_call_explains_is_reported_among_others(tmp_path):
    """Calls of the other names are left, for reasons of their own."""
    script = (
        "from apex.normalization import FusedLayerNorm\nfrom apex.optimizers import FusedLAMB\n"
        "x = isinstance(m, FusedLayerNorm)\no = FusedLAMB(p)\n"
    )
    code, report = migrate(tmp_path, script, status=1)
    assert f"1: left: {STILL_USED}" in report and f"2: left: {STILL_USED}" not in report
    assert code.count("# apex-native migrate: ") == 2
    assert migrate(tmp_path, code, status=1)[0] == code


def test_class_of_torch_in_isinstance_is_reported(tmp_path):
    """Apex's layer was not an instance of it."""
    script = NORM + "from torch import nn\nx = isinstance(m, nn.LayerNorm)\ny = nn.RMSNorm\n"
    report = migrate(tmp_path, script)[1]
    assert "2: changed: isinstance(…, LayerNorm), which the file has, is true of it" in report
    assert "RMSNorm)" not in report
    other = NORM + "from mine import LayerNorm\nx = isinstance(m, LayerNorm)\n"
    assert "is true of it" not in migrate(tmp_path, other)[1]
