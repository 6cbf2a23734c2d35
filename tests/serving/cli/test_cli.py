"""The command line: what it passes on, what it prints, how it exits."""

import dataclasses
import importlib.metadata
import io
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

import checkpoints.reader
from omni_jax.engine.config import EngineConfig
from omni_jax.progress import progress_bar, stage_bars
from omni_jax.requests import EngineError
from serving.cli import reference
from serving.cli.app import app
from serving.cli.main import COMMANDS
from serving.cli.options import PANELS, descriptions
from serving.describe.settings import DescribeSettings
from serving.http.settings import MediaAccessSettings, MediaSettings
from tests.checkpoints.test_hub import write_cache
from tests.command_line import run_command
from tests.tiny import write_tiny


def test_help_is_there_for_every_command_and_imports_nothing_heavy():
    code = (
        "import sys, serving.cli.main\n"
        "try: serving.cli.main.main(['serve', '--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'jax', 'numpy', 'aiohttp', 'transformers', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    for command in (function.__name__.replace("_", "-") for function in COMMANDS):
        result = run_command(command, "--help")
        assert result.exit_code == 0
        assert f"Example: omni-jax {command}" in " ".join(result.output.split())


@pytest.mark.parametrize("command", [function.__name__.replace("_", "-") for function in COMMANDS])
def test_help_at_80_columns_breaks_no_flag(command):
    flags = [name for argument in app[command].assemble_argument_collection() for name in argument.names]
    assert flags
    words = run_command(command, "--help", env={"COLUMNS": "80"}).stdout.split()
    positive = [flag for flag in flags if not flag.startswith(("--no-", "--empty-"))]
    assert not [flag for flag in positive if flag.startswith("--") and flag not in words]


def test_the_reference_page_is_up_to_date():
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run python -m serving.cli.reference"


def test_every_setting_is_described():
    for kind in (*(kind for kinds in PANELS.values() for kind in kinds), EngineConfig, DescribeSettings):
        texts = descriptions(kind)
        assert [field.name for field in dataclasses.fields(kind) if not texts.get(field.name)] == []


def test_usage_errors_are_exit_code_2(invoke, served):
    for arguments in (["serve"], ["serve", ".", "--port", "x"], ["serve", ".", "--port", "70000"], ["nothing"]):
        assert invoke(*arguments).exit_code == 2
    assert invoke("generate", ".", "p", "--raw", "--system", "s").exit_code == 2
    assert "--api-key is empty" in invoke("serve", ".", "--api-key", "").stderr
    assert invoke("serve", ".", "--generation-config", "x").exit_code == 2
    assert "--max-num-seqs must be an integer, got '4.5'" in invoke("serve", ".", "--max-num-seqs", "4.5").stderr


def test_serve_passes_its_flags_on(invoke, served, tmp_path):
    assert invoke("serve", str(tmp_path), "--port", "0").exit_code == 0
    assert served["config"] == EngineConfig(model_dir=tmp_path)
    assert served["server"].names == (tmp_path.name,)
    assert (served["timeout"], served["access_log"]) == (20, True)
    flags = {
        "max_model_len": 100,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_num_queued_reqs": 9,
        "block_size": 32,
        "gpu_memory_utilization": 0.5,
        "kv_cache_memory_bytes": 4096,
        "dtype": "float32",
        "seed": 3,
        "generation_config": "vllm",
        "chat_template": "{{ x }}",
        "max_pixels": 1000,
        "encoder_cache_tokens": 99,
        "encoder_layers_per_slice": 2,
    }
    arguments = [word for name, value in flags.items() for word in ("--" + name.replace("_", "-"), str(value))]
    arguments += ["--served-model-name", "a", "b", "--max-body-size", "77", "--port", "0"]
    result = invoke("serve", str(tmp_path), *arguments, "--shutdown-timeout", "1.5", "--no-access-log")
    assert result.exit_code == 0, result.output
    assert served["config"] == EngineConfig(model_dir=tmp_path, **flags)
    assert served["server"].names == ("a", "b")
    assert served["server"].max_body_size == 77
    assert (served["timeout"], served["access_log"]) == (1.5, False)


def test_serve_media_flags(invoke, served, tmp_path):
    assert invoke("serve", str(tmp_path), "--port", "0").exit_code == 0
    media = served["server"].media
    assert media == MediaSettings()
    assert media.limit_mm_per_prompt == {"image": 16, "video": 1}
    assert served["server"].access == MediaAccessSettings()
    assert served["server"].max_body_size == 64 * 2**20
    flags = ["--allowed-media-domains", "a.test", "B.test", "--media-timeout", "2.5"]
    flags += ["--allowed-local-media-path", str(tmp_path), "--allow-private-media-addresses"]
    flags += ["--allow-mm-processor-kwargs", "--limit-mm-per-prompt", '{"image": 4, "video": 2}']
    result = invoke("serve", str(tmp_path), "--port", "0", *flags)
    assert result.exit_code == 0, result.output
    assert served["server"].access == MediaAccessSettings(
        allowed_media_domains=("a.test", "b.test"),
        allowed_local_media_path=tmp_path,
        allow_private_media_addresses=True,
        media_timeout=2.5,
    )
    limits = {"image": 4, "video": 2}
    assert served["server"].media == MediaSettings(limit_mm_per_prompt=limits, allow_mm_processor_kwargs=True)
    for text, limits in {
        "image=4,video=1": {"image": 4, "video": 1},
        "image=4": {"image": 4, "video": 1},
        " video = 0 ": {"image": 16, "video": 0},
        '{"video": 3}': {"image": 16, "video": 3},
    }.items():
        assert invoke("serve", str(tmp_path), "--port", "0", "--limit-mm-per-prompt", text).exit_code == 0
        assert served["server"].media.limit_mm_per_prompt == limits


@pytest.mark.parametrize(
    "flags",
    [
        *(("--limit-mm-per-prompt", text) for text in ("", "4", "image", "image=x", "image=-1", "audio=1", "image=1,")),
        *(("--limit-mm-per-prompt", text) for text in ("{", '{"image": "4"}', '{"image": true}', '{"image": 1.0}')),
        *(("--limit-mm-per-prompt", text) for text in ("[1]", "null", "{}x", '{"image": {"count": 1}}')),
        *(("--allowed-media-domains", text) for text in ("", "http://a.test", "a.test:80", "*.a.test")),
        *(("--media-timeout", text) for text in ("0", "-1", "nan", "inf", "x")),
        ("--allowed-local-media-path", "/no/such/directory"),
        ("--max-pixels", "0"),
        ("--encoder-cache-tokens", "0"),
        ("--encoder-layers-per-slice", "0"),
    ],
)
def test_serve_media_flags_that_are_wrong_are_usage_errors(invoke, served, tmp_path, flags):
    result = invoke("serve", str(tmp_path), "--port", "0", *flags)
    assert result.exit_code == 2, result.output
    assert served == {}


def test_serve_segment_and_objective_flags(invoke, served, tmp_path, monkeypatch):
    assert invoke("serve", str(tmp_path), "--port", "0").exit_code == 0
    cutter = served["server"].cutter
    assert (cutter._policy, cutter._allow_request_policy) == ("request", False)
    flags = ["--scheduling-policy", "slo", "--ttft-ms", "500", "--tpot-ms", "50.5", "--e2e-ms", "9000"]
    flags += ["--aging-seconds", "2.5", "--segment-aware", "--debug-print-batch", "--allow-request-segment-policy"]
    result = invoke("serve", str(tmp_path), "--port", "0", *flags, "--segment-policy", "hybrid")
    assert result.exit_code == 0, result.output
    assert served["config"] == EngineConfig(
        model_dir=tmp_path,
        scheduling_policy="slo",
        segment_policy="hybrid",
        ttft_ms=500.0,
        tpot_ms=50.5,
        e2e_ms=9000.0,
        aging_seconds=2.5,
        segment_aware=True,
        debug_print_batch=True,
    )
    cutter = served["server"].cutter
    assert (cutter._policy, cutter._allow_request_policy) == ("hybrid", True)
    text = '{"text": {"policy": "by_length", "max_length": 64}, "image": "by_region"}'
    text = text.replace('"by_region"', '{"policy": "by_region", "regions": {"rows": 2}}')
    assert invoke("serve", str(tmp_path), "--port", "0", "--segment-policy", text).exit_code == 0
    assert served["config"].segment_policy == json.loads(text)
    assert invoke("serve", str(tmp_path), "--port", "0", "--no-enable-chunked-prefill").exit_code == 0
    assert served["config"].enable_chunked_prefill is False


def test_a_policy_of_ones_own_is_found_in_the_working_directory(invoke, served, tmp_path, monkeypatch):
    (tmp_path / "own_cut.py").write_text("def cut(view): return [(0, view.length)]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    result = invoke("serve", str(tmp_path), "--port", "0", "--segment-policy", "own_cut:cut")
    assert result.exit_code == 0, result.output
    assert served["config"].segment_policy == "own_cut:cut"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--segment-policy", "by_page"), "by_modality"),
        (("--segment-policy", "no.such.module:cut"), "cannot import"),
        (("--segment-policy", '{"policy": "by_length"}'), "max_length"),
        (("--segment-policy", '{"policy": "by_region", "regions": {"rows": 0}}'), '"cols": 2'),
        (("--segment-policy", "{"), "JSON"),
        (("--segment-policy", ""), "is empty"),
        (("--scheduling-policy", "lifo"), "fcfs"),
        (("--scheduling-policy", "slo", "--no-enable-chunked-prefill"), "chunked"),
        *((("--ttft-ms", text), "ttft_ms") for text in ("0", "-1", "nan", "inf", "1e12")),
        (("--tpot-ms", "-5"), "tpot_ms"),
        (("--e2e-ms", "0"), "e2e_ms"),
        *((("--aging-seconds", text), "aging_seconds") for text in ("0", "-1", "nan", "inf")),
    ],
)
def test_serve_segment_flags_that_are_wrong_are_usage_errors_that_say_what_is_right(
    invoke, served, tmp_path, flags, told
):
    result = invoke("serve", str(tmp_path), "--port", "0", *flags)
    assert result.exit_code == 2, result.output
    assert told in result.stderr
    assert served == {}


