"""Whole files: writes a file so that readers never see a part of it, also if the writer is interrupted."""

import os
import secrets
from contextlib import suppress
from pathlib import Path

__all__ = ["TEMPORARY", "write_whole"]

#: The suffix of a file that is not complete yet.
TEMPORARY = ".tmp"


def write_whole(path: Path, data: bytes | str, *, private: bool = False) -> None:
    """Write a file under a temporary name, flush it to the disk, and rename it.

    If this fails, the old file is unchanged. The target of a link is replaced, not the link. Anything but a file, such
    as a pipe or ``/dev/stdout``, is written to directly.

    Args:
        path: the path of the file.
        data: the contents. Text is written as UTF-8.
        private: whether only this user may read the file. Default: False.

    """
    contents = data.encode() if isinstance(data, str) else data
    path = Path(os.path.realpath(path)) if path.is_symlink() else path  # also if links form a loop
    if path.exists() and not path.is_file():
        path.write_bytes(contents)
        return
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        if private:
            temporary.touch(0o600)
        with temporary.open("wb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.filename == str(temporary):
            error.filename, error.filename2 = str(path), None
        raise
