"""Checks that the archives of a release hold every module of the package once, and nothing that does not belong there.

python .ci/check_archives.py dist
"""

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: The files of an sdist that do not belong to the package.
BESIDE = {"LICENSE", "PKG-INFO", "README.md", "docs/package.md", "pyproject.toml", "setup.cfg"}


def modules(root: Path) -> set[str]:
    """Return the files of the package, with those of schedules/ and viz/, to which links in the package lead."""
    inside = {path for path in (root / "pipesched").rglob("*.py") if "__pycache__" not in path.parts}
    own = {str(path.relative_to(root)) for path in inside} | {"pipesched/py.typed"}
    return own | {
        f"pipesched/{folder}/{path.name}" for folder in ("schedules", "viz") for path in (root / folder).glob("*.py")
    }


def in_sdist(path: Path) -> set[str]:
    """Return the files of an sdist, without the folder that holds them. Links are not followed, and count as absent."""
    with tarfile.open(path) as archive:
        return {member.name.partition("/")[2] for member in archive if member.isreg()}


def in_wheel(path: Path) -> set[str]:
    """Return the files of a wheel."""
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def problems(found: set[str], wanted: set[str], archive: Path) -> list[str]:
    """Return a sentence for each file that is missing or does not belong into the archive."""
    extra = {name for name in found - wanted if ".egg-info/" not in name and ".dist-info/" not in name}
    return [f"{archive.name} lacks {name}" for name in sorted(wanted - found)] + [
        f"{archive.name} must not hold {name}" for name in sorted(extra)
    ]


def main(folder: str) -> None:
    """Check the sdist and the wheel in a folder, which must hold one of each."""
    wanted = modules(ROOT)
    (sdist,), (wheel,) = (sorted(Path(folder).glob(pattern)) for pattern in ("*.tar.gz", "*.whl"))
    wrong = problems(in_sdist(sdist), wanted | BESIDE, sdist) + problems(in_wheel(wheel), wanted, wheel)
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"{sdist.name} and {wheel.name} hold {len(wanted)} files of the package each")


if __name__ == "__main__":
    main(sys.argv[1])
