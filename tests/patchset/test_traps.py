"""Places where patching a tree is known to go wrong without a word. Each names its control."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import py_compile
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.patchset.real_trees import (
    MANAGER,
    RELEASE,
    Cli,
    files_only,
    fix_for,
    patch_with_gnu,
    series_for,
    snapshot,
)
from vllm_mamba_retire.patchset import sha256

SERIES = series_for(RELEASE)
FIX = fix_for(RELEASE)


def is_patched(tree: Path) -> bool:
    return sha256((tree / MANAGER).read_bytes()) == SERIES.sha256_after


def git(*arguments: object, cwd: Path) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run(["git", *identity, *map(str, arguments)], cwd=cwd, check=True)


def run_under(
    prefix: Sequence[str], *command: str, **variables: object
) -> subprocess.CompletedProcess[str]:
    """Run a command under `prefix`, which changes what it may do.

    Skips the test where this machine does not allow that.
    """
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"not allowed on this machine: {' '.join(prefix)}: {tried.stderr.strip()}")
    return subprocess.run(
        [*prefix, *command],
        env=os.environ | {name: str(value) for name, value in variables.items()},
        capture_output=True,
        text=True,
        check=False,
    )


def in_own_mounts(script: str, **variables: object) -> subprocess.CompletedProcess[str]:
    """Run a shell script that may mount things; nobody else sees its mounts."""
    as_root = () if os.geteuid() == 0 else ("--map-root-user",)
    return run_under(["unshare", "--mount", *as_root], "sh", "-ec", script, **variables)


COMMAND = f"{sys.executable} -c 'from vllm_mamba_retire.cli import main; main()'"


# git apply, run below the top of a checkout, takes the paths of a patch in git's own format from
# that top, passes over files that are not there, and exits 0. Ours are in the plain format.


@pytest.fixture
def environment_in_a_checkout(tmp_path: Path) -> Path:
    """A site-packages in a virtual environment in a git checkout that ignores it."""
    checkout = tmp_path / "project"
    checkout.mkdir()
    git("init", "-q", ".", cwd=checkout)
    (checkout / ".gitignore").write_text(".venv\n")
    return files_only(RELEASE, checkout / ".venv/lib/python3.12/site-packages")


def test_git_apply_in_a_checkout_puts_our_series_on(environment_in_a_checkout: Path):
    subprocess.run(["git", "apply", FIX], cwd=environment_in_a_checkout, check=True)
    assert is_patched(environment_in_a_checkout)


def test_in_the_format_of_git_it_would_not_and_check_tells(
    environment_in_a_checkout: Path, tmp_path: Path, cli: Cli
):
    site = environment_in_a_checkout
    header, diff = FIX.read_text().split("\n---\n", 1)
    of_git = tmp_path / "git.patch"
    of_git.write_text(f"{header}\n---\ndiff --git a/{MANAGER} b/{MANAGER}\n{diff}")
    done = subprocess.run(["git", "apply", of_git], cwd=site, check=False)
    assert done.returncode == 0
    assert not is_patched(site)
    told = cli("check", "--target", site, cwd=site)
    assert told.returncode == 1
    assert "pristine" in told.stderr


def test_apply_in_a_checkout_works(environment_in_a_checkout: Path, cli: Cli):
    site = environment_in_a_checkout
    done = cli("apply", "--target", ".", "--yes", "--no-probe", cwd=site)
    assert done.returncode == 0, done.stderr
    assert is_patched(site)


# A checkout that turns line ends around makes patches that fit nowhere.


def cloned_with_crlf(patches: Path, tmp_path: Path) -> Path:
    origin = tmp_path / "origin"
    shutil.copytree(patches, origin / "patches")
    git("init", "-q", ".", cwd=origin)
    git("add", ".", cwd=origin)
    git("commit", "-qm", "series", cwd=origin)
    clone = tmp_path / "clone"
    git("clone", "-q", "-c", "core.autocrlf=true", origin, clone, cwd=tmp_path)
    return clone / "patches" / SERIES.series / FIX.name


def test_series_keeps_its_line_ends_in_any_checkout(tmp_path: Path):
    assert b"\r\n" not in cloned_with_crlf(FIX.parents[1], tmp_path).read_bytes()


def test_series_without_our_attributes_would_not(tmp_path: Path):
    bare = tmp_path / "patches"
    shutil.copytree(FIX.parents[1], bare)
    (bare / ".gitattributes").unlink()
    spoiled = cloned_with_crlf(bare, tmp_path)
    assert b"\r\n" in spoiled.read_bytes()
    tree = files_only(RELEASE, tmp_path / "tree")
    refused = subprocess.run(["git", "apply", "--check", spoiled], cwd=tree, check=False)
    assert refused.returncode != 0


# A tree that cannot be written.


def test_read_only_tree_is_left_alone_and_said_so(tmp_path: Path):
    tree = files_only(RELEASE, tmp_path / "tree")
    before = snapshot(tree)
    done = in_own_mounts(
        f"mount --bind $TREE $TREE; mount -o remount,bind,ro $TREE; "
        f"exec {COMMAND} apply --yes --no-probe --target $TREE",
        TREE=tree,
    )
    assert done.returncode == 1
    assert "refused, nothing was changed" in done.stderr
    assert "Read-only file system" in done.stderr
    assert snapshot(tree) == before


@pytest.fixture
def somebody_elses_tree() -> Iterator[Path]:
    # pytest's own temporary folders are closed to other users.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        tree = files_only(RELEASE, Path(folder) / "site")
        yield tree
        for path in (tree, *tree.rglob("*")):
            path.chmod(0o755)


# This checkout and its interpreter may lie in a folder of root's own: reading stays allowed.
WITHOUT_RIGHTS = (
    *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
)


def as_a_user_without_rights(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user who may read the tree and not write to it."""
    prefix = WITHOUT_RIGHTS if os.geteuid() == 0 else ()
    if not prefix:
        for path in (*tree.rglob("*"), tree):
            path.chmod(path.stat().st_mode & ~0o222)
    return run_under(prefix, *shlex.split(COMMAND), *arguments, "--target", str(tree))


