"""Where things are: imports respect the layers, and docs/structure.md names every module."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support import ROOT

PACKAGES = ("dllm", "rollout", "weight_sync", "trainers", "recipes")
MODULES = sorted(
    path.relative_to(ROOT)
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if "checkpoints" not in path.parts
)

STACK = {"sglang", "verl", "ray", "transformers", "vllm"}
FORBIDDEN = {
    "dllm": {*STACK, "rollout", "weight_sync", "trainers", "recipes", "hydra", "omegaconf"},
    "weight_sync": {*STACK, "rollout", "trainers", "recipes"},
    "rollout": {"trainers", "recipes"},
    "trainers": {"recipes"},
    "recipes": set(),
}
"""Packages that a package never imports, at any level of nesting."""

MAX_LINES = 330


def imported(path: Path) -> set[str]:
    """Top-level packages a file imports anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_layers(package):
    for module in (m for m in MODULES if m.parts[0] == package):
        assert not imported(ROOT / module) & FORBIDDEN[package], module


def test_verl_and_sglang_are_known_in_few_places():
    """verl in rollout/verl and trainers, SGLang's modules in rollout/plugin, rollout/verl and rollout/engine.py."""
    for module in MODULES:
        names, inside = imported(ROOT / module), module.as_posix()
        if "verl" in names:
            assert inside.startswith(("rollout/verl/", "trainers/")), module
        if "sglang" in names:
            assert inside.startswith(("rollout/plugin/", "rollout/verl/")) or inside == "rollout/engine.py", module


def test_dllm_needs_four_libraries_only():
    import sys

    for module in (m for m in MODULES if m.parts[0] == "dllm"):
        foreign = {n for n in imported(ROOT / module) if n not in sys.stdlib_module_names} - {"dllm"}
        assert foreign <= {"torch", "triton", "numpy", "safetensors"}, module


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_modules_are_short_and_described(module):
    text = (ROOT / module).read_text()
    assert len(text.splitlines()) <= MAX_LINES
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), "a module says in one line what it holds"


def test_every_module_is_in_the_structure_page():
    page = ROOT / "docs" / "structure.md"
    if not page.is_file():
        pytest.skip("docs/structure.md does not exist yet")
    text = page.read_text()
    missing = [m.as_posix() for m in MODULES if m.name != "__init__.py" and m.as_posix() not in text]
    assert not missing, f"docs/structure.md does not name {missing}"
