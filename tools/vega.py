"""Writes the JavaScript that the pages of `surefoot report` are drawn with: Vega as its authors release it.

    python tools/vega.py            # again, from the npm registry; the files are committed
    python tools/vega.py --check    # whether the committed files are those

Vega draws SVG that screen readers are told about, works without a network, has a BSD licence, and takes 0.8 MB in three
files: Plotly's smallest bundle takes 1.2 MB and is silent to screen readers, Bokeh's 1.3 MB and draws on a canvas.
"""

from __future__ import annotations

import base64
import hashlib
import io
import sys
import tarfile
import urllib.request
from pathlib import Path

ASSETS = Path(__file__).parents[1] / "src/surefoot/experiment/reports/web/assets"
REGISTRY = "https://registry.npmjs.org/{name}/-/{name}-{version}.tgz"
PACKAGES = {
    "vega": ("6.2.0", "BIwalIcEGysJdQDjeVUmMWB3e50jPDNAMfLJscjEvpunU9bSt7X1OYnQxkg3uBwuRRI4nWfFZO9uIW910nLeGw=="),
    "vega-lite": ("6.4.0", "LIScfAS5ykq103biO0n/7xmbbkXvQP/JBDLhDKxgW2kOrzDgbHR3pn/wP3g6vjA78pfNKK6wJABiww+uaBNADw=="),
    "vega-embed": ("7.0.2", "ZHQPWSs9mUTGJPZ5yQVhHV+OLDCoTIjR//De93vG6igZX1MQCVo03ePWlfWCUAnPV1IsKfeJLqA3K/Qd11bAFQ=="),
}
"""Name -> version, SHA-512 of the package as the registry gives it."""


def package(name: str, version: str, sha512: str) -> tarfile.TarFile:
    with urllib.request.urlopen(REGISTRY.format(name=name, version=version)) as reply:
        content = reply.read()
    found = base64.b64encode(hashlib.sha512(content).digest()).decode()
    if found != sha512:
        raise SystemExit(f"{name} {version} has SHA-512 {found}, not {sha512}")
    return tarfile.open(fileobj=io.BytesIO(content))


def files() -> dict[str, bytes]:
    found, licences = {}, []
    for name, (version, sha512) in PACKAGES.items():
        with package(name, version, sha512) as archive:
            script, licence = (archive.extractfile(f"package/{path}") for path in (f"build/{name}.min.js", "LICENSE"))
            assert script
            assert licence
            found[f"{name}.min.js"] = script.read()
            licences.append(f"{name} {version}\n\n".encode() + licence.read())
    return {**found, "LICENSE.vega": b"\n\n".join(licences)}


def main() -> None:
    wrong = []
    for name, content in files().items():
        if "--check" not in sys.argv:
            (ASSETS / name).write_bytes(content)
        elif (ASSETS / name).read_bytes() != content:
            wrong.append(name)
    if wrong:
        raise SystemExit(f"not as released: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