SETTINGS = {
    "max-num-seqs": 4,
    "max_model_len": 100,
    "served_model_name": "a",
    "api_key": ["k1", "k2"],
    "scheduling-policy": "slo",
    "ttft_ms": 250.5,
    "access_log": False,
    "segment_aware": True,
    "limit_mm_per_prompt": {"image": 3},
    "port": 0,
    "segment_policies": {
        "text": {"policy": "by_length", "max_length": 64},
        "image": {"policy": "by_region", "regions": {"left": [0, 0, 0.5, 1], "right": [0.5, 0, 1, 1]}},
    },
}


@pytest.mark.parametrize(("suffix", "write"), [(".json", json.dumps), (".yaml", yaml.safe_dump), (".yml", json.dumps)])
def test_serve_reads_settings_from_a_file(invoke, served, tmp_path, suffix, write):
    file = tmp_path / f"settings{suffix}"
    file.write_text(write({"model": str(tmp_path)} | SETTINGS))
    result = invoke("serve", "--config", file)
    assert result.exit_code == 0, result.output
    config = EngineConfig(
        model_dir=tmp_path,
        max_num_seqs=4,
        max_model_len=100,
        scheduling_policy="slo",
        ttft_ms=250.5,
        segment_aware=True,
        segment_policy=SETTINGS["segment_policies"],
    )
    assert served["config"] == config
    assert served["server"].names == ("a",)
    assert served["server"].media.limit_mm_per_prompt == {"image": 3, "video": 1}
    assert served["access_log"] is False
    # Flags override variables, and variables override the file.
    more = ["--max-num-seqs", "9", "--access-log", "--served-model-name", "b", "c"]
    variables = {"OMNI_JAX_MAX_NUM_SEQS": "8", "OMNI_JAX_MAX_MODEL_LEN": "77", "OMNI_JAX_API_KEY": "k3 k4"}
    assert invoke("serve", "--config", file, *more, env=variables).exit_code == 0
    assert served["config"] == dataclasses.replace(config, max_num_seqs=9, max_model_len=77)
    assert (served["server"].names, served["access_log"]) == (("b", "c"), True)
    (tmp_path / "other").mkdir()
    assert invoke("serve", tmp_path / "other", env={"OMNI_JAX_CONFIG": str(file)}).exit_code == 0
    assert served["config"] == dataclasses.replace(config, model_dir=tmp_path / "other")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"max_model_length": 5}, "did you mean max_model_len?"),
        ({"modell": "x"}, "did you mean model?"),
        ({"segment_polices": {}}, "did you mean segment_policy?"),
        ({"shedulingpolicy": "slo"}, "did you mean scheduling_policy?"),
        ({1: 2}, "is not text"),
        ({"model": None}, "model is empty"),
        ({"api_key": []}, "api_key in"),
        ({"api_key": [12]}, "must be text: put 12 in quotes"),
        ({"model": "no/such"}, "there is no directory no/such here"),
        ({"max_num_seqs": "many"}, "max_num_seqs in"),
        ({"max_num_seqs": 4.5}, "must be an integer, got '4.5'"),
        ({"max_num_seqs": True}, "must be an integer, got 'true'"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": [1, 2]}, "must be one value, got 2"),
        ({"max_num_seqs": {"a": 1}}, "max_num_seqs in"),
        ({"access_log": "maybe"}, "access-log"),
        ({"api_key": ""}, "is empty"),
        ({"ttft_ms": -1}, "ttft_ms"),
        ({"segment_policy": "by_page"}, "by_modality"),
        ({"segment_policies": {"sound": "request"}}, "modalities"),
        ({"segment_policies": {"text": "request"}, "segment_policy": "request"}, "twice"),
        ({"port": 1, "scheduling-policy": "slo", "scheduling_policy": "slo"}, "twice"),
        ({"help": True}, "unknown key help"),
        ({"no_access_log": True}, "did you mean access_log?"),
        ({"config": "x"}, "unknown key config"),
    ],
)
def test_settings_that_are_wrong_are_usage_errors(invoke, served, tmp_path, settings, told):
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump({"model": str(tmp_path), "port": 0} | settings))
    result = invoke("serve", "--config", file)
    assert result.exit_code == 2, result.output
    assert told in result.stderr
    assert served == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", "{"),
        ("a.json", "[1]"),
        ("a.json", '{"model": "m", "port": 1, "port": 2}'),
        ("a.yaml", "model: m\nport: 1\nport: 2"),
        ("a.yaml", "model: [m"),
        ("a.yaml", "model: !!python/object/apply:os.getcwd []"),
        ("a.yaml", "model: m\nport: 010"),
        ("a.json", b"\xff\xfe"),
    ],
)
def test_files_that_hold_no_settings_are_usage_errors(invoke, served, tmp_path, name, text):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    result = invoke("serve", "--config", tmp_path / name)
    assert (result.exit_code, served) == (2, {}), result.output
    assert str(tmp_path / name) in result.stderr
    assert invoke("serve", "--config", tmp_path / "none.json").exit_code == 2


