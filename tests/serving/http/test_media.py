"""Fetching of images and videos. Rejected sources cost no connection. All hosts are on loopback."""

import asyncio
import base64
import contextlib
import os
import socket
import urllib.parse
from typing import Any

import pytest
from aiohttp.abc import AbstractResolver

from omni_jax.requests import InvalidRequest
from serving.http import media
from serving.http.media import fetch, is_public, open_session, read
from serving.http.settings import MediaAccessSettings, MediaSettings
from tests.serving.listener import listening, redirect, response

PRIVATE: dict[str, Any] = {"allow_private_media_addresses": True}
DATA = bytes(range(256)) * 5


class TableResolver(AbstractResolver):
    """Resolves names from a table. Of a list of addresses, each call returns the next one, and the last one repeats."""

    def __init__(self, **table: str | list[str]):
        self.table = {name.replace("_", "."): list(a) if isinstance(a, list) else [a] for name, a in table.items()}
        self.resolved: list[str] = []

    async def resolve(self, host, port=0, family=socket.AF_INET):
        self.resolved.append(host)
        answers = self.table.get(host.lower().rstrip("."))
        if answers is None:
            raise OSError(None, "no such name")
        address = answers.pop(0) if len(answers) > 1 else answers[0]
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return [{"hostname": host, "host": address, "port": port, "family": family, "proto": 0, "flags": 0}]

    async def close(self):
        pass


async def get(source: str, names: TableResolver | None = None, **policy: Any) -> bytes:
    made = MediaAccessSettings(**policy)
    async with open_session(made, names) as session:
        return await fetch(source, made, session)


async def assert_rejected(source: str, names: TableResolver | None = None, *, match: str = ".", **policy: Any) -> str:
    with pytest.raises(InvalidRequest, match=match) as caught:
        await get(source, names, **policy)
    assert len(str(caught.value)) < 400
    assert caught.value.__cause__ is None
    return str(caught.value)


@pytest.fixture
async def host():
    async with listening() as listener:
        listener.answers["/a"] = response(DATA)
        yield listener


@pytest.fixture
def public(monkeypatch):
    """Makes 127.0.0.2 count as public, so that a first host is reachable on this machine."""
    monkeypatch.setattr(media, "is_public", lambda address: address == "127.0.0.2" or is_public(address))


# -- SEC-01 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "127.0.0.1",
        "127.1",
        "127.0.0.1.",
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "0177.0.0.1",
        "017700000001",
        "%31%32%37.0.0.1",
        "0.0.0.0",
        "0",
        "localhost",
        "LOCALHOST.",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[0:0:0:0:0:ffff:7f00:0001]",
        "[::127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "①②⑦.⓪.⓪.①",
        "127。0。0。1",
    ],
)
async def test_sec_01_loopback_addresses_in_all_spellings(host, name):
    await assert_rejected(host.url("/a", name))
    assert host.connections == 0


async def test_sec_01_private_addresses_can_be_allowed(host):
    for name in ("127.0.0.1", "localhost"):
        assert await get(host.url("/a", name), **PRIVATE) == DATA
    assert host.paths == ["/a", "/a"]


async def test_sec_01_no_socket_is_created_for_the_metadata_address(monkeypatch):
    dialled = []
    monkeypatch.setattr(media.socket, "socket", lambda *a: dialled.append(a))
    for url in ("http://169.254.169.254/latest/meta-data/", "http://[::ffff:169.254.169.254]/", "http://[fe80::1]/"):
        await assert_rejected(url, match="not on the public internet")
    assert dialled == []


async def test_sec_01_a_name_that_resolves_to_a_private_address(host):
    for address in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
        message = await assert_rejected(
            host.url("/a", "evil.test"), TableResolver(evil_test=address), match=r"evil\.test"
        )
        assert address not in message  # addresses of internal names are not revealed
    assert host.connections == 0


