"""The command line: what it prints, where, and how it ends; flags are read off the settings classes. ``generate`` has
its own file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.testing import CliRunner

import snapstream
from snapstream.assets import TINY_MODEL
from snapstream.cli import main
from snapstream.cli.flags import Flags, as_command
from snapstream.config import EngineOptions, KVBudget
from snapstream.config.engine import setting
from snapstream.models.registry import read_model_config
from snapstream.models.sharding import weight_bytes
from snapstream.plan.memory import engine_memory
from snapstream.startup.measure import HostMemory, measure_machine
from snapstream.startup.resolve import resolve

SOURCE = Path(snapstream.__file__).parents[1]

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return file


def assert_refused(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints one line, an error with these words, and nothing else."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    for word in words:
        assert word in captured.err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"snapstream {snapstream.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_the_commands(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    out = capsys.readouterr().out
    for command in ("plan", "generate", "serve", "compress", "demo"):
        assert f"\n  {command} " in out


@pytest.mark.parametrize("command", ["plan", "generate", "serve", "compress"])
def test_command_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"snapstream {command} " in capsys.readouterr().out.split("Examples:")[1]


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        (["-ngl", "99"], "--device cuda"),
        (["-t", "4"], "OMP_NUM_THREADS=N"),
        (["--batch-size", "512"], "--chunk-len N"),
        (["--trust-remote-code"], "no code"),
        (["--gpu-memory-utilization", "0.9"], "--max-rows auto"),
        (["--enable-prefix-caching"], "--prefix-store auto"),
        (["--quantization=fp8"], "--weights int8 or int4"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "generate"])
def test_flags_of_other_engines_name_ours(
    command: str, flags: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(TINY_MODEL), *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: No such option: {flags[0].split('=')[0]}; ") and remedy in error
    # A remedy that is no flag would send people on to the next error.
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in remedy.split() if word.startswith("--"))


@pytest.mark.parametrize(
    ("command", "flags", "error"),
    [
        ("serve", ["--max-num-seqs", "0"], "max_rows is 0"),
        ("serve", ["-np", "0"], "max_rows is 0"),
        ("serve", ["--tensor-parallel-size", "0"], "tensor_parallel is 0"),
        ("serve", ["--kv-cache-dtype", "int5"], "'int5' is not one of"),
        ("generate", ["hi", "-c", "0"], "max_model_len is 0"),
        ("generate", ["hi", "-n", "0"], "max_tokens is 0"),
        ("generate", ["hi", "--temp", "-1"], "temperature is -1"),
        ("chat", ["-c", "0"], "max_model_len is 0"),
        ("serve", ["--stream-interval", "10"], "No such option: --stream-interval; use --stream-interval-ms"),
        ("serve", ["--stream-interval-ms", "-1"], "--stream-interval-ms is -1"),
        ("serve", ["-c", "512"], "No such option: -c; use --max-model-len N, tokens of one request"),
    ],
)
def test_flags_of_other_engines_that_mean_the_same(
    command: str, flags: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each arrives: its value is refused by the name of the setting."""
    assert main([command, str(TINY_MODEL), *flags]) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--model", "nowhere"], ["-m", "nowhere"], ["--model=nowhere"]])