def test_xla_gets_its_share_of_a_gpu(invoke, served, tmp_path):
    for flags, expected in (([], "0.92"), (["--gpu-memory-utilization", "0.6"], "0.6")):
        assert invoke("serve", tmp_path, "--port", "0", *flags).exit_code == 0
        assert served["xla_share"] == expected


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"API_KEY": ""}, "OMNI_JAX_API_KEY is empty"),
        ({"API_KEY": " "}, "OMNI_JAX_API_KEY is empty"),
        ({"ALLOWED_MEDIA_DOMAINS": ""}, "OMNI_JAX_ALLOWED_MEDIA_DOMAINS is empty"),
        ({"ALLOWED_LOCAL_MEDIA_PATH": ""}, "OMNI_JAX_ALLOWED_LOCAL_MEDIA_PATH is empty"),
        ({"MAX_NUM_SEQS": "4.5"}, "OMNI_JAX_MAX_NUM_SEQS must be an integer, got '4.5'"),
        ({"CONFIG": "no.yaml"}, "no.yaml"),
    ],
)
def test_variables_that_are_wrong_are_usage_errors(invoke, served, tmp_path, variables, told):
    """A variable that a deployment left blank must not open the server (litellm PR 42019)."""
    env = {f"OMNI_JAX_{name}": value for name, value in variables.items()}
    result = invoke("serve", tmp_path, "--port", "0", env=env)
    assert (result.exit_code, served) == (2, {})
    assert told in result.stderr


