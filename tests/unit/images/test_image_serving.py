"""Which of several vLLM an image serves: its command, user and search path decide."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.images.image_making import (
    AMD64,
    PYTHON,
    SITE,
    Docker,
    Entries,
    Link,
    native,
    own,
    tarred,
    vllm,
)

LOCAL = "usr/local/lib/python3.11/dist-packages"
VENV = "opt/venv/lib/python3.12/site-packages"
IN_VENV: Entries = {
    "opt/venv/bin/python": Link("/usr/bin/python3"),
    "opt/venv/pyvenv.cfg": b"home = /usr/bin\nversion = 3.12.3\n",
    "opt/venv/bin/vllm": b"#!/opt/venv/bin/python\n",
}
PASSWD = b"root:x:0:0::/root:/bin/sh\napp:x:1000:1000::/home/app:/bin/sh\n"
HOME_SITE = "home/app/.local/lib/python3.11/site-packages"
SYSTEM = {**PYTHON, "etc/passwd": PASSWD, "usr/bin/tini": AMD64, "usr/bin/bash": AMD64}


def both_ways(elsewhere: str) -> list[tuple[Entries, str]]:
    """A leaking vLLM in a folder and a native one in the system's, and the other way round."""
    return [
        ({**SYSTEM, **native(), **vllm(site=elsewhere)}, "0.29.0"),
        ({**SYSTEM, **vllm(), **native(site=elsewhere)}, "0.30.0"),
    ]


def served(docker: Docker, entries: Entries, **settings: Any) -> str | None:
    """Version of the vLLM that serves; None where that is a finding of its own."""
    docker.image(tarred(entries), **settings)
    code, data = docker.inspected()
    if data["reason"] == "undecided":
        assert code == 1
        trees = [
            at.removesuffix("/__init__.py") for at in entries if at.endswith("/vllm/__init__.py")
        ]
        assert all(f"/{tree}" in data["sentence"] for tree in trees)
        return None
    assert code == (0 if data["reason"] == "native" else 1)
    version: str = data["vllm"]["version"]
    return version


@pytest.mark.parametrize(
    "settings",
    [
        {"Entrypoint": ["/opt/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server"]},
        {"Entrypoint": ["python"], "Cmd": ["-m", "vllm"], "Env": ["PATH=/opt/venv/bin:/usr/bin"]},
        {"Entrypoint": ["vllm", "serve"], "Env": ["PATH=/opt/venv/bin:/usr/bin"]},
        {"Entrypoint": ["bin/vllm"], "Cmd": ["serve"], "WorkingDir": "/opt/venv"},
        {"Cmd": ["/opt/venv/bin/python", "/usr/bin/serve.py"]},
    ],
    ids=["interpreter", "cmd", "script", "relative", "program"],
)
@pytest.mark.parametrize(("entries", "version"), both_ways(VENV), ids=["leaks", "native"])
def test_command_starts_a_virtual_environment(
    docker: Docker, entries: Entries, version: str, settings: dict[str, Any]
) -> None:
    assert served(docker, {**entries, **IN_VENV}, **settings) == version


@pytest.mark.parametrize(
    "command",
    [["python3", "app/serve.py"], ["/usr/bin/python3", "-u", "-X", "dev", "app/serve.py"]],
)
@pytest.mark.parametrize(("entries", "version"), both_ways("srv/app"), ids=["leaks", "native"])
def test_vllm_beside_the_program_that_is_started(
    docker: Docker, entries: Entries, version: str, command: list[str]
) -> None:
    program = {"srv/app/serve.py": b""}
    assert served(docker, {**entries, **program}, Cmd=command, WorkingDir="/srv") == version