async def test_sec_01_dns_rebinding(host, public):
    """The first address is public and the second is loopback. Each connection resolves once and is checked."""
    async with listening("127.0.0.2") as outer:
        outer.port, port = host.port, outer.port
        outer.answers["/a"] = response(b"fine", Connection="close")
        names = TableResolver(evil_test=["127.0.0.2", "127.0.0.1"])
        policy = MediaAccessSettings()
        async with open_session(policy, names) as session:
            assert await fetch(f"http://evil.test:{port}/a", policy, session) == b"fine"
            with pytest.raises(InvalidRequest, match="public"):
                await fetch(host.url("/a", "evil.test"), policy, session)
    assert names.resolved == ["evil.test", "evil.test"]
    assert host.connections == 0


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
async def test_sec_01_each_redirect_is_checked(host, public, status):
    async with listening("127.0.0.2") as outer:
        names = TableResolver(outer_test="127.0.0.2", inner_test="127.0.0.1")
        for target in (
            host.url("/a"),
            host.url("/a", "localhost"),
            host.url("/a", "inner.test"),
            host.url("/a", "user:pass@127.0.0.2"),
            f"//127.0.0.1:{host.port}/a",
            f"gopher://127.0.0.1:{host.port}/a",
            f"ftp://127.0.0.1:{host.port}/a",
            "file:///etc/passwd",
            "data:text/plain,hello",
            "javascript:alert(1)",
        ):
            outer.answers["/r"] = redirect(target, status)
            message = await assert_rejected(outer.url("/r", "outer.test"), names)
            assert "pass" not in message
        outer.answers |= {"/r": redirect("b?x=1", status), "/b?x=1": response(b"found")}
        assert await get(outer.url("/r", "outer.test"), names) == b"found"
    assert host.connections == 0


async def test_sec_01_domains_are_checked_on_each_redirect(host):
    names = TableResolver(
        good_test="127.0.0.1", other_test="127.0.0.1", sub_good_test="127.0.0.1", xn__bcher_kva_test="::1"
    )
    allowed = {"allowed_media_domains": ("Good.test.",), **PRIVATE}
    assert await get(host.url("/a", "good.test"), names, **allowed) == DATA
    assert await get(host.url("/a", "GOOD.test."), names, **allowed) == DATA
    before = host.connections
    for name in ("other.test", "sub.good.test", "good.test.evil.test", "evilgood.test", "127.0.0.1", "[::1]"):
        await assert_rejected(host.url("/a", name), names, match="not among the domains", **allowed)
    assert host.connections == before
    host.answers["/r"] = redirect(host.url("/a", "other.test"))
    await assert_rejected(host.url("/r", "good.test"), names, match=r"other\.test", **allowed)
    assert host.paths.count("/a") == 2
    await assert_rejected(
        "http://good.test/a", names, match="public", allowed_media_domains=("good.test",)
    )  # because of its private address


async def test_sec_01_a_redirect_to_another_port_is_checked_again(host, public):
    async with listening("127.0.0.2") as outer:
        names = TableResolver(outer_test=["127.0.0.2", "127.0.0.1"])
        outer.answers["/r"] = redirect(f"http://outer.test:{host.port}/a")
        await assert_rejected(outer.url("/r", "outer.test"), names, match="public")
    assert host.connections == 0


@pytest.mark.parametrize(
    "url",
    [
        "gopher://127.0.0.1:{port}/a",
        "ftp://127.0.0.1:{port}/a",
        "ws://127.0.0.1:{port}/a",
        "unix:///tmp/x",
        "javascript:alert(1)",
        "http://user@127.0.0.1:{port}/a",
        "http://user:secret@127.0.0.1:{port}/a",
        "http://:secret@127.0.0.1:{port}/a",
        "http://127.0.0.1\\@127.0.0.1:{port}/a",
        "http:///a",
        "http:127.0.0.1:{port}/a",
        "http://",
        "http://[::1",
        "http://[::1]x:{port}/",
        "http://127.0.0.1:99999/",
        "http://127.0.0.1:port/",
        "http://127.0.0.1:0/",
        "http://a..b:{port}/",
        "http://" + "a" * 300 + ":{port}/",
        "http://a\r\nHost: b:{port}/",
        "http://\x00/",
        "http://127.0.0.1:{port}/" + "a" * 9000,
        "",
        "   ",
        "127.0.0.1:{port}/a",
        "//127.0.0.1:{port}/a",
    ],
)
async def test_sec_01_invalid_urls(host, url):
    message = await assert_rejected(url.format(port=host.port), **PRIVATE)
    assert host.connections == 0
    assert "secret" not in message