def test_an_unknown_variable_is_reported_with_the_nearest_name(invoke, served, tmp_path, caplog):
    """Those of a Kubernetes service named omni-jax are not: OMNI_JAX_PORT is its address (vllm issue 15613)."""
    kubernetes = {"PORT": "tcp://10.0.0.1:8000", "PORT_8000_TCP": "tcp://10.0.0.1:8000", "SERVICE_HOST": "10.0.0.1"}
    variables = kubernetes | {"MAX_NUM_SEQ": "3", "NO_ACCESS_LOG": "1"}
    env = {f"OMNI_JAX_{name}": value for name, value in variables.items()}
    assert invoke("serve", tmp_path, env=env | {"OMNI_JAX_HOST": "127.0.0.1"}).exit_code in (0, 1)  # 8000 may be in use
    assert [record.getMessage() for record in caplog.records if "variable" in record.getMessage()] == [
        "unknown environment variable OMNI_JAX_MAX_NUM_SEQ; did you mean OMNI_JAX_MAX_NUM_SEQS?",
        "unknown environment variable OMNI_JAX_NO_ACCESS_LOG; did you mean OMNI_JAX_ACCESS_LOG?",
    ]


def test_other_commands_read_no_variables(invoke, tmp_path):
    """OMNI_JAX_MODEL is the server's directory, and not the model that describe-images asks for."""
    (tmp_path / "a.png").write_bytes(b"")
    env = {"OMNI_JAX_MODEL": "m", "OMNI_JAX_OUT": "o", "OMNI_JAX_DTYPE": "auto", "OMNI_JAX_TIMEOUT": "-1"}
    flags = ["--prompt", "p", "-o", tmp_path / "out.jsonl", "--dry-run"]
    result = invoke("describe-images", tmp_path, *flags, env=env)
    assert (result.exit_code, result.stdout.strip()) == (0, str(tmp_path / "a.png"))


