"""From flags, environment and files to the settings tree: precedence, and one clear line for every mistake."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse_shared.arguments import Parser, add_settings, explicit, load_settings, parse, to_environment
from packhorse_shared.checks import check_files
from packhorse_shared.environment import without_ours
from packhorse_shared.errors import SettingsError
from packhorse_shared.key_folders import make_keys
from packhorse_shared.load import allowed
from packhorse_shared.settings import (
    BatchingSettings,
    HttpSettings,
    ModelSettings,
    ProcessSettings,
    Settings,
    WorkerSettings,
    decode_settings,
    encode_settings,
    flags,
)


def load(*argv: str, **environ: str) -> Settings:
    parser = Parser(prog="packhorse embeddings")
    add_settings(parser)
    return load_settings(parser.parse_args(argv), environ)


def one_line(*argv: str, **environ: str) -> str:
    """What the command line prints when it refuses: exactly one line, status 2."""
    parser = Parser(prog="packhorse embeddings")
    add_settings(parser)
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), pytest.raises(SystemExit) as ended:
        parse(parser, argv, environ)
    assert ended.value.code == 2
    lines = printed.getvalue().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def write(folder: Path, text: str, name: str = "c.yaml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


# ---- sources and precedence ----


def test_nothing_given_is_the_defaults() -> None:
    assert load() == Settings()


def test_precedence_is_flag_environment_yaml_triton_default(tmp_path: Path) -> None:
    triton = write(tmp_path, "max_batch_size: 2\ndynamic_batching { max_queue_delay_microseconds: 100 }", "config.pbtxt")
    config = write(tmp_path, "max_batch_size: 3\nmax_num_tokens: 300\n")
    files = (f"--config={config}", f"--triton_config={triton}")
    assert load(f"--triton_config={triton}").batching == BatchingSettings(max_batch_size=2, max_queue_delay=0.0001)
    assert load(*files).batching == BatchingSettings(max_batch_size=3, max_num_tokens=300, max_queue_delay=0.0001)
    assert load(*files, PACKHORSE_MAX_BATCH_SIZE="4").batching.max_batch_size == 4
    assert load(*files, "--max_batch_size=5", PACKHORSE_MAX_BATCH_SIZE="4").batching.max_batch_size == 5
    in_environment = load(PACKHORSE_CONFIG=config, PACKHORSE_TRITON_CONFIG=triton)
    assert in_environment == load(*files)


@pytest.mark.parametrize("flag", [flag for flag in flags().values() if not flag.yaml_only], ids=lambda flag: flag.name)
def test_every_setting_is_a_flag_in_both_spellings_and_a_variable(flag: object) -> None:
    known = flags()[flag.name]  # type: ignore[attr-defined]
    texts = {
        "cors_allow_origin": "http://a",
        "root_path": "/a",
        "num_frontends": "3",
        "matryoshka_dimensions": "64",
        "broker": "tcp://a:5600",
    }
    companions = {"ssl_keyfile": "--ssl_certfile=c", "broker": "--curve_keys=k", "curve_keys": "--broker=tcp://a:5600"}
    others = [word for word in known.choices if word not in (known.default, "auto")]
    text = others[0] if others else texts.get(known.name, "7")
    if known.is_switch or known.name == "normalize":
        text = "true"
    extra = [companions[known.name]] if known.name in companions else []
    underscores = load(f"--{known.name}={text}", *extra)
    assert underscores == load(f"--{known.name.replace('_', '-')}={text}", *extra)
    environ = {known.variable: text}
    assert underscores == load(*extra, **environ)
    assert getattr(getattr(underscores, known.section), known.name) != known.default


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--trust_remote_code"], True),
        (["--trust-remote-code"], True),
        (["--trust_remote_code=true"], True),
        (["--trust-remote-code=false"], False),
        ([], False),
    ],
)
def test_a_switch_takes_no_value_or_true_or_false(argv: list[str], expected: bool) -> None:
    assert load(*argv).model.trust_remote_code is expected


def test_a_switch_does_not_swallow_what_follows() -> None:
    parser = Parser(prog="x")
    parser.add_argument("model_argument", nargs="?")
    add_settings(parser)
    parsed = parser.parse_args(["--trust_remote_code", "some/model"])
    assert parsed.model_argument == "some/model"
    assert explicit(parsed) == {"trust_remote_code"}


def test_a_flag_switches_off_what_the_environment_switched_on() -> None:
    assert load("--trust_remote_code=false", PACKHORSE_TRUST_REMOTE_CODE="1").model.trust_remote_code is False


def test_lists_are_repeated_or_separated_by_commas() -> None:
    given_twice = load("--served_model_name", "a, b", "--served-model-name", "c").model.served_model_name
    assert given_twice == ("a", "b", "c")
    assert load(PACKHORSE_DEVICES="GPU-aaaa,GPU-bbbb").workers.devices == ("GPU-aaaa", "GPU-bbbb")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1000", 1000), ("1KiB", 1024), ("2 mib", 2 << 20), ("0.5GiB", 1 << 29), ("1GiB", 1 << 30)],
)
def test_sizes_take_units(text: str, expected: int) -> None:
    assert load(f"--max_body_bytes={text}").http.max_body_bytes == expected


@pytest.mark.parametrize(("text", "expected"), [("auto", "auto"), ("AUTO", "auto"), ("0", 0.0), ("0.0001", 0.0001), ("5", 5.0)])
def test_delay_is_kept_to_the_letter(text: str, expected: object) -> None:
    assert load(f"--max_queue_delay={text}").batching.max_queue_delay == expected


@pytest.mark.parametrize(("text", "expected"), [("true", True), ("no", False), ("OFF", False), ("1", True)])
def test_normalize(text: str, expected: bool) -> None:
    assert load(f"--normalize={text}").model.normalize is expected


# ---- mistakes ----


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--max_batchsize=3"], ["unknown flag --max_batchsize", "did you mean --max_batch_size?"]),
        (["--max-batchsize", "3"], ["unknown flag --max-batchsize", "--max_batch_size"]),
        (["--max_batch"], ["unknown flag --max_batch"]),
        (["stray"], ["unexpected argument stray"]),
        (["--max_batch_size"], ["max_batch_size", "expected one argument"]),
        (["--max_batch_size=0"], ["--max_batch_size: '0' is not allowed", "a whole number from 1 to 4096"]),
        (["--max_batch_size=1.5"], ["--max_batch_size", "'1.5'", "a whole number"]),
        (["--max-batch-size=ten"], ["--max_batch_size", "'ten'"]),
        (["--max_batch_size="], ["--max_batch_size", "is empty"]),
        (["--max_num_tokens=-1"], ["--max_num_tokens", "or auto"]),
        (["--max_queue_delay=nan"], ["--max_queue_delay", "a number from 0 to 60, or auto"]),
        (["--max_queue_delay=61"], ["--max_queue_delay", "'61'"]),
        (["--request_timeout=0"], ["--request_timeout", "a number above 0 to 86400"]),
        (["--dtype=fp16"], ["--dtype: 'fp16' is not allowed; give auto, bfloat16, float16 or float32"]),
        (["--normalize=maybe"], ["--normalize", "true or false"]),
        (["--trust_remote_code=maybe"], ["trust_remote_code", "'maybe'"]),
        (["--port=70000"], ["--port", "65535"]),
        (["--max_body_bytes=32MB"], ["--max_body_bytes", "'32MB'", "KiB"]),
        (["--max_body_bytes=0.3"], ["--max_body_bytes", "'0.3'"]),
        (["--served_model_name=,"], ["--served_model_name", "is empty"]),
        ([f"--served_model_name={'x' * 300}"], ["--served_model_name", "is not allowed"]),
        (["--shutdown_grace=4000"], ["--shutdown_grace", "3600"]),
        (["--run_dir=a\nb"], ["--run_dir", "control character"]),
        (["--ssl_keyfile=k.pem"], ["--ssl_keyfile", "--ssl_certfile"]),
        (["--uds=/tmp/s", "--num_frontends=2"], ["--uds", "--num_frontends is 2"]),
        ([f"--uds=/{'x' * 120}"], ["--uds", "107"]),
        (["--cors_allow_origin=example.com"], ["--cors_allow_origin", "example.com", "scheme://host"]),
        (["--cors_allow_origin=http://a/b"], ["--cors_allow_origin", "http://a/b"]),
        (["--cors_allow_origin=*,http://a"], ["--cors_allow_origin", "* alone"]),
        (["--root_path=api"], ["--root_path", "'api'", "start with /"]),
        (["--api_key=two words"], ["--api_key", "without spaces"]),
        (["--matryoshka_dimensions=64,any"], ["--matryoshka_dimensions", "'any'"]),
        (["--matryoshka_dimensions=0"], ["--matryoshka_dimensions", "'0'"]),
        (["--devices=cpu,0"], ["--devices", "stand alone"]),
        (["--devices=0,0"], ["--devices", "twice"]),
        (["--devices=0,,1"], ["--devices: '0,,1' has an empty entry"]),
        (["--devices=,"], ["--devices: is empty"]),
        ([f"--devices={','.join(map(str, range(1000)))}"], ["--devices: names 1000 devices, limit 64"]),
        (["--devices=0-3"], ["--devices: '0-3' is no device; write each index by itself"]),
        (["--config=/no/such.yaml"], ["--config", "there is no file /no/such.yaml"]),
        (["--config="], ["--config", "is empty"]),
        (["--triton_config=/no/such"], ["--triton_config", "there is no file"]),
        (["--config=/"], ["--config: / is a folder, not a file"]),
        (["--config=/dev/null"], ["--config: /dev/null is no regular file"]),
        (["--triton_config=/dev/null"], ["--triton_config: /dev/null is no regular file"]),
        ([f"--config=/{'x' * 5000}"], ["--config: /xxx", "...", "cannot be read: File name too long"]),
        (["--config=~nobody-of-this-name/c.yaml"], ["--config", "~nobody-of-this-name/c.yaml", "home"]),
        (["--tensor_parallel_size=2"], ["--tensor_parallel_size: a model is not split over devices", "--devices"]),
        (["--pipeline-parallel-size", "2"], ["--pipeline-parallel-size: a model is not split over devices"]),
        (["--tp=2"], ["--tp: a model is not split over devices"]),
    ],
    ids=lambda value: value[0][:40] if isinstance(value, list) and value else None,
)
def test_mistakes_on_the_command_line(argv: list[str], words: list[str]) -> None:
    line = one_line(*argv)
    assert line.startswith("packhorse embeddings: ")
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"PACKHORSE_MAX_BATCHSIZE": "3"}, ["PACKHORSE_MAX_BATCHSIZE: unknown setting", "PACKHORSE_MAX_BATCH_SIZE?"]),
        ({"PACKHORSE_XYZZY": ""}, ["PACKHORSE_XYZZY: unknown setting"]),
        ({"PACKHORSE_TENSOR_PARALLEL_SIZE": "2"}, ["PACKHORSE_TENSOR_PARALLEL_SIZE: a model is not split", "--devices"]),
        ({"PACKHORSE_PP_SIZE": "2"}, ["PACKHORSE_PP_SIZE: a model is not split over devices"]),
        ({"PACKHORSE_CONFIG": "/"}, ["PACKHORSE_CONFIG: / is a folder, not a file"]),
        ({"PACKHORSE_PORT": "http"}, ["PACKHORSE_PORT: 'http' is not allowed"]),
        ({"PACKHORSE_PORT": ""}, ["PACKHORSE_PORT", "is empty"]),
        ({"PACKHORSE_CONFIG": "/no/such"}, ["PACKHORSE_CONFIG", "there is no file"]),
        ({"PACKHORSE_UDS": "/s", "PACKHORSE_NUM_FRONTENDS": "2"}, ["PACKHORSE_UDS", "PACKHORSE_NUM_FRONTENDS is 2"]),
        ({"PACKHORSE_CUDA_GRAPH_CONFIG": "[1]"}, ["PACKHORSE_CUDA_GRAPH_CONFIG", "--config"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_mistakes_in_the_environment(environ: dict[str, str], words: list[str]) -> None:
    line = one_line(**environ)
    for word in words:
        assert word in line


@pytest.mark.parametrize("word", ["COLOUR", "NORTH", "MODE_OF_SERVICE", "TIMEOUT_POLICY", "GPU_COUNT"])
def test_a_name_is_suggested_only_when_it_is_close(word: str) -> None:
    """What all names have in common makes none of them close."""
    assert one_line(**{f"PACKHORSE_{word}": "1"}) == f"packhorse embeddings: PACKHORSE_{word}: unknown setting"
    assert one_line(f"--{word.lower()}=1") == f"packhorse embeddings: unknown flag --{word.lower()}"


def test_a_file_of_settings_that_is_no_file_is_called_what_it_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    assert one_line(f"--config={tmp_path / 'pipe'}").endswith("pipe is no regular file")
    assert one_line(f"--config={tmp_path / 'loop'}").endswith("loop cannot be read: Too many levels of symbolic links")
    with pytest.raises(SettingsError, match=r"^--api_key_file: .* is a folder, not a file"):
        check_files(load(f"--api_key_file={tmp_path}"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"port: 1\nmodel: gr\xfc\xdfe\n", ":2: is not UTF-8 (byte 0xFC); write the file in UTF-8"),
        (b"\xef\xbb\xbfa: 1\nb: \xe4 ", ":2: is not UTF-8 (byte 0xE4)"),
        (b"\xff", ":1: is not UTF-8 (byte 0xFF); write the file in UTF-8"),
        (
            "port: 1\r\nmodel: ä\x00\r\n".encode(),
            ":2: holds the character U+0000, which YAML does not allow; write the file in",
        ),
        (b"# a\n# b\nmodel: \x1b[0m\n", ":3: holds the character U+001B, which YAML does not allow"),
        (b"\xff\xfep", ": is not UTF-16, as its byte order mark says; write the file in UTF-8"),
    ],
)
def test_a_file_that_is_no_text_in_utf_8(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    assert f"{path}{message}" in one_line(f"--config={path}")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark_is_no_mistake(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes("model: grüße\n".encode(encoding))
    assert load(f"--config={path}").model.model == "grüße"


@pytest.mark.parametrize("name", ["--api_key", "PACKHORSE_API_KEY"])
def test_a_wrong_key_is_not_shown(name: str) -> None:
    line = one_line("--api_key=sesam öffne") if name.startswith("--") else one_line(PACKHORSE_API_KEY="sesam öffne")
    assert name in line
    assert "sesam" not in line


def test_what_kubernetes_puts_into_the_environment_is_no_mistake() -> None:
    settings = load(
        PACKHORSE_SERVICE_HOST="10.0.0.7",
        PACKHORSE_SERVICE_PORT="8000",
        PACKHORSE_SERVICE_PORT_HTTP="8000",
        PACKHORSE_PORT="tcp://10.0.0.7:8000",
        PACKHORSE_PORT_8000_TCP="tcp://10.0.0.7:8000",
        PACKHORSE_PORT_8000_TCP_PROTO="tcp",
        PACKHORSE_PORT_8000_TCP_PORT="8000",
        PACKHORSE_PORT_8000_TCP_ADDR="10.0.0.7",
    )
    assert settings == Settings()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_batchsize: 3", ["c.yaml:1: max_batchsize: unknown setting", "did you mean max_batch_size?"]),
        ("port: 1\nmax_batch_size: 0", ["c.yaml:2: max_batch_size", "a whole number from 1 to 4096"]),
        ("max_batch_size: true", ["c.yaml:1: max_batch_size", "'true'"]),
        ("max_batch_size: [1, 2]", ["max_batch_size", "single value"]),
        ("port: 1\nport: 2", ["c.yaml:2: port", "twice"]),
        ("max-batch-size: 1\nmax_batch_size: 2", ["c.yaml:2", "twice"]),
        ("- 1", ["c.yaml:1", "name: value"]),
        ("a: [", ["c.yaml:", "is not YAML"]),
        ("port: 1\na: *b", ["c.yaml:2: alias *b"]),
        ("[1]: 2", ["c.yaml:1", "name of a setting"]),
        ("\x00", ["c.yaml:1", "U+0000"]),
        ("!!python/object/apply:os.system ['x']", ["c.yaml:1"]),
        ("served_model_name: ['a,b']", ["served_model_name", "comma"]),
        ("tensor_parallel_size: 2", ["c.yaml:1: tensor_parallel_size", "parallelism"]),
        ("pipeline_parallel_size: 4", ["pipeline_parallel_size", "parallelism"]),
        ("tp_size: 2", ["tp_size", "parallelism"]),
        ("extra_model_inputs:\n- name: x\n  shape: [num_tokens]\n  dtype: int32", ["extra_model_inputs", "HTTP"]),
        ("cuda_graph_config:\n  extra_model_inputs: [{name: x}]", ["c.yaml:2: cuda_graph_config.extra_model_inputs"]),
        ('run_dir: "a\\0b"', ["run_dir", "control character"]),
        (f"model: {'x' * 300_000}", ["c.yaml", "limit"]),
        ("[" * 50_000, ["c.yaml:1", "nested deeper than 16"]),
    ],
)
def test_mistakes_in_yaml(tmp_path: Path, text: str, words: list[str]) -> None:
    line = one_line(f"--config={write(tmp_path, text)}")
    for word in words:
        assert word in line


def test_yaml_takes_scalars_as_written(tmp_path: Path) -> None:
    text = """
        revision: 0123456       # octal to YAML 1.1
        served_model_name: [on, 12:30]
        devices: 0
        normalize: yes
        trust_remote_code: true
        max-queue-delay: 1e-4
        max_body_bytes: 4MiB
        uds: ~
        max_seq_len: null
        pipeline_parallel_size: 1
        extra_model_inputs: []
        cuda_graph_config: {batch_sizes: [1, 2], enable_padding: true}
    """
    settings = load(f"--config={write(tmp_path, text)}")
    assert settings.model == ModelSettings(
        revision="0123456",
        served_model_name=("on", "12:30"),
        normalize=True,
        trust_remote_code=True,
        cuda_graph_config={"batch_sizes": [1, 2], "enable_padding": True},
    )
    assert settings.workers.devices == ("0",)
    assert settings.batching.max_queue_delay == 0.0001
    assert settings.http.max_body_bytes == 4 << 20


@pytest.mark.parametrize("text", ["", "# nothing\n", "~", "---\n"])
def test_an_empty_yaml_file_sets_nothing(tmp_path: Path, text: str) -> None:
    assert load(f"--config={write(tmp_path, text)}") == Settings()


@given(content=st.binary(max_size=200) | st.text(alphabet="ab:-[]{}\n \"'*&!|>%@,1", max_size=60).map(str.encode))
def test_no_yaml_file_crashes_the_loader(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(content)
    with contextlib.suppress(SettingsError):
        assert isinstance(load(f"--config={path}"), Settings)


# ---- files ----


def test_check_files(tmp_path: Path) -> None:
    good = write(tmp_path, "k1\nk2\n", "keys")
    check_files(load(f"--api_key_file={good}"))
    for name, argv in {
        "--api_key_file": ["--api_key_file=/no/such"],
        "holds no key": [f"--api_key_file={write(tmp_path, ' ', 'empty')}"],
        "--ssl_certfile": [f"--ssl_certfile={tmp_path}"],
        "cannot be used": [f"--ssl_certfile={good}"],
    }.items():
        with pytest.raises(SettingsError, match=name):
            check_files(load(*argv))


# ---- the environment of child processes ----

WORDS = st.text(
    st.characters(min_codepoint=33, max_codepoint=0x2FFF, exclude_characters=",\x7f", exclude_categories=["C", "Z"])
)
WORD = WORDS.filter(bool)
SECONDS = st.floats(1e-6, 3600)


def words(most: int = 3) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(WORD, max_size=most).map(tuple)


TREES = st.builds(
    Settings,
    model=st.builds(
        ModelSettings,
        model=st.none() | WORD,
        served_model_name=words(),
        revision=WORD,
        dtype=st.sampled_from(["auto", "float32", "bfloat16", "float16"]),
        max_seq_len=st.none() | st.integers(1, 1 << 22),
        pooling=st.sampled_from([None, "cls", "lasttoken"]),
        normalize=st.none() | st.booleans(),
        matryoshka_dimensions=st.sampled_from([(), ("any",), ("64", "128")]),
        trust_remote_code=st.booleans(),
        cuda_graph_config=st.none() | st.fixed_dictionaries({"batch_sizes": st.lists(st.integers(1, 99), min_size=1)}),
    ),
    batching=st.builds(
        BatchingSettings,
        max_batch_size=st.integers(1, 4096),
        max_num_tokens=st.just("auto") | st.integers(1, 1 << 22),
        max_queue_delay=st.just("auto") | st.floats(0, 60),
    ),
    http=st.builds(
        HttpSettings,
        port=st.integers(1, 65_535),
        max_body_bytes=st.integers(1, 1 << 30),
        request_timeout=SECONDS,
        api_key=st.lists(st.text("abcXYZ019-_=%'\"$", min_size=1), max_size=3).map(tuple),
        root_path=st.sampled_from(["", "/a", "/a/b"]),
        cors_allow_origin=st.sampled_from([(), ("*",), ("http://a", "https://b:1")]),
    ),
    workers=st.builds(WorkerSettings, devices=st.sampled_from([("auto",), ("cpu",), ("0", "GPU-1a")])),
    process=st.builds(ProcessSettings, run_dir=st.none() | WORD, shutdown_grace=SECONDS, log_format=st.just("json")),
)


@given(settings=TREES)
def test_the_environment_carries_the_very_same_tree(settings: Settings) -> None:
    variables = to_environment(settings)
    assert all(name.startswith("PACKHORSE_") and isinstance(text, str) for name, text in variables.items())
    assert load_settings(argparse.Namespace(), variables) == settings


@given(settings=TREES)
def test_the_settings_file_carries_the_tree_without_keys(tmp_path_factory: pytest.TempPathFactory, settings: Settings) -> None:
    path = tmp_path_factory.getbasetemp() / "settings.json"
    path.write_bytes(encode_settings(settings))
    assert decode_settings(path) == settings.without_secrets()
    assert decode_settings(path).http.api_key == ()


def test_defaults_leave_the_environment_empty() -> None:
    assert to_environment(Settings()) == {}


def test_a_graph_config_that_cannot_travel_is_refused() -> None:
    model = ModelSettings(cuda_graph_config={"batch_sizes": list(range(20_000))})
    with pytest.raises(SettingsError, match="cuda_graph_config"):
        to_environment(Settings(model=model))


def test_without_ours_keeps_everything_else() -> None:
    assert without_ours({"PACKHORSE_PORT": "1", "PATH": "/bin", "MY_PACKHORSE_X": "2"}) == {
        "PATH": "/bin",
        "MY_PACKHORSE_X": "2",
    }


# ---- help ----


def test_help_names_every_setting_within_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parser = Parser(prog="packhorse embeddings", usage="%(prog)s [MODEL] [flags]")
    add_settings(parser)
    text = parser.format_help()
    assert max(map(len, text.splitlines())) <= 80
    for flag in flags().values():
        if not flag.yaml_only:
            assert f"--{flag.name}" in text
            assert flag.variable in text
    for heading in ("Model:", "Batching:", "HTTP:", "Workers:", "Processes and logs:", "--config", "--triton_config"):
        assert heading in text
    assert "(default 32; PACKHORSE_MAX_BATCH_SIZE)" in " ".join(text.split())
    assert "--max-batch-size" not in text


@pytest.mark.parametrize("flag", flags().values(), ids=lambda flag: flag.name)
def test_every_setting_says_what_it_takes(flag: object) -> None:
    assert allowed(flag)  # type: ignore[arg-type]


# ---- workers of other machines ----


@pytest.mark.parametrize(
    "address",
    ["tcp://0.0.0.0:5600", "tcp://*:1", "tcp://gpu-server.example:65535", "tcp://[::1]:5600", "tcp://[fe80::1%eth0]:5"],
)
def test_addresses_of_a_broker(address: str) -> None:
    assert load(f"--broker={address}", "--curve_keys=k").process.broker == address


@pytest.mark.parametrize(
    "address",
    [
        *("tcp://", "tcp://a", "tcp://a:", "tcp://a:0", "tcp://a:65536", "tcp://a:*", "tcp://:5600", "tcp://a:5600/", "a:5600"),
        *("tcp://a;b:5600", "tcp://a b:5600", "tcp://::1:5600", "tcp://[]:5600", "udp://a:5600", "TCP://a:5600", "ipc:///x"),
    ],
)
def test_what_is_no_address_of_a_broker(address: str) -> None:
    assert one_line(f"--broker={address}", "--curve_keys=k").endswith(f"{address!r} is not allowed; give tcp://HOST:PORT")


def test_broker_and_keys_belong_together() -> None:
    assert "--broker: tcp:// needs --curve_keys" in one_line("--broker=tcp://a:5600")
    assert "PACKHORSE_BROKER: tcp:// needs --curve_keys" in one_line(PACKHORSE_BROKER="tcp://a:5600")
    assert "--curve_keys: needs --broker" in one_line("--curve_keys=k")


def test_the_brokers_keys_are_checked_at_the_start_of_a_server(tmp_path: Path) -> None:
    make_keys(tmp_path / "k", ["gpu1"])
    settings = load("--broker=tcp://127.0.0.1:5600", f"--curve_keys={tmp_path / 'k' / 'broker'}")
    check_files(settings)
    (tmp_path / "k" / "broker" / "broker.key_secret").chmod(0o640)
    with pytest.raises(SettingsError, match=r"curve_keys: .*broker\.key_secret has mode 0640"):
        check_files(settings)


def test_a_service_called_packhorse_broker_is_no_mistake() -> None:
    """Kubernetes puts these into every pod beside it."""
    environ = {
        "PACKHORSE_BROKER_SERVICE_HOST": "10.0.0.1",
        "PACKHORSE_BROKER_SERVICE_PORT": "5600",
        "PACKHORSE_BROKER_SERVICE_PORT_WORKERS": "5600",
        "PACKHORSE_BROKER_PORT": "tcp://10.0.0.1:5600",
        "PACKHORSE_BROKER_PORT_5600_TCP": "tcp://10.0.0.1:5600",
        "PACKHORSE_BROKER_PORT_5600_TCP_ADDR": "10.0.0.1",
    }
    assert load(**environ) == Settings()
    assert "unknown setting" in one_line(PACKHORSE_BROKER_PORT="5600")
