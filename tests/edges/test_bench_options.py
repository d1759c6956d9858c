"""The command line of ``packhorse bench``: which server it means, and mistakes that are told in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from packhorse import cli
from packhorse.bench.options import Options, read_options
from packhorse_shared.run_dir import RunDir, RunningServer


def test_defaults() -> None:
    assert read_options([], {}) == Options(urls=("http://127.0.0.1:8000",), duration=10.0)
    of_kubernetes = {"PACKHORSE_PORT": "tcp://10.0.0.7:8000"}
    assert read_options([], of_kubernetes).urls == ("http://127.0.0.1:8000",)


@pytest.mark.parametrize(
    ("word", "url"),
    [
        ("http://h:1/", "http://h:1"),
        ("http://h:1/v1", "http://h:1"),
        ("https://h/root/v1/", "https://h/root"),
        ("unix:/run/v1", "unix:/run/v1"),
    ],
)
def test_addresses_may_be_base_urls_of_clients(word: str, url: str) -> None:
    assert read_options([word], {}).urls == (url,)


def test_flags_with_dashes_and_a_second_server() -> None:
    options = read_options(["http://a:1", "--against=http://b:2", "--encoding-format=base64", "--requests", "7"], {})
    assert options.urls == ("http://a:1", "http://b:2")
    assert (options.encoding_format, options.requests, options.duration, options.rounds) == ("base64", 7, None, 5)


def test_the_run_directory_tells_the_address(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "r")
    run_dir.prepare()
    lock = run_dir.lock()
    try:
        run_dir.write_server(RunningServer(url="http://127.0.0.1:4711", supervisor_url=None))
        assert read_options([f"--run_dir={run_dir.path}"], {}).urls == ("http://127.0.0.1:4711",)
        assert read_options([], {"PACKHORSE_RUN_DIR": str(run_dir.path)}).urls == ("http://127.0.0.1:4711",)
    finally:
        os.close(lock)


def test_the_key_comes_from_a_flag_the_environment_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first\nsecond\n")
    assert read_options(["--api_key=mine"], {"PACKHORSE_API_KEY": "theirs"}).api_key == "mine"
    assert read_options([], {"PACKHORSE_API_KEY": "one,two"}).api_key == "one"
    assert read_options([f"--api_key_file={file}"], {}).api_key == "first"
    assert read_options([], {}).api_key is None


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["127.0.0.1:8000"], "is no address; give http://HOST:PORT"),
        (["http://h:99999"], "is no address"),
        (["http://h", "--port=1"], "--port: the server is named already, by http://h"),
        (["--concurrency=4", "--rate=3"], "not allowed with argument"),
        (["--duration=4", "--requests=3"], "not allowed with argument"),
        (["--connections=4"], "only for the open loop of --rate"),
        (["--rounds=4"], "only with --against"),
        (["--endpoint=rerank", "--encoding_format=float"], "only for embeddings, not for rerank"),
        (["--rate=nan"], "'nan' is not allowed; give a number from 0.01 to 100000"),
        (["--inputs=0"], "'0' is not allowed; give a whole number from 1 to 100000"),
        (["--plot=a.bmp"], "end it with .png, .svg or .pdf"),
        (["--plot=/no/such/a.png"], "--plot: there is no folder /no/such"),
        (["--json=/no/such/a.json"], "--json: there is no folder /no/such"),
        (["--concurency=3"], "did you mean --concurrency?"),
        (["--api_key=a b"], "visible ASCII characters"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", *argv])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1
