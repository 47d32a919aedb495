"""The corpus of the study of long runs: packages are read, texts are cut at lines, and near copies are found."""

import hashlib
import importlib
import io
import lzma
import random
import tarfile
import tomllib
from gzip import compress
from pathlib import Path

import pytest

STUDIES = Path(__file__).parents[2] / "studies"


@pytest.fixture(scope="module")
def study():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(STUDIES))
        yield {name: importlib.import_module(f"pretrain.{name}") for name in ("packages", "plain", "text")}


def tar_xz(files):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def deb(path, files, data="data.tar.xz"):
    """A package as dpkg-deb packs it: the second part has an odd length, which a newline makes even."""
    parts = {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", data: tar_xz(files)}
    header = "{:<16}0           0     0     100644  {:<10}`\n"
    body = b"".join(
        header.format(name, len(part)).encode() + part + b"\n" * (len(part) % 2) for name, part in parts.items()
    )
    path.write_bytes(b"!<arch>\n" + body)
    return path


def test_a_package_gives_its_wanted_files_unpacked(study, tmp_path):
    source = tar_xz({"linux/kernel/fork.c": b"int x;", "linux/kernel/fork.o": b"\0"})
    files = {"./usr/share/a.txt.gz": compress(b"a"), "./usr/b.txt": b"b", "./c.png": b"c", "./d.txt.gz": b"no gzip"}
    path = deb(tmp_path / "a_1_all.deb", files | {"./usr/src/linux.tar.xz": source})
    found = dict(study["packages"].members(path, lambda name: name.endswith((".txt", ".c"))))
    assert found == {"./usr/share/a.txt": b"a", "./usr/b.txt": b"b", "./d.txt": b"", "linux/kernel/fork.c": b"int x;"}


def test_what_is_no_package_or_another_one_is_named(study, tmp_path):
    packages = study["packages"]
    path = deb(tmp_path / "a_1_all.deb", {}, data="data.tar.zst")
    with pytest.raises(ValueError, match=r"a_1_all\.deb holds no data\.tar\.xz"):
        list(packages.members(path, bool))
    assert packages.fetch(path.name, hashlib.sha256(path.read_bytes()).hexdigest(), tmp_path) == path
    with pytest.raises(ValueError, match=r"a_1_all\.deb is not the file that the table names"):
        packages.fetch(path.name, "0" * 64, tmp_path)
    path.write_bytes(lzma.compress(b"a page that says 404"))
    with pytest.raises(ValueError, match="is no Debian package"):
        list(packages.members(path, bool))


def test_a_long_text_is_cut_at_a_line_and_a_book_loses_nothing(study):
    plain, draw = study["plain"], random.Random(0)
    lines = ["x" * draw.randint(0, 70) + "\n" * draw.choice((1, 1, 2)) for _ in range(500)]
    text = "".join(lines)
    kept = plain.cut(text, 1000)
    assert text.startswith(kept)
    assert kept.endswith("\n")
    assert 900 < len(kept) <= 1000
    assert plain.cut("short", 1000) == "short"
    pieces = list(plain.pieces(text, 1000))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 1000
    assert sum(piece.endswith("\n\n") for piece in pieces) > len(pieces) / 2


def test_formats_become_text(study):
    plain = study["plain"].plain
    page = b"<head>t</head><nav>menu</nav><main><h1>A &amp; b</h1><p>One\n two.</p><pre>x\n  y</pre></main>end"
    assert plain("a.html", page) == "A & b\n\nOne two.\n\nx\n  y\n"
    assert plain("a.3erl", b'.\\" c\n.TH A 3\n.SH NAME\na \\- \\fBb\\fR\n.PP\n.B bold\n') == "NAME\n\na - b\n\nbold\n"
    assert plain("a.c", b"/* Copyright\n * me */\n/* about */\nint x;\n") == "/* about */\nint x;\n"
    assert plain("a.py", b"\0") == ""


def test_equal_and_nearly_equal_documents_are_found(study):
    pytest.importorskip("datasketch", reason="the extra 'corpus' is not installed")
    draw = random.Random(1)
    words = [f"w{draw.randrange(10_000)}" for _ in range(600)]
    near, far = words.copy(), words.copy()
    near[100] = near[400] = "other"  # 10 shingles of 596
    for place in range(0, 600, 6):
        far[place] = "other"
    seen = study["text"].Seen()
    assert [seen.is_new(" ".join(each)) for each in (words, words, near, far)] == [True, False, False, True]
    assert seen.is_new("few words")
    assert not seen.is_new("Few\nwords"), "lines and capitals make no difference"


def test_the_table_names_files_with_digests_and_patterns(study):
    table = tomllib.loads(study["text"].TABLE.read_text("utf-8"))
    assert set(table) == set(study["text"].MEGABYTES)
    for rows in table.values():
        for file, row in rows.items():
            assert file.endswith((".deb", ".whl"))
            assert len(bytes.fromhex(row["sha256"])) == 32
            assert set(row) <= {"sha256", "take", "megabytes"}