async def test_proxies_netrc_and_cookies_are_ignored(host, monkeypatch, tmp_path):
    async with listening() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url(""))
        (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password secret\n")
        monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
        host.answers["/a"] = response(DATA, Set_Cookie="a=b; Path=/")
        policy = MediaAccessSettings(**PRIVATE)
        async with open_session(policy) as session:
            assert [await fetch(host.url("/a"), policy, session) for _ in range(2)] == [DATA, DATA]
    assert proxy.connections == 0
    for _, headers in host.requests:
        assert not {"authorization", "cookie", "proxy-authorization", "referer"} & set(headers)
        assert headers["user-agent"].startswith("omni-jax/")


async def test_urls_are_not_encoded_again(host):
    for path in ("/a%2Fb?sig=x%2Fy%3D%3D&c=%7E~", "/a?b=c+d&e=%20"):
        host.answers[path] = response(b"signed")
        assert await get(host.url(path) + "#fragment", **PRIVATE) == b"signed"
    host.answers["/%C3%BC"] = response(b"encoded")
    assert await get("\n " + host.url("/ü") + " ", **PRIVATE) == b"encoded"
    assert [path for path in host.paths if "#" in path] == []


# -- MM-09 ------------------------------------------------------------------------------------------------------------


def endless(head: bytes, piece: bytes, sent: list[bytes]):
    async def write(writer):
        writer.write(head)
        while True:
            sent.append(piece)
            writer.write(piece)
            await writer.drain()

    return write


async def silent(writer):
    await asyncio.sleep(3600)


def slow(head: bytes):
    async def drip(writer):
        writer.write(head)
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    return drip


async def test_mm_09_hosts_that_fail(host):
    host.answers |= {
        "/403": response(b"secret of the host", status="403 Forbidden"),
        "/500": response(b"", status="500 Oops"),
        "/204": response(b"", status="204 No Content"),
        "/206": response(b"x", status="206 Partial Content"),
        "/304": response(b"", status="304 Not Modified"),
        "/302": response(b"", status="302 Found"),
    }
    for status in ("404", "403", "500", "204", "206", "304", "302"):
        message = await assert_rejected(host.url(f"/{status}"), match=f"status {status}", **PRIVATE)
        assert "secret" not in message
    assert len(host.requests) == 7  # one request each

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    await assert_rejected(f"http://127.0.0.1:{port}/", match="cannot be reached", **PRIVATE)
    await assert_rejected("http://nowhere.test/", TableResolver(), match="cannot be resolved", **PRIVATE)

    async def plain(_, writer):
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(plain, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        await assert_rejected(f"https://127.0.0.1:{port}/a", match="TLS", **PRIVATE)


@pytest.mark.parametrize(
    "answer",
    [
        silent,
        slow(b"HTTP/1.1 200 "),
        slow(b"HTTP/1.1 200 OK\r\nX: "),
        slow(b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n"),
    ],
)
async def test_mm_09_the_timeout_is_for_the_whole_item(host, answer):
    host.answers["/slow"] = answer
    async with asyncio.timeout(10):
        await assert_rejected(host.url("/slow"), match=r"within the 0\.2 s", media_timeout=0.2, **PRIVATE)
    assert (host.connections, len(host.requests)) == (1, 1)


async def test_mm_09_the_timeout_includes_redirects(host):
    async def pause(writer):
        await asyncio.sleep(0.15)
        writer.write(redirect("/slow"))

    host.answers["/slow"] = pause
    await assert_rejected(host.url("/slow"), match=r"0\.4 s", media_timeout=0.4, max_media_redirects=1000, **PRIVATE)
    assert len(host.requests) < 5


async def test_mm_09_a_host_that_accepts_no_connection():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        with contextlib.ExitStack() as fillers:
            for _ in range(3):  # fill the queue, so that a new connection is neither accepted nor refused
                filler = fillers.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(address)
            await assert_rejected(f"http://127.0.0.1:{address[1]}/", media_timeout=0.2, **PRIVATE)


async def test_mm_09_the_size_limit_applies_while_the_body_arrives(host):
    sent = []
    chunk = b"8000\r\n" + b"x" * 32768 + b"\r\n"
    host.answers |= {
        "/endless": endless(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 32768, sent),
        "/chunks": endless(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", chunk, sent),
        "/declared": b"HTTP/1.1 200 OK\r\nContent-Length: 100001\r\n\r\n",
        "/fits": response(b"x" * 100_000),
    }
    for path in ("/endless", "/chunks", "/declared"):
        await assert_rejected(
            host.url(path), match="100000 bytes", max_media_bytes=100_000, media_timeout=60, **PRIVATE
        )
    assert len(sent) * 32768 < 50 * 2**20  # the buffers of the sockets
    assert len(await get(host.url("/fits"), max_media_bytes=100_000, **PRIVATE)) == 100_000


async def test_mm_09_truncated_responses(host):
    async def broken(writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        writer.close()

    async def gone(writer):
        writer.close()

    host.answers |= {"/half": broken, "/gone": gone, "/noise": b"\x00\xff not HTTP at all\r\n\r\n"}
    host.answers["/long"] = b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n"
    for path in ("/half", "/gone", "/noise", "/long"):
        await assert_rejected(host.url(path), match="closed the connection early", **PRIVATE)
    assert sorted(host.paths) == ["/gone", "/gone", "/half", "/long", "/noise"]  # aiohttp repeats /gone once


async def test_mm_09_redirects_are_limited(host):
    host.answers |= {f"/{i}": redirect(f"/{i - 1}") for i in range(1, 11)} | {"/0": response(b"there")}
    await assert_rejected(host.url("/10"), match="limit of 5 redirects", **PRIVATE)
    assert len(host.requests) == 6
    assert await get(host.url("/5"), **PRIVATE) == b"there"
    host.answers["/loop"] = redirect("/loop")
    await assert_rejected(host.url("/loop"), match="redirect", **PRIVATE)
    host.answers["/bad"] = redirect("http://[::1")
    await assert_rejected(host.url("/bad"), match="redirected to an invalid URL", **PRIVATE)


async def test_a_cancelled_fetch_closes_its_connection(host):
    disconnected = asyncio.Event()

    async def watch(writer):
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)
        disconnected.set()

    host.answers["/x"] = watch
    policy = MediaAccessSettings(media_timeout=60, **PRIVATE)
    async with open_session(policy) as session:
        task = asyncio.create_task(fetch(host.url("/x"), policy, session))
        while not host.requests:
            await asyncio.sleep(0.005)
        task.cancel()
        async with asyncio.timeout(10):
            await disconnected.wait()
        assert task.cancelled()


# -- MM-03 ------------------------------------------------------------------------------------------------------------


def wrapped(text: str, width: int = 76) -> str:
    return "\n".join(text[i : i + width] for i in range(0, len(text), width))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 1279, 1280, 1281, 2**18 * 3 // 4, 2**18 + 1, 600_001])
def test_mm_03_variants_of_base64(size):
    data = os.urandom(size)
    plain = base64.b64encode(data).decode()
    for text in (
        plain,
        plain.rstrip("="),
        wrapped(plain),
        wrapped(plain.rstrip("=")) + "\r\n",
        base64.urlsafe_b64encode(data).decode(),
        urllib.parse.quote(plain, safe=""),
        wrapped(plain).replace("\n", "%0A"),
    ):
        for header in (
            "image/png;base64",
            "image/jpg;base64",
            "IMAGE/PNG;charset=utf-8;BASE64",
            ";base64",
            "x/y;base64 ",
        ):
            assert read(f"data:{header},{text}", MediaAccessSettings()) == data
    assert read("DATA:image/png;base64," + plain, MediaAccessSettings()) == data
    escaped = urllib.parse.quote_from_bytes(data)
    assert read(f"data:image/png,{escaped}", MediaAccessSettings()) == data


def test_mm_12_data_uris_are_read_as_the_whatwg_does():
    data = bytes(range(256)) + b"#"
    plain = base64.b64encode(data).decode()
    escaped = "".join(f"%{ord(c):02x}" if i % 3 else c for i, c in enumerate(plain))
    spaced = " \t".join(plain[i : i + 5] for i in range(0, len(plain), 5))
    for uri in (
        f"data:image/png; base64,{plain}",
        f"data:image/png;base64 ,{plain}",
        f"data:image/png;   base64  ,{plain}",
        f"data: image/png ;base64,{plain}",
        f"data:image/png;ba\nse64\t,{plain}",
        f"DATA:IMAGE/PNG;BASE64,{plain}",
        f"data:image/png;charset=utf-8; Base64,{plain}",
        f"data:;base64,{plain}#x",
        f"data:image/png;base64,{plain}#",
        f"data:image/png;base64,{plain} #frag=,%",
        f"data:image/png;base64,{escaped}",
        f"data:image/png;base64,{spaced}",
        f"data:image/png;base64,\n{wrapped(plain)}\r\n",
        f"data:image/png;base64,{plain.replace('=', '%3D')}",
        f"data:image/png;base64,{wrapped(plain).replace(chr(10), '%0D%0a')}%20",
        f" data:image/png;base64,{plain}\n",
        f"data:image/png,{urllib.parse.quote_from_bytes(data)}#fragment",
        f"data:image/png,{wrapped(urllib.parse.quote_from_bytes(data))}",
    ):
        assert asyncio.run(get(uri)) == data, uri[:60]
    assert read("data:,a#b", MediaAccessSettings()) == b"a"
    assert read("data:;base64;x=y,QUJD", MediaAccessSettings()) == b"QUJD"  # "base64" is not the last: not base64
    assert read("data:text/base64,QUJD", MediaAccessSettings()) == b"QUJD"
    assert read("data:;base64,QR", MediaAccessSettings()) == b"A"  # bits behind the last byte are ignored


@pytest.mark.parametrize(
    "uri",
    [
        *("data:image/png;base64,QQ=", "data:image/png;base64,QQ===", "data:image/png;base64,QUI==", "data:;base64,Q"),
        *(
            "data:;base64,QUJD=",
            "data:;base64,QUJDRA=\v=",
            "data:;base64,Q%zzQ=",
            "data:;base64,QUJD%00",
            "data:;base64",
        ),
        *("data:image/png#x;base64,QUJD", "data:image/png;base64#,QUJD", "data:;base64,#QUJD", "data:;base64,QQ==QQ=="),
    ],
)
async def test_mm_12_data_uris_that_the_whatwg_refuses(uri):
    await assert_rejected(uri, match="data: URI")


SECRET = "c2VjcmV0IHBheWxvYWQ"


@pytest.mark.parametrize(
    "source",
    [
        "data:",
        "data:image/png;base64",
        "data:image/png;base64,",
        "data:image/png;base64,====",
        "data:image/png;base64, \n ",
        "data:image/png,",
        f"data:image/png;base64,{SECRET}!",
        f"data:image/png;base64,{SECRET}é",
        f"data:image/png;base64,QQ=={SECRET}=",
        f"data:image/png;base64,{SECRET[:17]}",
        f"data:image/png;base64,{SECRET}\x00",
        f"data:image/png;base64,{SECRET}==%20!",
        "data:" + "x" * 2000 + f";base64,{SECRET}",
        "data:image/png;base64," + "%41" * 1_000_001,
    ],
)
async def test_mm_03_invalid_data_uris(source):
    message = await assert_rejected(source, match="data: URI")
    assert SECRET[:8] not in message


def test_mm_03_padding_before_the_end_is_rejected_at_every_chunk_boundary():
    for size in range(2**18 - 5, 2**18 + 5):
        text = "A" * size + "=" * (-size % 4)
        with pytest.raises(InvalidRequest, match="base64"):
            read("data:;base64," + text + ("=" if size % 4 == 0 else "") + "QQ", MediaAccessSettings())


async def test_the_size_limit_applies_to_data_uris():
    source = "data:;base64," + base64.b64encode(bytes(1001)).decode()
    await assert_rejected(source, match="1001 bytes", max_media_bytes=1000)
    assert await get(source, max_media_bytes=1001) == bytes(1001)


# -- SEC-02 -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    """data/images is allowed, data/images_private and data/secret are not."""
    allowed = tmp_path / "data" / "images"
    (allowed / "sub").mkdir(parents=True)
    (tmp_path / "data" / "images_private").mkdir()
    for path in ("images/a b.png", "images/sub/ü.png", "images_private/x", "secret"):
        (tmp_path / "data" / path).write_bytes(path.encode())
    (allowed / "out").symlink_to(tmp_path / "data" / "secret")
    (allowed / "up").symlink_to(tmp_path / "data")
    (allowed / "in").symlink_to(allowed / "a b.png")
    (allowed / "loop").symlink_to(allowed / "loop")
    os.mkfifo(allowed / "pipe")
    (tmp_path / "link").symlink_to(allowed)
    return allowed


@pytest.mark.parametrize("allowed", [False, True])
async def test_bare_base64_needs_a_header(tmp_path, allowed):
    options = {"allowed_local_media_path": tmp_path} if allowed else {}
    for data in (b"\x89PNG\r\n\x1a\n" + bytes(30), b"\xff\xd8\xff\xe0" + bytes(9), b"RIFF" + bytes(20), bytes(999)):
        source = base64.b64encode(data).decode()
        await assert_rejected(source, match="base64 alone is not a URL", **options)
        await assert_rejected(f"/{source[:9]}/cat.png", match="local file", **options)


async def test_sec_02_local_files_are_off_by_default(files):
    messages = set()
    for source in ("/etc/passwd", "file:///etc/passwd", f"{files}/a b.png", f"file://{files}/nothing", "a.png", "../x"):
        messages.add(await assert_rejected(source, match="local files are not allowed"))
    assert len(messages) == 1
    await assert_rejected("file://host/etc/passwd", match="file: URL")


async def test_sec_02_files_in_the_allowed_directory(files, tmp_path):
    for root in (files, tmp_path / "link", files / "sub" / ".."):
        for source, data in (
            (f"{files}/a b.png", b"images/a b.png"),
            ("a b.png", b"images/a b.png"),
            (f"file://{files}/a%20b.png", b"images/a b.png"),
            (f"FILE://localhost{files}/sub/%C3%BC.png", "images/sub/ü.png".encode()),
            (f"file://{files}/sub/ü.png", "images/sub/ü.png".encode()),
            (f"file://{files}/sub/%2e%2e/a%20b.png", b"images/a b.png"),
            (f"{files}/in", b"images/a b.png"),
            (f"{tmp_path}/link/in", b"images/a b.png"),
        ):
            assert await get(source, allowed_local_media_path=root) == data


async def test_sec_02_other_files_are_rejected_with_one_message(files, tmp_path):
    messages = set()
    for source in (
        *("/etc/passwd", "file:///etc/passwd", "file:///etc/no-such-file", "/", "~/x", "../secret", "../nothing"),
        *(
            f"file://{files}/%2e%2e/secret",
            f"file://{files}/%2E%2E%2Fsecret",
            f"{files}/../secret",
            f"{files}/..%2fsecret",
        ),
        *(f"{files}_private/x", f"file://{files}_private/x", f"{files}_private/nothing", "../images_private/x"),
        *(f"{files}/out", f"{files}/up/secret", f"file://{files}/up/images_private/x", f"{files}/up/nothing"),
        *(
            f"{files}",
            f"{files}/sub",
            f"{files}/pipe",
            f"{files}/loop",
            f"{files}/nothing",
            "/dev/zero",
            "/dev/stdin",
            f"file://{files}/a%00b",
        ),
        *(f"{files}/a b.png\x00", f"{files}/" + "x" * 5000, "x./" * 3000, f"{files}/a b.png/x"),
    ):
        async with asyncio.timeout(10):
            messages.add(await assert_rejected(source, match="local file", allowed_local_media_path=files))
    assert len(messages) == 1
    for source in (f"file://host{files}/in", f"file:{files}/in", "file:in", "file://in", "file:", "file://"):
        await assert_rejected(source, match="file: URL", allowed_local_media_path=files)
    await assert_rejected("in", match="13 bytes", allowed_local_media_path=files, max_media_bytes=13)


# -- settings ---------------------------------------------------------------------------------------------------------


def test_invalid_settings(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    wrong: Any
    for wrong in (
        *(
            {"allowed_media_domains": (name,)}
            for name in ("", " ", "http://a.test", "a.test/x", "a.test:80", "*.a", "u@a")
        ),
        *({"allowed_local_media_path": path} for path in (tmp_path / "file", tmp_path / "nothing")),
        *({"media_timeout": seconds} for seconds in (0, -1, float("inf"), float("nan"))),
    ):
        with pytest.raises(ValueError, match="media"):
            MediaAccessSettings(**wrong)
    assert MediaAccessSettings(allowed_media_domains=("Bücher.test.", "::1")).allowed_media_domains == (
        "xn--bcher-kva.test",
        "::1",
    )
    limits: Any
    for limits in ({"image": -1}, {"audio": 1}, {"image": 1.5}, {"video": True}):
        with pytest.raises(ValueError, match="limit"):
            MediaSettings(limit_mm_per_prompt=limits)
    assert MediaSettings(limit_mm_per_prompt={"image": 0}).limit_mm_per_prompt == {"image": 0, "video": 1}
