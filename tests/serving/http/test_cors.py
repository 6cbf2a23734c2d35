"""Cross-origin requests of browsers: off by default; by flags on every route, for errors and streams too."""

import pytest

from serving.http.settings import SecuritySettings
from tests.serving.conftest import serving
from tests.serving.fake_engine import FakeEngine

PAGE, OTHER = "https://chat.example.com", "https://evil.example.com"
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
PREFIX = "Access-Control-"


async def ask(client, method, path, *, origin=PAGE, **kwargs):
    headers = kwargs.pop("headers", {}) | ({"Origin": origin} if origin else {})
    async with client.session.request(method, client.base + path, headers=headers, **kwargs) as response:
        await response.read()
        found = {key.removeprefix(PREFIX): value for key, value in response.headers.items() if key.startswith(PREFIX)}
        return response.status, found, response.headers.get("Vary")


def preflight(method="POST", headers="authorization, content-type, x-stainless-os"):
    return {"headers": {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": headers}}


async def test_off_by_default(client):
    assert (await ask(client, "OPTIONS", CHAT, **preflight()))[:2] == (405, {})
    assert (await ask(client, "POST", CHAT, json=HELLO)) == (200, {}, None)


async def test_a_preflight_needs_no_key_and_every_response_has_the_headers():
    async with serving(FakeEngine(), api_key=["key"], allowed_origins=(PAGE,)) as client:
        for path in (CHAT, "/v1/models", "/nowhere"):
            status, found, vary = await ask(client, "OPTIONS", path, **preflight())
            assert (status, vary) == (204, "Origin")
            assert found["Allow-Origin"] == PAGE
            assert found["Allow-Methods"] == "POST"
            assert found["Allow-Headers"] == "authorization, content-type, x-stainless-os"
            assert int(found["Max-Age"]) > 0
            assert "Allow-Credentials" not in found
        key = {"Authorization": "Bearer key"}
        for kwargs, expected in (
            ({"json": HELLO, "headers": key}, 200),
            ({"json": HELLO | {"stream": True}, "headers": key}, 200),
            ({"json": HELLO | {"n": 0}, "headers": key}, 400),
            ({"json": HELLO}, 401),
            ({"data": b"x", "headers": key}, 400),
        ):
            status, found, vary = await ask(client, "POST", CHAT, **kwargs)
            assert (status, found["Allow-Origin"], vary) == (expected, PAGE, "Origin")
            assert "X-Request-Id" in found["Expose-Headers"]
            status, found, vary = await ask(client, "POST", CHAT, origin=OTHER, **kwargs)
            assert (status, found, vary) == (expected, {}, "Origin")
        assert (await ask(client, "GET", "/nowhere", headers=key))[1]["Allow-Origin"] == PAGE
        assert (await ask(client, "OPTIONS", CHAT, origin=OTHER, **preflight()))[:2] == (400, {})
        assert (await ask(client, "OPTIONS", CHAT, headers=key))[0] == 405  # not a preflight request


async def test_any_origin():
    async with serving(FakeEngine(), allowed_origins=("*",)) as client:
        assert (await ask(client, "POST", CHAT, json=HELLO))[1]["Allow-Origin"] == "*"
        assert (await ask(client, "OPTIONS", CHAT, **preflight()))[1]["Allow-Origin"] == "*"
        assert (await ask(client, "POST", CHAT, json=HELLO, origin=None))[:2] == (200, {})
    async with serving(FakeEngine(), allowed_origins=("*",), allow_credentials=True) as client:
        _, found, vary = await ask(client, "POST", CHAT, json=HELLO)
        assert (found["Allow-Origin"], found["Allow-Credentials"], vary) == (PAGE, "true", "Origin")


async def test_methods_and_headers():
    limits = {"allowed_methods": ("GET", "POST"), "allowed_headers": ("Authorization",)}
    async with serving(FakeEngine(), allowed_origins=(PAGE,), **limits) as client:
        status, found, _ = await ask(client, "OPTIONS", CHAT, **preflight("GET", "authorization,content-type"))
        assert (status, found["Allow-Methods"]) == (204, "GET, POST")
        for wrong in (preflight("DELETE", ""), preflight("POST", "x-other")):
            assert (await ask(client, "OPTIONS", CHAT, **wrong))[0] == 400


def test_settings():
    given = SecuritySettings(allowed_origins=(f'["{PAGE}", "*"]',), allowed_methods=('["GET"]',))
    assert (given.allowed_origins, given.allowed_methods) == ((PAGE, "*"), ("GET",))
    for wrong in ("chat.example.com", "https://a.com/", "https://*.a.com", "", '["x'):
        with pytest.raises(ValueError, match="allowed_origins"):
            SecuritySettings(allowed_origins=(wrong,))
