"""Who may import whom, which files travel with a checkpoint, and how long anything may get."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import (
    get_imports,
    get_relative_import_files,
    get_relative_imports,
)

import hf_dflash

PACKAGE = Path(hf_dflash.__file__).parent
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")

#: What each module that travels with a checkpoint may import of the others. A new one belongs
#: here: published drafters carry it, and run it where this package is not installed.
TRAVELS = {
    "rope_dflash": set(),
    "values_dflash": set(),
    "geometry_dflash": {"rope_dflash"},
    "formats_dflash": {"rope_dflash", "values_dflash"},
    "configuration_dflash": {
        "formats_dflash",
        "geometry_dflash",
        "rope_dflash",
        "values_dflash",
    },
    "checkpoint_dflash": {"formats_dflash"},
    "verification": set(),
    "few_rows": set(),
    "target": set(),
    "outputs_dflash": set(),
    "attention_masks": set(),
    "context_cache": set(),
    "drafting": {"target", "verification"},
    "chain_decoding": {"drafting", "few_rows", "outputs_dflash", "target", "verification"},
    "generation_dflash": {
        "chain_decoding",
        "checkpoint_dflash",
        "drafting",
        "outputs_dflash",
        "target",
    },
    "modeling_dflash": {
        "attention_masks",
        "checkpoint_dflash",
        "configuration_dflash",
        "context_cache",
        "generation_dflash",
    },
}
#: Steps without state or model, which import torch and nothing else.
PURE = ("verification", "few_rows", "blocks", "losses", "tree")
#: Ends of the chain: commands and trainers use the package, not the other way round.
NOT_IMPORTED = {"cli": set(), "commands": {"cli"}, "trainer": {"training_run"}}
NOT_WITH_THE_PACKAGE = {"datasets", "accelerate", "matplotlib", "evaluate", "typer", "rich"}

MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_FUNCTION = 50  # its docstring and signature aside
MOST_POSITIONAL_PARAMETERS = 6  # self aside


def tree_of(module: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))


def imports(module: str) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import, those inside functions included."""
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node


def own_imports(module: str) -> set[str]:
    found = set()
    for node in imports(module):
        if isinstance(node, ast.ImportFrom) and node.level:
            found |= {node.module.split(".")[0]} if node.module else {a.name for a in node.names}
    return found


def foreign_imports(module: str) -> set[str]:
    """Packages outside the standard library."""
    names = set()
    for node in imports(module):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif not node.level:
            names.add(str(node.module).split(".")[0])
    return names - set(sys.stdlib_module_names)


def functions(module: str) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.FunctionDef):
            yield node


def n_body_lines(function: ast.FunctionDef) -> int:
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def test_what_travels_is_what_transformers_will_copy():
    files = get_relative_import_files(PACKAGE / "modeling_dflash.py")
    assert {Path(file).stem for file in files} | {"modeling_dflash"} == set(TRAVELS)


@pytest.mark.parametrize("module", TRAVELS)
def test_a_travelling_module_imports_along_the_arrows(module):
    assert own_imports(module) <= TRAVELS[module]
    assert foreign_imports(module) <= {"torch", "transformers"}


@pytest.mark.parametrize("module", TRAVELS)
def test_transformers_reads_the_imports_of_a_travelling_module_as_python_does(module):
    # It looks for them with regular expressions, in docstrings too.
    file = PACKAGE / f"{module}.py"
    assert set(get_relative_imports(file)) == own_imports(module)
    assert set(get_imports(file)) - set(sys.stdlib_module_names) == foreign_imports(module)
    for node in imports(module):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1, f"{module}: only `from .x import y` is found and copied"
            assert node.module, f"{module}: only `from .x import y` is found and copied"
            assert "." not in node.module, f"{module}: only `from .x import y` is copied flat"
        elif isinstance(node, ast.ImportFrom):
            assert not str(node.module).startswith("hf_dflash")


@pytest.mark.parametrize("module", TRAVELS)
def test_a_travelling_module_never_asks_for_the_packages_own_classes(module):
    # The same file loaded with trust_remote_code makes another class of the same name.
    own_classes = {
        alias.asname or alias.name
        for node in imports(module)
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }
    # The cache is made by the model that looks at it: both come from the same copy.
    own_classes -= {"ContextCache"}
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "isinstance":
            asked = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
            assert not asked & own_classes, f"{module}, line {node.lineno}"


@pytest.mark.parametrize("module", [name for name in PURE if name in MODULES])
def test_a_pure_module_needs_torch_only(module):
    assert own_imports(module) <= {name for name in PURE if name in MODULES}
    assert foreign_imports(module) == {"torch"}


def test_the_arithmetic_of_the_metric_on_the_hub_stands_alone():
    assert own_imports("acceptance_counts") == foreign_imports("acceptance_counts") == set()


@pytest.mark.parametrize("module", MODULES)
def test_nothing_imports_the_ends_of_the_chain(module):
    for end, allowed in NOT_IMPORTED.items():
        assert end not in own_imports(module) or module in allowed


def test_no_module_imports_itself_by_a_detour():
    arrows = {module: own_imports(module) for module in MODULES}
    while arrows:
        leaves = {m for m, needed in arrows.items() if not needed & arrows.keys()}
        assert leaves, f"imports go in a circle among {sorted(arrows)}"
        arrows = {m: needed for m, needed in arrows.items() if m not in leaves}


@pytest.mark.parametrize("module", MODULES)
def test_no_file_and_no_function_is_too_long(module):
    n_lines = len((PACKAGE / f"{module}.py").read_text(encoding="utf-8").splitlines())
    assert n_lines <= MOST_LINES_OF_A_FILE
    long = {
        f.name: n for f in functions(module) if (n := n_body_lines(f)) > MOST_LINES_OF_A_FUNCTION
    }
    assert not long, f"at most {MOST_LINES_OF_A_FUNCTION} lines"


@pytest.mark.parametrize("module", MODULES)
def test_no_function_takes_too_many_positional_parameters(module):
    for function in functions(module):
        names = [a.arg for a in function.args.posonlyargs + function.args.args]
        n_own = len([name for name in names if name not in ("self", "cls")])
        # The forward of a model is called by transformers, by its names and in their order.
        assert n_own <= MOST_POSITIONAL_PARAMETERS or function.name in ("forward",), function.name


def packages_after(code: str) -> set[str]:
    """Top-level packages in a fresh interpreter after ``code``."""
    code += "; import sys; print(*{name.split('.')[0] for name in sys.modules})"
    command = [sys.executable, "-W", "ignore", "-c", code]
    output = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(output.stdout.split())


def test_importing_the_package_imports_nothing_heavy():
    assert not packages_after("import hf_dflash") & (NOT_WITH_THE_PACKAGE | {"torch"})


def test_the_model_needs_only_what_transformers_imports_itself():
    theirs = (
        "from transformers.models.qwen3.modeling_qwen3 import Qwen3Model;"
        "from transformers.generation.candidate_generator import CandidateGenerator;"
        "from transformers.generation.utils import GenerationMixin"
    )
    ours = "from hf_dflash import DFlashDraftModel, DFlashConfig, DFlashCandidateGenerator"
    extra = packages_after(ours) - packages_after(theirs) - set(sys.stdlib_module_names)
    assert extra == {"hf_dflash"}
