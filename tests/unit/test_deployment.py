"""The Dockerfile, the systemd unit, the GitHub workflow and pre-commit agree with the program and with each other."""

from __future__ import annotations

import configparser
import os
import re
from pathlib import Path

import pytest
import yaml

from cppbatch.cli.main import cli

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
UNIT = (ROOT / "deploy" / "cppbatch.service").read_text()
DEPLOYMENT = (ROOT / "docs" / "deployment.md").read_text()
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
PYPROJECT = (ROOT / "pyproject.toml").read_text()
NO_FLAG = {"CPPBATCH_MODELS", "CPPBATCH_CONFIG", "CPPBATCH_BACKEND", "CPPBATCH_WHEELS"}
"""Environment variables that belong to no flag of `cppbatch serve`."""

OPTIONS = {option.envvar[0]: option for option in cli.commands["serve"].params if option.envvar}


@pytest.fixture
def service() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT)
    return parser["Service"]


@pytest.mark.parametrize("text", [DOCKERFILE, UNIT, DEPLOYMENT], ids=["Dockerfile", "cppbatch.service", "page"])
def test_every_environment_variable_exists(text: str) -> None:
    named = set(re.findall(r"CPPBATCH_[A-Z_]+", text))
    assert named
    assert named <= NO_FLAG | set(OPTIONS)


def test_the_service_has_longer_to_stop_than_requests_have_to_finish(service: configparser.SectionProxy) -> None:
    drain = OPTIONS["CPPBATCH_DRAIN_TIMEOUT"].default
    assert isinstance(drain, float | int)
    assert int(service["TimeoutStopSec"]) > drain
    stop_timeouts = [int(seconds) for seconds in re.findall(r"--stop-timeout (\d+)", DEPLOYMENT)]
    assert stop_timeouts
    assert min(stop_timeouts) > drain


def test_the_service_opens_as_many_files_as_the_server_has_connections(service: configparser.SectionProxy) -> None:
    assert int(service["LimitNOFILE"]) > 8192


def test_the_service_is_confined(service: configparser.SectionProxy) -> None:
    for name in ("DynamicUser", "NoNewPrivileges", "PrivateTmp", "ProtectHome", "ProtectKernelTunables"):
        assert service[name] == "yes"
    assert service["ProtectSystem"] == "strict"
    assert service["CapabilityBoundingSet"] == ""
    assert service["Restart"] == "on-failure"
    assert service["OOMPolicy"] == "continue", "a worker that is killed for memory must not stop the server"


def test_the_image_runs_without_root_and_has_a_health_check() -> None:
    last_stage = DOCKERFILE[DOCKERFILE.rindex("\nFROM ") :]
    assert re.search(r"^USER cppbatch$", last_stage, re.MULTILINE)
    assert re.search(r"^VOLUME \[\"/models\", \"/data\"\]$", last_stage, re.MULTILINE)
    assert "http://127.0.0.1:8080/health" in last_stage[last_stage.index("HEALTHCHECK") :]
    assert OPTIONS["CPPBATCH_PORT"].default == 8080


def test_the_image_gets_every_file_that_it_copies() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for names in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE):
        for name in names.split():
            assert name in allowed
            assert (ROOT / name).exists()


def test_the_workflow_tests_the_python_versions_of_the_package() -> None:
    tested = WORKFLOW["jobs"]["unit"]["strategy"]["matrix"]["python"]
    assert tested == re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT)
    oldest = re.search(r'requires-python = ">=(.+)"', PYPROJECT)
    assert oldest
    assert tested[0] == oldest[1]


def test_the_workflow_runs_the_unit_tests_on_the_systems_of_the_package() -> None:
    matrix = WORKFLOW["jobs"]["unit"]["strategy"]["matrix"]
    runners = {*matrix["os"], *(each["os"] for each in matrix["include"])}
    names = {"Linux": "ubuntu", "MacOS": "macos", "Windows": "windows"}
    systems = re.findall(r'"Operating System :: (?:.* :: )?(\w+)"', PYPROJECT)
    assert {runner.partition("-")[0] for runner in runners} == {names[system] for system in systems}


def test_the_installer_installs_the_dependency_groups_and_ci_has_a_version_of_each_tool() -> None:
    block = PYPROJECT[PYPROJECT.index("[dependency-groups]") : PYPROJECT.index("[project.urls]")]
    groups = re.findall(r"^(\w+) = \[", block, re.MULTILINE)
    installer = re.search(r"^GROUPS = \((.*?)\)", (ROOT / "scripts" / "install.py").read_text(), re.MULTILINE)
    assert installer
    assert re.findall(r'"(\w+)"', installer[1]) == groups
    tools = set(re.findall(r'"([a-z-]+)>=', block))
    pinned = set(re.findall(r"^([\w-]+)==[\w.]+", (ROOT / ".github" / "constraints.txt").read_text(), re.MULTILINE))
    assert tools - pinned == set()
    for name in ("unit", "full"):
        assert WORKFLOW["jobs"][name]["env"]["PIP_CONSTRAINT"].endswith(".github/constraints.txt")


def test_issue_forms_ask_for_the_output_of_doctor() -> None:
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")}
    assert set(forms) == {"bug_report", "feature_request", "config"}
    (doctor,) = [field for field in forms["bug_report"]["body"] if field.get("id") == "doctor"]
    assert doctor["validations"]["required"]
    updated = yaml.safe_load((ROOT / ".github/dependabot.yml").read_text())["updates"]
    assert [each["package-ecosystem"] for each in updated] == ["pip", "github-actions", "docker"]


def test_the_workflow_and_ci_run_the_test_command() -> None:
    commands = {step.get("run") for job in WORKFLOW["jobs"].values() for step in job["steps"]}
    assert {"./scripts/test unit", "./scripts/test"} <= commands
    nightly = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())["jobs"]["nightly"]
    assert nightly["steps"][-1]["run"] == "./scripts/test nightly"
    assert "./scripts/test" in (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / "scripts" / "test", os.X_OK)


def test_pre_commit_runs_the_checks_of_the_test_command() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    local = [hook["entry"] for repo in hooks if repo["repo"] == "local" for hook in repo["hooks"]]
    for tool in ("ruff check", "ruff format", "mypy", "lint-imports"):
        assert any(entry.startswith(f".venv/bin/{tool}") for entry in local)
