"""The import table of the project, enforced. Change it together with README's."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MAY_IMPORT = {
    "units": set(),
    "ledger": {"units"},
    "placement": {"units", "ledger"},
    "backing": {"ledger"},
    "residency": {"backing", "ledger", "placement"},
    "node": {"units"},
    "results": {"node"},
    "tree": {"units", "node", "results"},
    "order": {"node"},
    "prefixes": {"node"},
    "planner": {"units", "node", "order"},
    "frame_search": {"units", "ledger", "node", "order", "planner"},
    "frame_planner": {"units", "ledger", "node", "order", "planner", "frame_search"},
    "reclaim": {"ledger", "placement", "node", "results", "tree", "planner", "frame_planner"},
    "check": {"units", "node", "results", "tree", "order", "planner", "reclaim"},
    "__init__": set(),
}


def imported_modules(path: Path) -> set[str]:
    """Every module named in an import of `path`, those under TYPE_CHECKING and inside functions included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            assert node.module is not None
            found |= (
                {f"{node.module}.{alias.name}" for alias in node.names}
                if node.module == "radix_pages"
                else {node.module}
            )
    return found


def test_every_core_module_stands_in_the_table():
    assert {path.stem for path in (ROOT / "radix_pages").glob("*.py")} == set(MAY_IMPORT)


@pytest.mark.parametrize("module", MAY_IMPORT)
def test_a_core_module_imports_only_what_the_table_allows(module):
    allowed = {f"radix_pages.{name}" for name in MAY_IMPORT[module]}
    for name in imported_modules(ROOT / "radix_pages" / f"{module}.py"):
        top = name.partition(".")[0]
        if top == "radix_pages":
            assert name in allowed, f"{module}.py may not import {name}"
        else:
            assert top in sys.stdlib_module_names or top == "numpy", f"{module}.py imports {name}"


def test_the_core_loads_neither_torch_nor_sglang():
    import subprocess

    code = (
        "import sys, pkgutil, importlib, radix_pages\n"
        "for m in pkgutil.iter_modules(radix_pages.__path__): importlib.import_module('radix_pages.' + m.name)\n"
        "print({'torch', 'sglang', 'radix_pages_sglang'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_only_convert_may_make_a_device_wait():
    """In the adapter a device is read (.item(), .tolist(), .cpu()) in convert.py alone."""
    waits = {"item", "tolist", "cpu", "numpy", "nonzero", "synchronize"}
    folder = ROOT / "integration" / "radix_pages_sglang"
    for path in sorted(folder.glob("*.py")):
        if path.name == "convert.py":
            continue
        calls = {
            node.func.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        }
        assert not calls & waits, f"{path.name} calls {sorted(calls & waits)}"
