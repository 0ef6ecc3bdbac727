"""The workflows of the public forge: least permissions, pinned actions, no secrets, and the Pythons and systems that we support."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8")))


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_jobs_have_limits_and_few_permissions(file: Path) -> None:
    workflow = read(file.name)
    assert workflow["permissions"] in ({}, {"contents": "read"}) and "concurrency" in workflow
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 60 and job["runs-on"], name
        granted = job.get("permissions", {})
        assert granted.items() <= {"contents": "read", "id-token": "write"}.items(), name
    for step in steps(workflow):
        assert ("uses" in step) != ("run" in step)
        if "uses" in step:
            assert re.fullmatch(r"(actions/[\w-]+@v\d+|pypa/gh-action-pypi-publish@release/v\d+)", step["uses"])
        if step.get("uses", "").startswith("actions/checkout"):
            assert step["with"]["persist-credentials"] is False
    text = file.read_text(encoding="utf-8")
    assert "secrets." not in text and "pull_request_target" not in text
    for command in (step["run"] for step in steps(workflow) if "run" in step):  # a branch's name must not become a command
        assert not re.search(r"\$\{\{\s*github\.(event|head_ref|ref_name)", command)


def test_every_python_and_system() -> None:
    jobs = read("tests.yml")["jobs"]
    matrix = jobs["fast"]["strategy"]["matrix"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == f">={matrix['python'][0]}" and matrix["python"] == ["3.11", "3.12", "3.13"]
    assert {name.partition("-")[0] for name in matrix["os"]} == {"ubuntu", "macos", "windows"}
    for version in matrix["python"]:
        assert f"Programming Language :: Python :: {version}" in project["classifiers"]
    command = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-1]
    for workflow, job in (("tests.yml", "everything"), ("release.yml", "test")):
        assert command in [step.get("run") for step in read(workflow)["jobs"][job]["steps"]]


def test_only_a_tested_tag_is_published() -> None:
    workflow = read("release.yml")
    assert list(workflow[True]) == ["push"] and list(workflow[True]["push"]) == ["tags"]  # YAML reads `on` as true
    publish = workflow["jobs"]["publish"]
    assert set(publish["needs"]) == {"build", "test"} and publish["permissions"] == {"id-token": "write"}
    assert [job for job in workflow["jobs"].values() if "id-token" in job.get("permissions", {})] == [publish]