def test_a_flag_without_values_and_names_that_swallow_the_model(invoke, served, tmp_path):
    assert "requires at least 1 element" in invoke("serve", tmp_path, "--port", "0", "--api-key").stderr
    assert "before flags that take several values" in invoke("serve", "--served-model-name", "a", tmp_path).stderr
    file = tmp_path / "a.yaml"
    file.write_text(f"model: {tmp_path}\nport: 0\n")
    result = invoke("serve", "--config", file, "--served-model-name", "a", tmp_path)
    assert (result.exit_code, served) == (2, {})
    assert "is a directory: give MODEL before" in result.stderr


def test_values_that_begin_with_a_dash_are_not_repeated(invoke, served, tmp_path):
    """They may be secrets (simonw/llm issue 871)."""
    for flags in (["--api-key", "-Zsecret"], ["--api-key", "k", "-Zsecret"]):
        result = invoke("serve", tmp_path, *flags)
        assert result.exit_code == 2
        assert "secret" not in result.output
    assert invoke("serve", tmp_path, "--port", "0", "--api-key=-Zsecret").exit_code == 0


def test_paths_in_the_home_directory(invoke, served, tmp_path):
    flags = ["--swap-space", "1", "--swap-dir=~/swap", "--compilation-cache-dir=~/xla", "--chat-template=~/t.jinja"]
    assert invoke("serve", tmp_path, "--port", "0", *flags, env={"HOME": "/home/me"}).exit_code == 0
    config = served["config"]
    found = (str(config.swap_dir), str(config.compilation_cache_dir), config.chat_template)
    assert found == ("/home/me/swap", "/home/me/xla", "/home/me/t.jinja")