@pytest.fixture
def tree_of_a_user(somebody_elses_tree: Path) -> Path:
    """A tree that the user without rights owns, which only root can make."""
    if os.geteuid():
        pytest.skip("only root can give files away")
    for path in (somebody_elses_tree, *somebody_elses_tree.rglob("*")):
        os.chown(path, 65534, 65534)
    return somebody_elses_tree


def apply_as_its_user(tree: Path) -> subprocess.CompletedProcess[str]:
    return as_a_user_without_rights(tree, "apply", "--yes", "--no-probe")


def compiled_code(tree: Path, mode: py_compile.PycInvalidationMode) -> Path:
    """What root compiled in a user's tree."""
    done = py_compile.compile(str(tree / MANAGER), invalidation_mode=mode, doraise=True)
    compiled = Path(str(done))
    compiled.parent.chmod(0o755)
    return compiled


def test_compiled_code_that_python_compares_may_belong_to_root(tree_of_a_user: Path):
    compiled = compiled_code(tree_of_a_user, py_compile.PycInvalidationMode.TIMESTAMP)
    done = apply_as_its_user(tree_of_a_user)
    assert done.returncode == 0, done.stderr
    assert is_patched(tree_of_a_user)
    assert compiled.exists()


def test_refused_if_compiled_code_would_hide_the_fix(tree_of_a_user: Path):
    compiled = compiled_code(tree_of_a_user, py_compile.PycInvalidationMode.UNCHECKED_HASH)
    before = snapshot(tree_of_a_user)
    done = apply_as_its_user(tree_of_a_user)
    assert done.returncode == 1
    assert f"refused, nothing was changed: {compiled}: Permission denied" in done.stderr
    assert snapshot(tree_of_a_user) == before


def test_tree_that_a_group_may_write_is_refused_with_its_owner(tree_of_a_user: Path):
    os.chown(tree_of_a_user / MANAGER, 0, 65534)
    before = snapshot(tree_of_a_user)
    done = apply_as_its_user(tree_of_a_user)
    assert done.returncode == 1
    assert (
        f"{tree_of_a_user / MANAGER} belongs to user 0 and group 65534; user 65534 cannot keep"
        in done.stderr
    )
    assert "Run this as its owner or as root" in done.stderr
    assert snapshot(tree_of_a_user) == before


