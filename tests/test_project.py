"""pyproject.toml (ranges), constraints.txt (the tested set) and environment.yml (conda) agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DIRECT = [Requirement(line) for line in PROJECT["dependencies"]]
OPTIONAL = [Requirement(r) for lines in PROJECT["optional-dependencies"].values() for r in lines]
PINS = {
    pin.name: str(pin.specifier).removeprefix("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line.strip() and not line.startswith("#")
    for pin in [Requirement(line)]
}
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())
CONDA_NAMES = {"pytorch": "torch"}


def test_every_dependency_is_pinned_to_a_version_in_its_range():
    for requirement in DIRECT + OPTIONAL:
        assert requirement.name in PINS, f"{requirement.name} is missing in constraints.txt"
        assert PINS[requirement.name] in requirement.specifier, str(requirement)


def test_conda_installs_the_same_packages_in_the_same_ranges():
    listed = [Requirement(line) for line in CONDA["dependencies"] if isinstance(line, str)]
    ranges = {CONDA_NAMES.get(r.name, r.name): str(r.specifier) for r in listed}
    assert ranges.pop("python") == PROJECT["requires-python"]
    del ranges["pip"]
    assert ranges == {requirement.name: str(requirement.specifier) for requirement in DIRECT}


def test_conda_installs_the_course_itself_as_binder_needs_it():
    (pip,) = [line["pip"] for line in CONDA["dependencies"] if isinstance(line, dict)]
    assert pip == ["-e ."]
    assert CONDA["channels"] == ["conda-forge", "nodefaults"]


def test_the_workflow_tests_the_oldest_torch_that_is_allowed():
    (torch,) = [r for r in DIRECT if r.name == "torch"]
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    versions = workflow["jobs"]["test"]["strategy"]["matrix"]["versions"]
    assert PROJECT["requires-python"] == f">={versions[0]['python']}"
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    oldest = re.search(r"torch==([\d.]+)\.\*", text)
    assert oldest and str(torch.specifier) == f">={oldest[1]}"
    assert workflow["permissions"] == {"contents": "read"}


def test_the_readme_names_only_files_and_commands_that_exist():
    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    for link in re.findall(r"\]\((?!https?:|#)([^)]+)\)", text):
        assert (ROOT / link).exists(), f"README.md or CONTRIBUTING.md links to {link}"
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make (\w+)`", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"no target {target}"