def test_one_file_for_several_commands(invoke, llm, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(f"model: {tmp_path}\nport: 1\nserved_model_name: [a]\nmax_model_len: 99\n")
    assert invoke("generate", tmp_path, "hello", "--config", file).exit_code == 0
    assert made(llm).max_model_len == 99


def test_short_forms_with_an_equals_sign_and_behind_two_dashes(invoke, served, llm, tmp_path):
    assert invoke("serve", tmp_path, "--port", "0", "-tp=2").exit_code == 0
    assert served["config"].tensor_parallel_size == 2
    assert invoke("generate", tmp_path, "--raw", "--", "-tp").exit_code == 0
    assert llm.asked[0] == "-tp"


def test_vllm_spellings(invoke, served, tmp_path):
    flags = ["--served-model-name", "a", "b", "--api-key", "k1", "k2", "--trust-remote-code"]
    assert invoke("serve", "--model", tmp_path, "--port", "0", *flags, "--scheduling-policy", "priority").exit_code == 0
    assert served["server"].names == ("a", "b")
    assert (served["config"].scheduling_policy, served["config"].trust_remote_code) == ("slo", True)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("Qwen/Qwen2-0.5B", "Qwen/Qwen2-0.5B is not in the cache"),
        ("/no/such", "there is no directory /no/such"),
        (__file__, "is a file, not a model directory"),
    ],
)
def test_a_model_that_is_not_there_is_known_at_once(invoke, served, model, told):
    result = invoke("serve", model)
    assert (result.exit_code, served) == (2, {})
    assert told in result.stderr


def test_a_repository_of_the_hub_is_served_under_its_id(invoke, served, tmp_path):
    snapshot = write_cache(tmp_path / "hub", write_tiny(tmp_path / "model", "llama"))
    result = invoke("serve", "tiny/llama", "--download-dir", tmp_path / "hub", "--port", "0")
    assert result.exit_code == 0, result.output
    assert served["server"].names == ("tiny/llama",)
    assert served["config"].model_dir == snapshot
    assert f"{snapshot}: good" in invoke("check", "tiny/llama", "--download-dir", tmp_path / "hub").stdout
    assert "is not in the cache" in invoke("plan", "tiny/llama", "--gpu", "h100").stderr


def test_serve_with_a_port_in_use(invoke, served):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = invoke("serve", ".", "--port", str(taken.getsockname()[1]))
    assert result.exit_code == 1
    assert "cannot listen on 127.0.0.1" in result.stderr
    assert served == {}


def test_several_api_servers_need_an_engine_beside_them(invoke, served):
    result = invoke("serve", ".", "--api-server-count", "2", "--engine-core", "thread")
    assert result.exit_code == 2
    assert "api_server_count above 1 needs engine_core process" in result.stderr


def test_serve_with_a_model_that_cannot_be_loaded(invoke, served, monkeypatch):
    def broken(config, progress, *, make_cores):
        raise EngineError("the pool does not fit")

    monkeypatch.setattr(sys.modules["omni_jax.engine.async_engine"], "AsyncEngine", broken)
    result = invoke("serve", ".", "--port", "0")
    assert result.exit_code == 1
    assert result.stderr == "omni-jax: the pool does not fit\n"


