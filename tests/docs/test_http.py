"""docs/http.md names every route and field, and each value it gives is the code's."""

import importlib
import pkgutil
import re
import types

import pytest
from pydantic import BaseModel

import serving.http
from omni_jax.requests import InvalidRequest
from serving.http import errors, response_models, server
from serving.http.fields import HARMLESS, REFUSED
from serving.http.settings import ServerSettings
from tests.docs.markdown import ROOT

TEXT = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`([A-Za-z_][\w.]*)`", TEXT)) | {
    part for name in re.findall(r"`([\w.]+)`", TEXT) for part in name.split(".")
}


def module_with(name: str) -> types.ModuleType:
    """The module of serving.http that defines a class, whatever the file is called."""
    for found in pkgutil.iter_modules(serving.http.__path__, "serving.http."):
        module = importlib.import_module(found.name)
        if getattr(getattr(module, name, None), "__module__", None) == found.name:
            return module
    raise AssertionError(f"no module of serving.http defines {name}")


protocol = module_with("CompletionRequest")
REQUESTS = [
    protocol.CompletionRequest,
    protocol.ChatRequest,
    protocol.TokenizeRequest,
    protocol.TokenizeChatRequest,
    protocol.DetokenizeRequest,
    protocol.StreamOptions,
]
RESPONSES = [
    model
    for model in vars(response_models).values()
    if isinstance(model, type) and issubclass(model, BaseModel) and model is not BaseModel
]


def section(heading: str) -> str:
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#)", TEXT + "\n#", re.MULTILINE | re.DOTALL)
    assert found, heading
    return found[1]


@pytest.mark.parametrize("model", [*REQUESTS, *RESPONSES], ids=lambda model: model.__name__)
def test_every_field_is_named(model):
    missing = set(model.model_fields) - NAMED - {"delta", "type", "function"}
    assert not missing


def test_every_field_of_the_tables_exists():
    """The other way round: the first column of the request tables."""
    known = {field for model in REQUESTS for field in model.model_fields}
    both = section("Fields of both completion endpoints")
    tables = both + section("Fields of `/v1/completions`") + section("Fields of `/v1/chat/completions`")
    for row in re.findall(r"^\| (`[^|]+) \|", tables, re.MULTILINE):
        for field in re.findall(r"`(\w+)`", row):
            assert field in known, field
            if row in both:
                assert field in protocol.GenerationRequest.model_fields, field


def test_unsupported_fields_are_those_that_are_refused():
    listed = set(re.findall(r"`?(\w+)`", "`" + section("Unsupported fields").rpartition("\n\n`")[2]))
    assert listed == set(REFUSED)
    for field in listed:
        with pytest.raises(InvalidRequest, match=field):
            protocol.validate(protocol.ChatRequest, {field: "something"})


def test_fields_that_are_ignored_are_those_that_are_harmless():
    listed = set(re.findall(r"`?(\w+)`", "`" + section("Ignored fields").rpartition("\n\n`")[2]))
    assert listed == HARMLESS


def test_every_route_is_listed():
    source = (ROOT / "serving" / "http" / "server.py").read_text(encoding="utf-8")
    routes = re.findall(r'web\.(get|post)\("([^"]+)"', source)
    assert len(routes) >= 11
    for method, path in routes:
        path = re.sub(r"\{model:.*\}", "{model}", path)
        assert re.search(rf"`{method.upper()} {re.escape(path)}`", TEXT), path


def test_open_paths_and_error_types():
    listed = re.search(r"every path except (.*?) needs", TEXT, re.DOTALL)
    assert set(re.findall(r"`(/\w+)`", listed[1])) == set(server.OPEN_PATHS)
    for status, kind in re.findall(r"^\| (\d{3}) \| `(\w+)` \|", section("Errors"), re.MULTILINE):
        assert f'"type": "{kind}"' in errors.ApiError(int(status), "").body()


def test_limits():
    assert f"at most {protocol.MAX_PROMPTS:,} prompts and {protocol.MAX_CHOICES:,} choices" in TEXT
    assert f"at most {protocol.MAX_CACHE_SALT} characters" in TEXT
    assert f"at most {protocol.MAX_LOGIT_BIAS} entries" in TEXT
    assert f"integer 1 to {protocol.MAX_N}, 1" in TEXT
    assert f"at most {protocol.MAX_STOP_STRINGS} strings" in TEXT
    assert f"at most {protocol.MAX_STOP_TOKEN_IDS // 2} token ids" in TEXT
    assert f"integer 0 to {protocol.MAX_LOGPROBS}" in TEXT
    assert f"({ServerSettings().max_body_size >> 20} MiB)" in TEXT
