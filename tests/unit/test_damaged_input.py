"""Readers of files from outside get damaged ones: an answer or their own error, nothing else."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.field_inputs import COMPOSE_SCRIPT, DOCKERFILE, LOG, METRICS, SCRIPT
from tests.unit.images.image_making import PYTHON, tarred, vllm
from tests.unit.patchset.small_release import RELEASED, make_matrix, make_series, make_site
from vllm_mamba_retire import patchset, records
from vllm_mamba_retire.images.image import Config, ImageError, Root, read_tar
from vllm_mamba_retire.images.inspection import inspect
from vllm_mamba_retire.patchset import FILE, PatchsetError, read_tree
from vllm_mamba_retire.plan.command import read_file
from vllm_mamba_retire.plan.metrics import read_metrics
from vllm_mamba_retire.plan.serverlog import read_log
from vllm_mamba_retire.records import Record
from vllm_mamba_retire.releases import Matrix
from vllm_mamba_retire.replay.scenario import InputError

Reader = Callable[[Path], object]


def _read_image(path: Path) -> None:
    root = Root()
    if missing := read_tar(root, io.BytesIO(path.read_bytes())):
        read_tar(root, io.BytesIO(path.read_bytes()), missing)
    inspect(Config("damaged"), root)


READERS: dict[str, tuple[str, bytes, Reader, type[Exception]]] = {
    "log": ("server.log", LOG.encode(), read_log, InputError),
    "metrics": ("metrics", METRICS.encode(), read_metrics, InputError),
    "compose": ("c.yaml", COMPOSE_SCRIPT.encode(), lambda p: read_file(p).settings, InputError),
    "dockerfile": ("Dockerfile", DOCKERFILE.encode(), lambda p: read_file(p).settings, InputError),
    "script": ("start.sh", SCRIPT.encode(), lambda p: read_file(p).settings, InputError),
    "image": ("image.tar", tarred({**PYTHON, **vllm()}), _read_image, ImageError),
}


@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Cuts out a piece and puts noise in its place."""
    start, stop = sorted((draw(st.floats(0, 1)), draw(st.floats(0, 1))))
    noise = draw(st.binary(max_size=8))

    def damage(data: bytes) -> bytes:
        return data[: int(start * len(data))] + noise + data[int(stop * len(data)) :]

    return damage


# The same damages each time: a failure must not come and go.
many = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.mark.parametrize("name", READERS)
@many
@given(damage=damages())
def test_a_damaged_file_is_read_or_refused(
    tmp_path: Path, name: str, damage: Callable[[bytes], bytes]
) -> None:
    file, data, read, refusal = READERS[name]
    path = tmp_path / file
    path.write_bytes(damage(data))
    with suppress(refusal):
        read(path)


@many
@given(damage=damages())
def test_a_damaged_record_is_read_or_left_out(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    record = Record(pid=1, started=7, place="here", role="main", vllm="0.29.0")
    path = tmp_path / "1-0.json"
    path.write_bytes(damage(msgspec.json.encode(record)))
    path.chmod(0o600)
    records.read(tmp_path)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Matrix:
    monkeypatch.setattr(patchset, "series_folder", lambda: tmp_path / "patches")
    return make_matrix(make_series(tmp_path / "patches"))


@many
@given(damage=damages())
def test_a_damaged_manager_file_has_a_state(
    tmp_path: Path, small: Matrix, damage: Callable[[bytes], bytes]
) -> None:
    site = tmp_path / "site"
    if not site.exists():
        make_site(site)
    (site / FILE).write_bytes(damage(RELEASED.encode()))
    with suppress(PatchsetError):
        assert read_tree(site, small).sentence
