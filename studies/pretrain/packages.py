"""Packages of Debian and PyPI at fixed versions: loaded once, compared with their SHA-256, read without installing."""

from __future__ import annotations

import gzip
import io
import lzma
import re
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from surefoot.experiment.files import sha256_of

Wanted = Callable[[str], object]
"""Whether a file of a package is read, by its name."""


def fetch(file: str, sha256: str, cache: Path) -> Path:
    """The file of a package, loaded with apt-get or pip if the cache does not have it.

    Raises:
        ValueError: it cannot be loaded, or is another file than expected.
    """
    path = cache / file
    if not path.exists():
        if path.suffix == ".whl":
            name, version, *_ = file.split("-")
            load = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", f"{name}=={version}"]
        else:
            name, version, *_ = file.split("_")
            load = ["apt-get", "download", f"{name}={version.replace('%3a', ':')}"]
        done = subprocess.run(load, cwd=cache, check=False, capture_output=True, text=True)
        if done.returncode or not path.exists():
            raise ValueError(f"cannot load {file} ({done.stderr.strip()[-500:]}); put it into {cache} by hand")
    if sha256_of(path) != sha256:
        raise ValueError(f"{path} is not the file that the table names; delete it, so that it is loaded again")
    return path


def members(path: Path, wanted: Wanted) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the wanted files of a Debian package or a wheel; packed ones are unpacked."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            yield from ((name, wheel.read(name)) for name in wheel.namelist() if wanted(name))
        return
    with path.open("rb") as file:
        yield from _of_tar(io.BytesIO(_data_of(file)), wanted)


def _data_of(file: IO[bytes]) -> bytes:
    """The packed files of a Debian package, which is an archive of ar: a name and a size before each part."""
    if file.read(8) != b"!<arch>\n":
        raise ValueError(f"{file.name} is no Debian package; delete it, so that it is loaded again")
    while header := file.read(60):
        name, size = header[:16].decode().strip(" /"), int(header[48:58])
        if name == "data.tar.xz":
            return file.read(size)
        file.seek(size + size % 2, 1)
    raise ValueError(f"{file.name} holds no data.tar.xz; choose a package that is packed with xz")


def _of_tar(packed: IO[bytes], wanted: Wanted) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=lzma.open(packed), mode="r|") as tar:
        for member in tar:
            name = re.sub(r"\.([gd]z|tar\.xz)$", "", member.name)
            ending = member.name[len(name) :]
            archive = ending == ".tar.xz" and "usr/src" in name  # a source tree within the package
            content = tar.extractfile(member) if member.isfile() and (archive or wanted(name)) else None
            if content is None:
                continue
            if archive:
                yield from _of_tar(io.BytesIO(content.read()), wanted)
            else:
                yield name, _unpacked(content.read()) if ending else content.read()


def _unpacked(content: bytes) -> bytes:
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error):
        return b""
