"""Image sources: folders, lists, names, unreadable files."""

import errno
import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from serving.describe import sources as describe_sources
from serving.describe.report import show
from serving.describe.sources import UsageError, data_uri, find_sources
from tests.serving.describe.fake import image_of, options, rows, run

IMAGE = b"\x89PNG some bytes "


def test_a_folder_is_searched_recursively_and_links_do_not_loop(folder):
    for name in ("b/2.JPG", "a/1.png", "a/deep/er/3.webp", "notes.txt", ".hidden/4.png", "a/.5.png", "c.gif/6.tiff"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(IMAGE)
    (folder / "a/up").symlink_to(folder)
    (folder / "0-latest").symlink_to(folder / "a")  # files are found under the folder's own name
    (folder / "a/self.png").symlink_to(folder / "a/self.png")
    outside = folder.parent / "outside"
    (outside / "x").mkdir(parents=True)
    (outside / "x/7.bmp").write_bytes(IMAGE)
    (folder / "z").symlink_to(outside)
    expected = ("a/1.png", "a/deep/er/3.webp", "a/self.png", "b/2.JPG", "c.gif/6.tiff", "z/x/7.bmp")
    assert [source.name for source in find_sources(f"{folder}/")] == [str(folder / name) for name in expected]


def test_a_list_of_paths_and_urls(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    strange = os.fsencode(folder / "100% #1?\xff.png")
    uri = (folder / "a b.png").as_uri().encode()
    lines = [b"\xef\xbb\xbfhttp://host/a.png?x=1", b"", b"  ", b"images/x.jpg \r", b"./images/x.jpg", uri, strange]
    lines += [b"ftp://host/%41\xff", b"images/b\xff.png", b"https://host/\xc3\xa9.png"]
    (tmp_path / "list.txt").write_bytes(b"\n".join(lines))
    assert [source.name for source in find_sources("list.txt")] == [
        "http://host/a.png?x=1",
        str(folder / "x.jpg"),  # listed twice, sent once
        str(folder / "a b.png"),
        str(folder / "100% #1?\xff.png"),
        "ftp://host/%41%FF",
        f"{folder.as_uri()}/b%FF.png",
        "https://host/é.png",
    ]
    assert [source.name for source in find_sources("http://host/a.txt")] == ["http://host/a.txt"]
    (folder / "one").touch()  # a file given by name needs no image suffix
    assert [source.name for source in find_sources("images/one")] == [str(folder / "one")]


def test_urls_are_sent_unchanged(fake, server, tmp_path):
    (tmp_path / "list.txt").write_text('https://host/a"b.png\nhttp://host/2.png\n')
    out = tmp_path / "out.jsonl"
    run(options(tmp_path / "list.txt", server, out))
    assert sorted(image_of(body) for body in fake.requests) == ["http://host/2.png", 'https://host/a"b.png']
    assert set(rows(out)) == {"http://host/2.png", 'https://host/a"b.png'}


def test_missing_and_empty_sources_are_refused(folder, tmp_path):
    (tmp_path / "empty.txt").write_text("\n\n")
    for source, message in (
        (tmp_path / "no", "no such"),
        (folder, "no images"),
        (tmp_path / "empty.txt", "no lines"),
    ):
        with pytest.raises(UsageError, match=message):
            find_sources(str(source))


def test_unusual_file_names(fake, server, folder, tmp_path):
    names = [
        "new\nline.png",
        'quo"te.png',
        "back\\slash.png",
        "-o.png",
        " blank .png",
        "日本 é.png",
        "tab\t\x1b[0m.png",
    ]
    for name in names:
        (folder / name).write_bytes(name.encode())
    raw = os.fsencode(folder) + b"/latin-\xe9.png"
    Path(os.fsdecode(raw)).write_bytes(b"latin")
    out = tmp_path / "out.jsonl"
    assert run(options(folder, server, out)).described == len(names) + 1
    written = rows(out)
    for name in names:
        assert written[str(folder / name)]["text"] == f"an image of {name!r}"
    of_latin = f"{folder.as_uri()}/latin-%E9.png"
    assert written[of_latin]["text"] == "an image of 'latin'"
    assert run(options(folder, server, out)).done_before == len(names) + 1
    (tmp_path / "list.txt").write_text(of_latin)  # the name in the row is a valid source
    assert run(options(tmp_path / "list.txt", server, out)).done_before == 1


def test_unreadable_files_become_error_rows(fake, server, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(describe_sources, "MAX_FILE_BYTES", 100)
    (folder / "good.png").write_bytes(IMAGE[:4].replace(b"\x89", b"."))
    (folder / "empty.png").touch()
    os.mkfifo(folder / "pipe.png")
    (folder / "broken.png").symlink_to(folder / "nowhere")
    (folder / "large.png").write_bytes(bytes(101))
    (folder / "locked").mkdir()
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("locked"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    out = tmp_path / "out.jsonl"
    summary = run(options(folder, server, out))
    assert (summary.described, summary.failed, summary.exit_code) == (1, 5, 1)
    assert summary.reasons["unreadable"]["count"] == 5
    assert len(fake.requests) == 1
    written = rows(out)
    reasons = {
        "empty.png": "empty",
        "pipe.png": "not a regular file",
        "broken.png": "No such file",
        "large.png": "larger than the limit of 100 bytes",
        "locked": "Permission denied",
    }
    for name, reason in reasons.items():
        row = written[str(folder / name)]
        assert row["attempts"] == 0
        assert row["error"]["status"] is None
        assert reason in row["error"]["message"]
    (tmp_path / "list.txt").write_bytes(f"{folder}\n{folder}/a\0b.png\n".encode())
    out = tmp_path / "listed.jsonl"
    run(options(tmp_path / "list.txt", server, out))
    messages = [row["error"]["message"] for row in rows(out).values()]
    assert sorted(messages) == ["cannot read the file: embedded null byte", "not a regular file"]


def test_bf_03_files_are_sent_or_skipped_by_name_with_the_reason(fake, server, folder, tmp_path):
    sent = ("a.jfif", "b.JIF", "c.pjpeg", "d.mpo", "e.pjp", "f.dib", "g.apng", "h.jpg")
    for name in (*sent, "i.heic", "notes.txt", "j.svg", "README", ".hidden.txt"):
        (folder / name).write_text(name)
    out = tmp_path / "out.jsonl"
    summary = run(options(folder, server, out))
    assert sorted(image_of(body) for body in fake.requests) == sorted(sent)
    assert set(rows(out)) == {str(folder / name) for name in sent}
    assert summary.sources == len(sent)
    assert dict(summary.skipped) == {
        str(folder / "README"): "its name has no suffix",
        str(folder / "i.heic"): "the server does not read HEIC: convert it to JPEG or PNG",
        str(folder / "j.svg"): "the server does not read SVG: convert it to JPEG or PNG",
        str(folder / "notes.txt"): ".txt is no image's suffix",
    }
    text = io.StringIO()
    show(summary, Console(file=text, width=200))
    assert "4 files of the folder were skipped:" in text.getvalue()
    assert f"  {folder / 'i.heic'}: the server does not read HEIC" in text.getvalue()
    summary.skipped *= 10
    show(summary, Console(file=text, width=200))
    assert "  and 20 more" in text.getvalue()
    assert data_uri(str(folder / "b.JIF")).startswith(b"data:image/jpeg;base64,")


def test_bf_03_a_folder_without_images_says_what_it_has(folder):
    (folder / "i.heic").write_bytes(IMAGE)
    with pytest.raises(UsageError, match=r"1 other files, such as .*i\.heic: the server does not read HEIC"):
        find_sources(str(folder))
