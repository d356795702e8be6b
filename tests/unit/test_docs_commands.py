"""The commands that the documents show, run as they stand where that takes no GPU and no search."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from making import CHAIN, H200, candidates, decode_of, prefill_of, winner_of
from typer.testing import CliRunner

from autoflash.cli import app
from autoflash.gpu import known
from autoflash.records import Trial
from autoflash.store import Store

ROOT = Path(__file__).parents[2]
OWN_TEST = "adding-a-family.md"  # has a test that follows it
DOCUMENTS = sorted(
    path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")) if path.name != OWN_TEST
)
# Others search, time, compile or ask a cluster: that they exist, with these options, is tested too.
RUN = ("query", "explain", "report", "render", "space", "workload", "schema", "export", "db")
A100 = known("NVIDIA_A100_SXM4_80GB")
LLAMA = {
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
GEMMA = LLAMA | {"model_type": "gemma3_text", "head_dim": 128, "sliding_window": 1024}


def shown() -> list[str]:
    """Every such command once, without comments and redirections."""
    lines = [
        line.split(">")[0].strip()
        for path in DOCUMENTS
        for line in re.findall(r"^    (autoflash .*)$", path.read_text(), flags=re.MULTILINE)
    ]
    return [line for line in dict.fromkeys(lines) if line.split()[1] in RUN]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """The databases, workloads and configs that the documents speak of."""
    folder = tmp_path_factory.mktemp("documents")
    llama = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    problems = [
        decode_of(batch=64, seqlen_k=1024, page_size=16, **llama),
        *(prefill_of(batch=b, seqlen_q=8192, seqlen_k=8192, **llama) for b in (1, 2)),
        *(prefill_of(batch=1, seqlen_q=8192, seqlen_k=8192, layout="bhsd", **llama),),
        *(replace(decode_of(batch=b, seqlen_k=1024, **llama), dtype="fp16") for b in (1, 8)),
    ]
    problems = [replace(p, kv_dtype="", out_dtype="") for p in problems]
    problems += [
        replace(problems[1], causal=causal, head_dim=64, head_dim_v=0) for causal in (0, 1)
    ]
    older = replace(CHAIN, triton="3.5.1")
    runs = [(H200, CHAIN)] * 7 + [(H200, older), (A100, CHAIN)]
    for name, of_file in (
        ("tune.db", runs[:1]),
        ("fleet.db", runs),
        ("h200.db", runs[:1]),
        ("a100.db", runs[-1:]),
    ):
        with Store.open(folder / name) as store:
            for gpu, chain in of_file:
                told = {"seed": 0, "effort": "quick", "budget_s": None, "argv": ["tune"]}
                run = store.start_run(gpu, chain, **told, protocol="graph")
                for problem in problems:
                    store.record_decision(run, winner_of(problem, gpu=gpu).decision)
                right, wrong = candidates(problems[0], gpu)[:2]
                for config, came in (
                    (wrong, {"status": "correctness", "error": "off by 3"}),
                    (right, {"status": "correct", "regime": "graph", "median_us": 10.0}),
                ):
                    trial = Trial(problems[0], config, "d", stage="screen", **came)
                    store.record_trial(run, trial)
    for name, config in (("Meta-Llama-3-8B", LLAMA), ("gemma-3-27b-it", GEMMA)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    readme = (ROOT / "README.md").read_text()
    (workload,) = re.findall(r"```yaml\n(.*?)```", readme, flags=re.DOTALL)
    (folder / "llama.yaml").write_text(workload)
    shutil.copytree(ROOT / "benchmarks" / "results", folder / "benchmarks" / "results")
    shutil.copytree(ROOT / "examples", folder / "examples")
    return folder


@pytest.mark.parametrize("line", shown())
def test_a_command_that_is_shown_runs(files, monkeypatch, line):
    monkeypatch.chdir(files)
    monkeypatch.setenv("AUTOFLASH_DB", str(files / "tune.db"))
    words = shlex.split(line, comments=True)[1:]
    result = CliRunner().invoke(app, words)
    assert result.exception is None, f"{result.exception}\n{result.stderr}"
    written = words[words.index("-o") + 1] if "-o" in words else None
    assert result.stdout if written is None else (files / written).exists()


def shown_benchmarks() -> list[str]:
    """Every call of a script of benchmarks/ once, on a line of its own or within one."""
    pattern = r"(?:^    |`)python (benchmarks/[^`\n#>]*)"
    found = [
        line.strip()
        for path in DOCUMENTS
        for line in re.findall(pattern, path.read_text(), flags=re.MULTILINE)
    ]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("line", shown_benchmarks())
def test_a_benchmark_that_is_shown_has_these_options(line):
    script, *words = shlex.split(line)
    # what stands before --help is parsed: what is chosen by name is there, with options of its own
    asked = [sys.executable, script, *words, "--help"]
    told = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr
    options = {word.split("=")[0] for word in words if word.startswith("--")}
    assert options <= set(re.findall(r"--[a-z][a-z0-9-]*", told.stdout))
    workload = words[words.index("--workload") + 1] if "--workload" in words else script
    assert (ROOT / workload).is_file()


SHOWN_OUTPUT = re.findall(
    r"^    \$ autoflash ((?:query|export) .*)\n((?:    .*\n)+)",
    (ROOT / "README.md").read_text(),
    flags=re.MULTILINE,
)


@pytest.mark.parametrize(("line", "shown"), SHOWN_OUTPUT, ids=["query", "export"])
def test_output_that_the_readme_shows_is_printed_in_these_words(line, shown, tmp_path, monkeypatch):
    """Of the shipped winners, in a terminal; its numbers are those of the day."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOFLASH_DB", str(tmp_path / "none.db"))
    monkeypatch.setenv("COLUMNS", "96")
    for module in ("table", "query"):
        there = sys.modules[f"autoflash.cli.{module}"]  # a command has its module's name
        monkeypatch.setattr(there, "on_terminal", lambda: True)
    result = CliRunner().invoke(app, shlex.split(line))
    printed = result.stderr + result.stdout
    assert result.exit_code == 0, printed

    def words(text: str) -> set[str]:
        return {word for word in text.split() if not re.search(r"\d", word)} - {"..."}

    assert words(shown) <= words(printed)
    # a problem is shown by a name that a row of the output has
    rows = shown.partition("─\n")[2].splitlines()
    assert rows and all(row.split("  ")[2] in printed for row in rows if row.strip() != "...")