def test_attribute_that_a_user_cannot_give_is_a_reason_to_refuse(tree_of_a_user: Path):
    try:
        os.setxattr(tree_of_a_user / MANAGER, "security.vendor", b"a label")
    except OSError as error:
        pytest.skip(f"security attributes cannot be set on this file system: {error.strerror}")
    done = apply_as_its_user(tree_of_a_user)
    assert done.returncode == 1
    assert "attributes (security.vendor)" in done.stderr
    assert not is_patched(tree_of_a_user)


def test_user_without_rights_can_check_and_changes_nothing(somebody_elses_tree: Path):
    before = snapshot(somebody_elses_tree)
    checked = as_a_user_without_rights(somebody_elses_tree, "check")
    assert checked.returncode == 1
    assert "pristine" in checked.stderr
    applied = as_a_user_without_rights(somebody_elses_tree, "apply", "--yes", "--no-probe")
    assert applied.returncode == 1
    assert "Permission denied" in applied.stderr
    after = {name: data for name, (_, data) in snapshot(somebody_elses_tree).items()}
    assert after == {name: data for name, (_, data) in before.items()}


def test_full_disk_leaves_every_byte_and_no_litter(tmp_path: Path):
    source = files_only(RELEASE, tmp_path / "source")
    size = (source / MANAGER).stat().st_size
    disk = tmp_path / "disk"
    disk.mkdir()
    room = size + size // 2  # for the tree, not for a second copy of the file
    done = in_own_mounts(
        f"mount -t tmpfs -o size={room} none $DISK; cp -r $SOURCE/. $DISK; set +e; "
        f"{COMMAND} apply --yes --no-probe --target $DISK; code=$?; "
        "cd $DISK; find . -type f | sort; diff -r $SOURCE $DISK; exit $code",
        SOURCE=source,
        DISK=disk,
    )
    assert done.returncode == 1, done.stderr
    assert "No space left on device" in done.stderr
    assert done.stdout.split() == ["./vllm/_version.py", f"./{MANAGER}"]


def test_file_that_cannot_be_replaced_is_unchanged_no_leftovers(tmp_path: Path):
    tree = files_only(RELEASE, tmp_path / "tree")
    before = snapshot(tree)
    mounted = in_own_mounts(
        f"mount --bind $FILE $FILE; exec {COMMAND} apply --yes --no-probe --target $TREE",
        TREE=tree,
        FILE=tree / MANAGER,
    )
    assert mounted.returncode == 1
    assert "refused, nothing was changed" in mounted.stderr
    assert "Device or resource busy" in mounted.stderr
    assert snapshot(tree) == before


def test_immutable_file_is_left_alone_and_no_litter(tmp_path: Path, cli: Cli):
    tree = files_only(RELEASE, tmp_path / "tree")
    before = snapshot(tree)
    fixed = subprocess.run(
        ["chattr", "+i", tree / MANAGER], capture_output=True, text=True, check=False
    )
    if fixed.returncode:
        pytest.skip(f"not allowed on this machine: chattr +i: {fixed.stderr.strip()}")
    try:
        done = cli("apply", "--target", tree, "--yes", "--no-probe")
    finally:
        subprocess.run(["chattr", "-i", tree / MANAGER], check=True)
    assert done.returncode == 1
    assert "refused, nothing was changed" in done.stderr
    assert snapshot(tree) == before


# Links and doubles.


def test_linked_site_packages_stays_a_link(tmp_path: Path, cli: Cli):
    real = files_only(RELEASE, tmp_path / "lib/site-packages")
    (tmp_path / "lib64").symlink_to(tmp_path / "lib")
    done = cli("apply", "--target", tmp_path / "lib64/site-packages", "--yes", "--no-probe")
    assert done.returncode == 0, done.stderr
    assert is_patched(real)
    assert (tmp_path / "lib64").is_symlink()