def made(llm) -> EngineConfig:
    """What the command loaded a model with."""
    model_dir, options = llm.made
    return EngineConfig(model_dir=model_dir, **options)


def test_generate(invoke, llm, tmp_path, monkeypatch):
    result = invoke("generate", str(tmp_path), "hello", "--max-model-len", "99", "--temperature", "0", "--stop", "x")
    assert (result.exit_code, result.stdout) == (0, "one two\n"), result.output
    assert made(llm) == EngineConfig(model_dir=tmp_path, max_model_len=99, max_num_seqs=1)
    prompt, params = llm.asked
    assert prompt == [{"role": "user", "content": "hello"}]  # the model has a template
    # max_tokens is the model's; 256 if it has none
    assert (params.temperature, params.top_k, params.max_tokens, params.stop) == (0, 7, 3, ("x",))
    invoke("generate", ".", "hello", "--max-tokens", "9")
    assert llm.asked[1].max_tokens == 9
    monkeypatch.setattr(llm, "default_sampling", {})
    invoke("generate", ".", "hello")
    assert llm.asked[1].max_tokens == 256
    invoke("generate", ".", "hello", "--raw")
    assert llm.asked[0] == "hello"
    invoke("generate", ".", "hello", "--system", "be brief")
    assert [message["role"] for message in llm.asked[0]] == ["system", "user"]
    result = invoke("generate", ".", "-", "--raw", "--json", stdin="from stdin")
    assert llm.asked[0] == "from stdin"
    assert json.loads(result.stdout) == {"prompt": "from stdin", "text": "one two", "finish_reason": "stop"}
    assert result.stderr == ""


@pytest.mark.parametrize("command", [("generate", ".", "hello"), ("generate", ".", "hello", "--json"), ("chat", ".")])
def test_an_answer_that_failed_or_was_cut_shows_it(invoke, llm, monkeypatch, command):
    monkeypatch.setattr(llm, "ends", "error")
    result = invoke(*command, stdin="hello\n")
    assert result.exit_code == 1
    assert "omni-jax: the model produced NaN logits" in result.stderr
    monkeypatch.setattr(llm, "ends", "length")
    result = invoke(*command, "--max-tokens", "2", stdin="hello\n")
    assert result.exit_code == 0
    assert "the answer was cut at 2 tokens (--max-tokens)" in result.stderr
    assert "cut" not in result.stdout
    assert "prompt and answer fill the context of" in invoke(*command, "--max-tokens", "9", stdin="hello\n").stderr


def test_generate_with_images_and_videos(invoke, llm, tmp_path):
    for name in ("a.png", "b.jpg", "c.mp4"):
        (tmp_path / name).write_bytes(b"")
    paths = [str(tmp_path / name) for name in ("a.png", "b.jpg", "c.mp4")]
    seen = ["--image", paths[0], paths[1], "--video", paths[2]]
    result = invoke("generate", ".", "What are they?", *seen, "--system", "be brief", "--max-pixels", "5000")
    assert result.exit_code == 0, result.output
    assert llm.asked[0] == [
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [
                {"type": "image", "image": paths[0]},
                {"type": "image", "image": paths[1]},
                {"type": "video", "video": paths[2]},
                {"type": "text", "text": "What are they?"},
            ],
        },
    ]
    assert made(llm) == EngineConfig(model_dir=Path("."), max_num_seqs=1, max_pixels=5000)
    llm.asked = None
    for wrong in (["--image", str(tmp_path / "none.png")], ["--video", str(tmp_path)], [*seen, "--raw"]):
        assert invoke("generate", ".", "What?", *wrong).exit_code == 2
    assert llm.asked is None


def test_generate_faults(invoke, llm):
    result = invoke("generate", ".", "hello", "--temperature", "9")
    assert result.exit_code == 2
    assert result.stderr.startswith("omni-jax: temperature must be")
    llm.fault = FileNotFoundError("no model in m")
    result = invoke("generate", ".", "hello")
    assert (result.exit_code, result.stderr) == (1, "omni-jax: no model in m\n")
    llm.fault = KeyboardInterrupt()
    assert invoke("generate", ".", "hello").exit_code == 130


