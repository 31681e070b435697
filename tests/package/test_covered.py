"""The list of Apex's names that are covered: the modules here, the table in the documentation."""

import re

import pytest
from apex_native import __main__ as runner
from apex_native.extras import covered_values
from apex_native.extras.covered import COVERED
from fresh import ROOT

pytestmark = pytest.mark.xdist_group("package")


def names(module, in_extras):
    """Return the names of a module of Apex that come from `extras`, or from the library."""
    sources = COVERED[module].items()
    return {
        name
        for source, listed in sources
        if source.startswith("extras.") == in_extras
        for name in listed.split()
    }


def test_table_in_the_documentation_equals_the_list():
    text = (ROOT / "docs" / "reference" / "apex_names.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \| (.*) \| (.*) \|$", text, re.MULTILINE)
    documented = {
        module: (set(re.findall(r"`(\w+)`", library)), set(re.findall(r"`(\w+)`", extras)))
        for module, library, extras in rows
    }
    assert len(documented) == len(rows)
    assert documented == {
        module: (names(module, False), names(module, True))
        for module, sources in COVERED.items()
        if sources
    }


def test_parents_are_listed_before_their_modules():
    listed = ["apex"]
    for module in COVERED:
        assert module in ("amp_C", "apex_C") or module.rpartition(".")[0] in listed, module
        listed.append(module)


@pytest.mark.parametrize("module", [module for module in COVERED if COVERED[module]])
def test_every_name_exists_and_is_documented(module):
    for name, value in covered_values(module).items():
        assert not callable(value) or value.__doc__, name


def test_library_by_itself_says_that_the_package_has_the_names_of_extras(monkeypatch):
    """But for `multi_tensor_applier`, which is there as unavailable."""
    monkeypatch.setattr(runner, "HAS_EXTRAS", False)
    for module in COVERED:
        for name in names(module, True) - names(module, False) - {"multi_tensor_applier"}:
            error = ImportError(f"cannot import name '{name}' from '{module}'")
            try:
                raise error
            except ImportError:
                runner.explain(error)
            assert "pip install git+https://" in str(error), (module, name)


@pytest.mark.parametrize(
    "name", ["apex.transformer.tensor_parallel", "apex.contrib.optimizers.distributed"]
)
def test_error_names_what_is_missing_of_a_module_that_is_covered_in_part(name):
    module, _, last = name.rpartition(".")
    with pytest.raises(ImportError) as caught:
        raise ImportError(f"cannot import name '{last}' from '{module}' (unknown location)")
    runner.explain(caught.value)
    assert f"does not have {name}; use torch.distributed" in str(caught.value)


@pytest.mark.slow
def test_every_name_can_be_imported_from_apex(run, tmp_path):
    lines = [
        f"from {module} import {', '.join(sorted(covered_values(module)))}"
        for module in COVERED
        if COVERED[module]
    ]
    lines += ["import apex", *(f"import {module}; {module}" for module in COVERED)]
    lines += ["from apex.multi_tensor_apply import multi_tensor_applier as applier"]
    lines += ["assert applier.available", "assert apex.contrib.optimizers.FP16_Optimizer"]
    lines += ["assert apex.fp16_utils.FP16_Optimizer is not apex.optimizers.FP16_Optimizer"]
    (tmp_path / "script.py").write_text("\n".join(lines))
    done = run("-m", "apex_native", "script.py")
    assert done.returncode == 0, done.stderr