def test_tree_of_links_to_a_cache_is_read_and_not_changed(tmp_path: Path, cli: Cli):
    # uv --link-mode=symlink: real folders, every file a link.
    cache = files_only(RELEASE, tmp_path / "cache")
    before = snapshot(cache)
    site = tmp_path / "site"
    shutil.copytree(cache, site, copy_function=os.symlink)
    told = cli("check", "--target", site)
    assert (told.returncode, "pristine" in told.stderr) == (1, True)
    assert "--link-mode=copy" in told.stderr
    refused = cli("apply", "--target", site, "--yes", "--no-probe")
    assert (refused.returncode, "--link-mode=copy" in refused.stderr) == (1, True)
    patch_with_gnu(cache, RELEASE)
    assert cli("check", "--target", site).returncode == 0
    assert (site / MANAGER).is_symlink()
    patch_with_gnu(cache, RELEASE, "-R")
    assert snapshot(cache) == before


def test_cache_that_shares_the_file_is_not_patched_with_it(tmp_path: Path, cli: Cli):
    # uv links the files of an environment to those in its cache.
    cache, site = tmp_path / "cache", files_only(RELEASE, tmp_path / "site")
    os.link(site / MANAGER, cache)
    assert cli("apply", "--target", site, "--yes", "--no-probe").returncode == 0
    assert is_patched(site)
    assert sha256(cache.read_bytes()) == SERIES.sha256_before


def test_of_two_trees_the_serving_one_is_patched_the_other_named(tmp_path: Path, cli: Cli):
    serving, other = (files_only(RELEASE, tmp_path / name) for name in ("serving", "other"))
    for site in (serving, other):
        (site / "vllm/__init__.py").write_text("")
    path = os.pathsep.join([str(serving), str(other), os.environ["PYTHONPATH"]])
    done = cli("apply", "--yes", "--no-probe", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert (is_patched(serving), is_patched(other)) == (True, False)
    assert f"another vLLM is at {other / 'vllm'}" in done.stderr


# pip's view of a patched tree.


@pytest.fixture
def installed(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A virtual environment with a vLLM of few files, as pip puts it there: its interpreter, its
    site-packages and the wheel."""
    source = files_only(RELEASE, tmp_path / "source")
    wheel = tmp_path / f"vllm-{RELEASE}-py3-none-any.whl"
    about = f"vllm-{RELEASE}.dist-info"
    parts = {str(p.relative_to(source)): p.read_bytes() for p in sorted(source.rglob("*.py"))}
    parts[f"{about}/METADATA"] = f"Metadata-Version: 2.1\nName: vllm\nVersion: {RELEASE}\n".encode()
    parts[f"{about}/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(wheel, "w") as packed:
        for name, data in parts.items():
            packed.writestr(name, data)
        rows = [f"{name},sha256={digest(data)},{len(data)}" for name, data in parts.items()]
        packed.writestr(f"{about}/RECORD", "\n".join([*rows, f"{about}/RECORD,,", ""]))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    pip(python, "install", "--no-deps", wheel)
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    return python, site, wheel


def digest(data: bytes) -> str:
    """As a wheel's record has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def pip(python: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
        + [str(argument) for argument in arguments],
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=True,
    )


def test_apply_warns_that_the_wheels_record_no_longer_matches(installed, cli: Cli):
    python, site, wheel = installed
    applied = cli("apply", "--target", site, "--yes", "--no-probe", "--json")
    (note,) = json.loads(applied.stdout)["notes"]
    assert f"vllm-{RELEASE}.dist-info/RECORD lists the hash of the file as released" in note
    # What the note says, pip does: its check sees nothing, a reinstall brings stock code back.
    assert "No broken requirements" in pip(python, "check").stdout
    pip(python, "install", "--no-deps", "--force-reinstall", wheel)
    assert sha256((site / MANAGER).read_bytes()) == SERIES.sha256_before
    told = cli("check", "--target", site)
    assert (told.returncode, "pristine" in told.stderr) == (1, True)
    assert cli("apply", "--target", site, "--yes", "--no-probe").returncode == 0
    assert is_patched(site)


def test_stock_tree_has_a_record_that_matches(installed, cli: Cli):
    _, site, _ = installed
    assert json.loads(cli("revert", "--target", site, "--json").stdout)["notes"] == []


def test_uninstalled_vllm_cannot_be_imported_as_an_empty_package(installed, cli: Cli):
    python, site, _ = installed
    assert cli("apply", "--target", site, "--yes", "--no-probe").returncode == 0
    pip(python, "uninstall", "-y", "vllm")
    assert not (site / "vllm").exists()