def test_check(invoke, tmp_path):
    model = write_tiny(tmp_path / "model", "llama", eos_token_id=7)
    result = invoke("check", str(model))
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    for line in ("context       1024 tokens", "ends at       token ids 0, 2, 7", "chat          with chat template"):
        assert f"  {line}\n" in result.stdout + "\n"
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    result = invoke("check", str(model))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "model.safetensors" in result.stderr
    result = invoke("check", str(model), "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["ok"] is False
    assert invoke("check", str(tmp_path / "nowhere")).exit_code == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eos_token_id": 2**40}, "eos_token_id in config.json must be a token id from 0 to 511"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported"),
        ({"hidden_size": None}, "config.json has no hidden_size"),
    ],
)
def test_check_finds_what_a_start_would_refuse(invoke, tmp_path, change, message):
    model = write_tiny(tmp_path, "llama")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | change))
    result = invoke("check", str(model))
    assert (result.exit_code, result.stdout) == (1, "")
    assert message in result.stderr


def test_ck_09_check_and_plan_name_the_context_with_rope_scaling(invoke, tmp_path):
    """Qwen2.5's and Qwen3's documented setting for long contexts."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    model = write_tiny(tmp_path, "qwen3", max_position_embeddings=256, rope_scaling=yarn)
    assert "  context       1024 tokens\n" in invoke("check", str(model)).stdout
    plan = ("plan", str(model), "--gpu", "h100", "--no-compile", "--json", "--max-model-len")
    assert json.loads(invoke(*plan, "1024").stdout)["settings"]["max_model_len"] == 1024
    assert "1025 exceeds the model's 1024 positions" in invoke(*plan, "1025").stderr


def test_convert_says_what_is_wrong(invoke, tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"no gguf")
    result = invoke("convert", str(tmp_path / "a.gguf"), str(tmp_path / "out"))
    assert result.exit_code == 1
    assert "a.gguf" in result.stderr
    assert not (tmp_path / "out").exists()


def test_version(invoke):
    assert invoke("--version").stdout == f"omni-jax {importlib.metadata.version('omni-jax')}\n"
    assert set(json.loads(invoke("version", "--json").stdout)) == {"omni-jax", "jax", "python"}
    assert invoke("version").stdout.startswith("omni-jax ")


def test_progress_without_a_terminal_is_a_few_lines():
    out = io.StringIO()
    with progress_bar("converting x", Console(file=out)) as report:
        for done in range(1001):
            report(f"tensor {done}", done * 1000, 1_000_000)
    lines = out.getvalue().splitlines()
    assert len(lines) == 5
    assert lines[-1] == "converting x: 100 % of 1.0 MB (tensor 1000)"


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_of_a_start(terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with stage_bars(console) as report:
        for done in range(1, 11):
            report("load", done * 10**6, 10**7, f"tensor {done}")
        report("compile", 1, 12, "body 32")  # and fails there
    shown = console.file.getvalue()
    assert ("starting" in shown and "programs: 1 of 12" in shown) == terminal


def test_progress_of_a_start_without_a_terminal_is_a_line_in_the_log_every_30_seconds(monkeypatch, caplog):
    now = 100.0
    monkeypatch.setattr("omni_jax.progress.time.monotonic", lambda: now)
    with caplog.at_level("INFO", logger="omni_jax.progress"), stage_bars(Console(file=io.StringIO())) as report:
        for done in range(1, 13):
            now += 10.0
            report("compile", done, 12, f"body {done}")
    assert [record.getMessage() for record in caplog.records] == [
        f"starting: programs: {done} of 12 body {done}" for done in (3, 6, 9, 12)
    ]


def test_the_reader_is_where_the_cli_expects_it():
    assert issubclass(checkpoints.reader.CheckpointError, ValueError)
