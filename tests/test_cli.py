"""The command line: what it prints, and what it refuses."""

import importlib.metadata
import subprocess
import sys

import pytest
import torch

import ckpt_ops
from ckpt_ops.cli import main


def _error(capsys, *argv):
    """What the command line says when it refuses `argv`."""
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_info_names_every_backend_and_what_it_runs_on(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    for fact in (torch.__version__, torch.backends.cpu.get_cpu_capability(), *ckpt_ops.backends()):
        assert fact in out
    assert out.count("ready") == list(ckpt_ops.backends().values()).count("ready")


def test_info_gives_the_reason_of_a_backend_that_is_not_ready(capsys, monkeypatch):
    monkeypatch.setattr("ckpt_ops.cli.backends", lambda: {"cpu": "the compiler [gcc] is missing"})
    main(["info"])
    assert "the compiler [gcc] is missing" in capsys.readouterr().out


def test_info_shows_the_build_of_the_extension(capsys):
    extension = ckpt_ops.native.extension()
    if extension is None:
        pytest.skip(f"no extension here: {ckpt_ops.native.why_not()}")
    main(["info"])
    out = capsys.readouterr().out
    assert extension.build_info()["compiler"] in out
    assert extension.build_info()["isa"] in out


def test_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "ckpt_ops", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"ckpt_ops {ckpt_ops.__version__}"


def test_console_command_is_main():
    scripts = importlib.metadata.entry_points(group="console_scripts", name="ckpt-ops")
    if not scripts:
        pytest.skip("the package is not installed")
    assert next(iter(scripts)).load() is main


@pytest.mark.parametrize("argv", [["--help"], ["info", "--help"], ["demo", "--help"], ["verify", "--help"]])
def test_help(argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 0
    assert "usage: ckpt-ops" in capsys.readouterr().out


def test_no_command_is_refused(capsys):
    assert "{info,demo,verify}" in _error(capsys)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--device", "toaster"], "'toaster' is no device that torch knows"),
        (["--device", "meta"], "runs on cpu and cuda"),
        (["--device", "cuda:99"], "this torch sees"),
        (["--text", "no/such/path"], "no/such/path: no such file or folder"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--variants", "theirs"], "invalid choice: 'theirs'"),
        (["--dropout", "1"], "--dropout must be at least 0 and below 1, got 1.0"),
        (["--dropout", "nan"], "--dropout must be at least 0"),
        (["--heads", "3", "--hidden", "64"], "--heads must divide --hidden, got 3 and 64"),
        (["--heads", "1", "--hidden", "512"], "a head has at most 256 columns, got 512"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--layers", "two"], "invalid int value: 'two'"),
        (["--seed", str(2**64)], "--seed must fit in 63 bits"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(argv, message, capsys, monkeypatch):
    monkeypatch.setattr("ckpt_ops.demo.run.run", lambda settings: pytest.fail("the demo started"))
    assert message in _error(capsys, "demo", *argv)


def test_out_must_not_be_a_file(tmp_path, capsys):
    file = tmp_path / "taken"
    file.write_text("")
    assert "is not a folder" in _error(capsys, "demo", "--out", str(file))


def test_a_text_shorter_than_a_sequence_is_refused(tmp_path, capsys):
    (tmp_path / "short.txt").write_text("0123456789")
    message = _error(capsys, "demo", "--text", str(tmp_path / "short.txt"), "--context", "10", "--out", str(tmp_path / "out"))
    assert "the text has 10 bytes; --context 10 needs more than 10" in message


@pytest.mark.parametrize(("package", "command"), [("rich", "info"), ("rich", "demo"), ("matplotlib", "demo")])
def test_missing_extras_are_named_in_one_line(package, command, capsys, monkeypatch):
    loaded = [name for name in sys.modules if name == package or name.startswith(f"{package}.")]
    for name in {*loaded, package}:
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("run", "report", "picture"):  # imported again, as in a fresh process
        monkeypatch.delitem(sys.modules, f"ckpt_ops.demo.{name}", raising=False)
    with pytest.raises(SystemExit) as exit_:
        main([command])
    assert exit_.value.code == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert f"{package} is not installed" in message
    assert "pip install 'ckpt_ops[demo]'" in message
