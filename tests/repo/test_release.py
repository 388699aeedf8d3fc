"""A release: one version everywhere, short notes, and archives that hold the package and nothing else."""

import importlib.util
import io
import re
import tarfile
import tomllib
import zipfile
from datetime import date
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

import pipesched

ROOT = Path(__file__).parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
#: The version, the date and the notes of each release, the newest first.
RELEASES = re.findall(r"^## (\d+\.\d+\.\d+) - (\S+)\n(.*?)(?=^## |\Z)", CHANGELOG, re.MULTILINE | re.DOTALL)


def test_the_version_of_the_code_is_that_of_the_newest_release_and_of_the_archives() -> None:
    assert pipesched.__version__ == RELEASES[0][0]
    assert "version" in SETTINGS["project"]["dynamic"]
    assert SETTINGS["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "pipesched.__version__"}
    assert metadata.version("pipesched") == pipesched.__version__


def test_releases_are_dated_and_the_newest_is_first() -> None:
    assert len(RELEASES) == len(re.findall(r"^## \[?\d", CHANGELOG, re.MULTILINE))
    dates = [date.fromisoformat(day) for _, day, _ in RELEASES]
    assert dates == sorted(dates, reverse=True)


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release[0])
def test_the_notes_of_a_release_are_read_in_two_minutes(release: tuple[str, str, str]) -> None:
    """At 240 words a minute."""
    assert len(release[2].split()) <= 480


@pytest.fixture(scope="module")
def archives() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_archives", ROOT / ".ci" / "check_archives.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_archives(folder: Path, inside: set[str], beside: set[str]) -> None:
    """Write an sdist and a wheel of empty files."""
    with tarfile.open(folder / "pipesched-1.tar.gz", "w:gz") as sdist:
        for name in inside | beside:
            sdist.addfile(tarfile.TarInfo(f"pipesched-1/{name}"), io.BytesIO())
        link = tarfile.TarInfo("pipesched-1/pipesched/linked.py")
        link.type, link.linkname = tarfile.SYMTYPE, "elsewhere.py"
        sdist.addfile(link)
    with zipfile.ZipFile(folder / "pipesched-1-py3-none-any.whl", "w") as wheel:
        for name in inside:
            wheel.writestr(name, "")


def test_archives_with_every_module_pass(archives: ModuleType, tmp_path: Path) -> None:
    modules = archives.modules(ROOT)
    assert {"pipesched/schedules/gpipe.py", "pipesched/viz/timeline.py", "pipesched/py.typed"} < modules
    write_archives(tmp_path, modules, archives.BESIDE)
    archives.main(str(tmp_path))


@pytest.mark.parametrize(
    ("removed", "added", "message"),
    [
        ("pipesched/schedules/gpipe.py", None, "lacks pipesched/schedules/gpipe.py"),
        ("pipesched/py.typed", None, "lacks pipesched/py.typed"),
        (None, "tests/conftest.py", "must not hold tests/conftest.py"),
    ],
)
def test_a_missing_and_a_foreign_file_are_named(
    archives: ModuleType, tmp_path: Path, removed: str | None, added: str | None, message: str
) -> None:
    write_archives(tmp_path, archives.modules(ROOT) - {removed} | ({added} if added else set()), archives.BESIDE)
    with pytest.raises(SystemExit, match=rf"(?s)tar\.gz {message}.*whl {message}"):
        archives.main(str(tmp_path))


def test_a_link_is_no_module(archives: ModuleType, tmp_path: Path) -> None:
    """setuptools must follow the links to schedules/ and viz/: on another machine they would lead nowhere."""
    write_archives(tmp_path, archives.modules(ROOT), archives.BESIDE)
    assert "pipesched/linked.py" not in archives.in_sdist(tmp_path / "pipesched-1.tar.gz")