@pytest.mark.parametrize(
    ("command", "at_start"),
    [
        (["python3", "-m", "vllm.entrypoints.openai.api_server"], True),
        (["python3", "-c", "import vllm"], True),
        (["python3", "-Im", "vllm"], False),
        (["python3", "-P", "-m", "vllm"], False),
        (["python3", "/usr/bin/serve.py"], False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
@pytest.mark.parametrize(("entries", "there"), both_ways("work"), ids=["leaks", "native"])
def test_folder_that_it_starts_in(
    docker: Docker, entries: Entries, there: str, command: list[str], at_start: bool
) -> None:
    other = {"0.29.0": "0.30.0", "0.30.0": "0.29.0"}[there]
    expected = there if at_start else other
    assert served(docker, entries, Cmd=command, WorkingDir="/work") == expected


@pytest.mark.parametrize(
    ("settings", "at_home"),
    [
        ({"User": "app"}, True),
        ({"User": "1000:1000"}, True),
        ({"Env": ["HOME=/home/app"]}, True),
        ({"Env": ["PYTHONUSERBASE=/home/app/.local"]}, True),
        ({"User": "root"}, False),
        ({}, False),
        ({"User": "app", "Env": ["PYTHONNOUSERSITE=1"]}, False),
        ({"User": "app", "Env": ["HOME=/root"]}, False),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
@pytest.mark.parametrize(("entries", "there"), both_ways(HOME_SITE), ids=["leaks", "native"])
def test_user_and_home_decide_about_the_users_site_folder(
    docker: Docker, entries: Entries, there: str, settings: dict[str, Any], at_home: bool
) -> None:
    other = {"0.29.0": "0.30.0", "0.30.0": "0.29.0"}[there]
    found = served(docker, entries, Cmd=["python3", "/usr/bin/serve.py"], **settings)
    assert found == (there if at_home else other)


@pytest.mark.parametrize(
    "command",
    [
        ["bash", "-c", "source /opt/venv/bin/activate && vllm serve"],
        ["uv", "run", "vllm", "serve"],
        ["tini", "--", "python3", "-m", "vllm"],
        ["/start.sh"],
        [],
    ],
    ids=["shell", "uv", "tini", "script", "none"],
)
@pytest.mark.parametrize(("entries", "_version"), both_ways(VENV), ids=["leaks", "native"])
def test_unclear_command_with_several_vllm_is_a_finding(
    docker: Docker, entries: Entries, _version: str, command: list[str]
) -> None:
    start = {"start.sh": b"#!/bin/sh\nexec vllm serve\n"}
    assert served(docker, {**entries, **IN_VENV, **start}, Cmd=command) is None


@pytest.mark.parametrize("site", [SITE, VENV])
def test_command_that_cannot_be_followed_with_one_vllm_is_judged(docker: Docker, site: str) -> None:
    command = ["bash", "-c", "source /opt/venv/bin/activate && vllm serve"]
    assert served(docker, {**SYSTEM, **IN_VENV, **native(site)}, Cmd=command) == "0.30.0"
    docker.image(tarred({**SYSTEM, **IN_VENV, **vllm(site=site), **own(site=site)}), Cmd=command)
    assert docker.inspected()[0] == 0
    # Installed, but not beside the vLLM.
    docker.image(tarred({**SYSTEM, **IN_VENV, **vllm(site=site), **own(site="srv/x")}), Cmd=command)
    assert docker.inspected()[0] == 1


@pytest.mark.parametrize(
    "first_line",
    [
        b"#!/usr/bin/env python\n",
        b"#!/usr/bin/env -S python -u\n",
        b"#!/opt/venv/bin/python -I\n",
        b"#!/bin/sh\n'''exec' /opt/venv/bin/python \"$0\" \"$@\"\n",
    ],
)
def test_first_line_of_a_script_names_the_interpreter(docker: Docker, first_line: bytes) -> None:
    entries = {**SYSTEM, **IN_VENV, **native(), **vllm(site=VENV), "opt/start": first_line}
    path = ["PATH=/opt/venv/bin:/usr/bin"]
    assert served(docker, entries, Entrypoint=["/opt/start"], Env=path) == "0.29.0"


def test_first_on_the_search_path_serves_and_the_other_is_named(docker: Docker) -> None:
    docker.image(tarred({**PYTHON, **native(), **vllm(site=LOCAL)}), Cmd=["python3"])
    _, data = docker.inspected()
    assert (data["vllm"]["version"], data["vllm"]["others"]) == ("0.29.0", [f"/{SITE}/vllm"])


def test_pythonpath_comes_first(docker: Docker) -> None:
    both = {**PYTHON, **vllm(), **native("srv/code")}
    settings = {"WorkingDir": "/srv", "Env": ["PYTHONPATH=:code"]}
    assert served(docker, both, Cmd=["python3"], **settings) == "0.30.0"
    assert served(docker, both, Cmd=["python3", "-E"], **settings) == "0.29.0"


def test_editable_installation_through_a_pth_file(docker: Docker) -> None:
    pth = {f"{SITE}/__editable__.vllm.pth": b"# where it is\nimport os\n/workspace\n"}
    docker.image(tarred({**PYTHON, **vllm(site="workspace"), **pth}), Cmd=["python3"])
    _, data = docker.inspected()
    assert data["vllm"]["package"] == "/workspace/vllm"
    assert data["vllm"]["on_search_path"]


def test_vllm_off_the_search_path_is_a_finding(docker: Docker) -> None:
    docker.image(tarred({**PYTHON, **native("srv/x")}), Cmd=["python3"])
    code, data = docker.inspected()
    assert (code, data["reason"], data["vllm"]["on_search_path"]) == (1, "native", False)
    assert "/srv/x/vllm is not on the search path of /usr/bin/python3" in data["sentence"]


def test_several_vllm_off_the_search_path_are_a_finding(docker: Docker) -> None:
    entries = {**PYTHON, **native("srv/a"), **native("srv/b")}
    assert served(docker, entries, Cmd=["python3"]) is None


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        (PYTHON, "vllm:test has no vLLM"),
        ({**vllm(), "usr/share/overrides/python3": b"x"}, "vllm:test has no Python"),
    ],
    ids=["no vllm", "no python"],
)
def test_image_that_cannot_serve(docker: Docker, entries: Entries, told: str) -> None:
    docker.image(tarred(entries))
    code, data = docker.inspected()
    assert code == 2
    assert told in data["error"]


def test_loops_in_path_are_passed_over(docker: Docker) -> None:
    loops = {"loop": Link("pool"), "pool": Link("loop"), **PYTHON, **native()}
    settings = {"Env": ["PATH=/loop:/loop/bin:/usr/bin", "PYTHONPATH=/pool"]}
    assert served(docker, loops, Cmd=["python3"], **settings) == "0.30.0"