@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
def test_the_model_may_be_a_flag(command: str, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Before or behind other flags, also those whose value looks like it."""
    prompt = ["the prompt"] if command == "generate" else []
    assert main([command, "--budget", "64", *prompt, *flags]) in (1, 2)
    assert "nowhere does not exist" in capsys.readouterr().err


def test_the_model_flag_is_read_as_a_flag_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(TINY_MODEL), "--system", "-m", "--file", "nowhere.txt"]) == 2
    assert "nowhere.txt" in capsys.readouterr().err
    assert main(["generate", "--", "nowhere", "-m"]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err
    assert main(["generate", "hi", "-m"]) == 2
    assert "-m needs a model" in capsys.readouterr().err
    assert main(["serve", "-m", "a", "--model", "b"]) == 2
    assert "two are given" in capsys.readouterr().err
    assert main(["compress", "--model", "x"]) == 2
    assert "No such option: --model" in capsys.readouterr().err


def test_plan_json_from_file_and_folder(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--budget", "512", "--budget", "1024", "--dtype", "float32", "--memory", "1GiB", "--json"]
    assert main(["plan", str(config_file), *options]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["token_bytes"] == 2 * 2 * 2 * 16 * 4
    assert plan["prompt_len"] == 4096
    assert plan["memory_bytes"] == 2**30
    assert plan["prefill"]["total_bytes"] == sum(
        plan["prefill"][part] for part in ("hidden_bytes", "staging_bytes", "transient_bytes", "query_bytes")
    )
    assert [(row["name"], row["row_bytes"]) for row in plan["rows"]] == [
        ("full", 4096 * 512),
        ("512", 512 * 512),
        ("1024", 1024 * 512),
    ]
    assert main(["plan", str(config_file.parent), *options]) == 0
    assert json.loads(capsys.readouterr().out) == plan


def test_plan_for_a_cpu_counts_what_its_engine_takes(
    config_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint in bf16 keeps its width there, and so do rows, while float32 is computed in."""
    config_file.write_text(json.dumps(CONFIG | {"dtype": "bfloat16"}))
    monkeypatch.setattr("snapstream.startup.measure.host_memory", lambda: HostMemory(2**30, 64 * 2**20))
    assert main(["plan", str(config_file), "--budget", "512", "--device", "cpu", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    model = read_model_config(config_file)
    config = resolve(model, EngineOptions(budget=512, max_rows="auto"), measure_machine("cpu"))
    memory = engine_memory(model, config)
    assert (plan["dtype"], plan["kv_dtype"], config.kv_dtype) == ("float32", "bfloat16", "bfloat16")
    assert plan["weight_bytes"] == memory.weight_bytes < 0.51 * weight_bytes(model, "float32")
    row = plan["rows"][1]
    assert row["row_bytes"] == memory.row_bytes == 512 * plan["token_bytes"] == 512 * 2 * 2 * 2 * 16 * 2
    assert min(row["max_rows"], 256) == config.max_rows > 1
    assert plan["memory_bytes"] == 64 * 2**20


def test_plan_counts_a_draft(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", str(config_file), "--budget", "512", "--memory", "8GiB"]
    assert main([*arguments, "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert main([*arguments, "--json", "--draft", str(config_file), "--draft-context-len", "512"]) == 0
    beside = json.loads(capsys.readouterr().out)
    assert beside["draft"]["weight_bytes"] == alone["weight_bytes"] and alone["draft"] is None
    assert beside["rows"][1]["max_rows"] < alone["rows"][1]["max_rows"]
    assert main([*arguments, "--draft", str(config_file)]) == 0
    assert "while it scores a text" in capsys.readouterr().out
    assert main([*arguments, "--draft", str(config_file), "--draft-context-len", "0"]) == 2
    assert "context_len is 0" in capsys.readouterr().err
    assert main([*arguments, "--draft-context-len", "512"]) == 2
    assert "there is no draft" in capsys.readouterr().err


def test_plan_cuts_long_prompts_shorter_unless_told(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    big = CONFIG | {"hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32, "head_dim": 128,
                    "num_hidden_layers": 32, "max_position_embeddings": 131_072}  # fmt: skip
    config_file.write_text(json.dumps(big))
    assert main(["plan", str(config_file)]) == 0
    assert "prefilled in chunks of 512 (short prompts: of 2,048)" in capsys.readouterr().out
    assert main(["plan", str(config_file), "--chunk-len", "1024"]) == 0
    assert "prefilled in chunks of 1,024\n" in capsys.readouterr().out


def test_plan_of_rows_in_fp8(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(config_file), "--kv-dtype", "fp8", "--dtype", "float32", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["kv_dtype"] == "fp8" and plan["token_bytes"] == 2 * 2 * 2 * 16
    assert plan["rows"][0]["row_bytes"] == 4096 * 128 + 2 * 2 * 2 * 4


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_commands_that_store_rows_take_their_dtype(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert "--kv-dtype" in capsys.readouterr().out
    assert main([command, "--kv-dtype", "int5", "somewhere"]) == 2
    assert "'int5' is not one of 'auto', 'float32', 'bfloat16', 'fp8', 'int8', 'int4'" in capsys.readouterr().err


def test_plan_table(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(config_file), "--prompt-len", "2048"]) == 0
    out = capsys.readouterr().out
    assert "2,048 tokens" in out
    for slots in ("full", "1,024", "512", "256", "128"):
        assert [slots] in [line.split()[:1] for line in out.splitlines()]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt-len", "5000"], ["prompt_len is 5000", "4096"]),
        (["--prompt-len", "many"], ["--prompt-len", "'many' is not a whole number"]),
        (["--budget", "7"], ["budget of 7", "36"]),
        (["--budget", "1.5"], ["--budget", "'1.5' is not a whole number"]),
        (["--memory", "lots"], ["'lots'", "80GiB"]),
        (["--bandwidth", "-3TB/s"], ["'-3TB/s'", "3.35TB/s"]),
        (["--dtype", "int8"], ["'int8'", "bfloat16"]),
        (["--chunk-len", "some"], ["--chunk-len", "'some'", "'auto'"]),
        (["--chunk-len", "0"], ["chunk_len is 0", ">= 1"]),
        (["--chunk-len", "4097"], ["chunk_len is 4097", "from 1 to 4096"]),
        (["--device", "tpu"], ["device is 'tpu'"]),
        (["--no-such-option"], ["--no-such-option"]),
    ],
)
def test_plan_refuses_in_one_line(
    config_file: Path, options: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(["plan", str(config_file), *options], words, capsys)


@pytest.mark.parametrize(
    ("content", "word"),
    [(None, "does not exist"), ("{", "config.json"), ('{"architectures": ["MambaForCausalLM"]}', "Mamba")],
)
def test_plan_refuses_configs_in_one_line(
    tmp_path: Path, content: str | None, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)
    assert_refused(["plan", str(file)], [word], capsys)


@dataclass(frozen=True, kw_only=True)
class Settings:
    width: int = setting(3, "How wide.")
    kind: Literal["a", "b"] = setting("a", "Which kind.")
    rows: KVBudget | None = setting(
        None, "How many.", metavar="N", flag="--how-many", parse=lambda text: KVBudget.full(int(text))
    )
    hidden: int = 5


def run(*arguments: str, shown: Flags | None = None) -> tuple[Any, str]:
    """What a command with these flags was given, and what it printed."""
    seen: list[Any] = []
    given = shown or Flags()

    def command(name: str, settings: Annotated[Settings, given]) -> None:
        seen.append((name, settings))

    command.__annotations__ = {"name": str, "settings": Annotated[Settings, given], "return": type(None)}
    app = typer.Typer(rich_markup_mode=None)
    app.command()(as_command(command))
    result = CliRunner().invoke(app, arguments)
    return (seen[0] if seen else None), result.output


def test_defaults_are_the_classes() -> None:
    assert run("x")[0] == ("x", Settings())


def test_every_field_with_words_has_a_flag() -> None:
    given, _ = run("x", "--width", "7", "--kind", "b", "--how-many", "9")
    assert given == ("x", Settings(width=7, kind="b", rows=KVBudget.full(9)))
    _, text = run("--help")
    for words in ("--width N", "How wide.  [default: 3]", "--kind <a|b>", "--how-many N"):
        assert words in text
    assert "--hidden" not in text


def test_a_command_may_have_defaults_and_words_of_its_own() -> None:
    shown = Flags(defaults={"width": 4}, words={"width": "Rather wide."}, without=("kind",))
    assert run("x", shown=shown)[0] == ("x", Settings(width=4))
    _, text = run("--help", shown=shown)
    assert "Rather wide.  [default: 4]" in text and "--kind" not in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--width", "wide"), "'wide' is not a whole number"),
        (("--kind", "c"), "'c' is not one of 'a', 'b'"),
        (("--how-many", "0"), "max_model_len is 0; it must be a whole number >= 1"),
    ],
)
def test_a_wrong_value_is_named(arguments: tuple[str, ...], words: str) -> None:
    given, text = run("x", *arguments)
    assert given is None and words in " ".join(text.split())


@pytest.mark.parametrize("command", ["generate", "serve", "plan"])
def test_a_selector_is_chosen_by_name(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert "--selector snapkv|hops|diverse" in capsys.readouterr().out
    assert main([command, "--selector", "best", "somewhere"]) == 2
    assert "selector is 'best'; it must be one of snapkv, hops, diverse" in capsys.readouterr().err
