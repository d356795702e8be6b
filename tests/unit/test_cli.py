"""The command line: what it imports, what it prints, and how it ends."""

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from making import decode_of, prefill_of, winner_of

from autoflash import __version__, cli
from autoflash.busy import Shares
from autoflash.cli.tune import budget_seconds
from autoflash.effort import EFFORTS
from autoflash.errors import BudgetError, StoreError, WorkloadError
from autoflash.runtime.problem import Problem, ProblemError
from autoflash.store import Store
from autoflash.tune import TuneResult

HEAVY = (
    "torch",
    "triton",
    "numpy",
    "pydantic",
    "sqlite3",
    "sqlite_utils",
    "jinja2",
    "yaml",
    "rich",
)
RUN = [sys.executable, "-c", "from autoflash.cli import main; main()"]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit status of `autoflash` with these arguments, in this process."""
    monkeypatch.setattr(sys, "argv", ["autoflash", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code or 0


def test_help_imports_nothing_heavier_than_typer():
    script = (
        "import sys, contextlib\n"
        "from autoflash.cli import main\n"
        "with contextlib.suppress(SystemExit):\n"
        "    sys.argv[1:] = ['--help']\n"
        "    main()\n"
        f"print('HEAVY', [name for name in {HEAVY} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "tune" in done.stdout
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_help_answers_within_the_time_of_a_blink():
    def seconds() -> float:
        """Of the processor: the wall clock also counts what other processes take."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*RUN, "--help"], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(7)) < 0.3


def test_version_is_that_of_the_package(monkeypatch, capsys):
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"autoflash {__version__}\n"


@pytest.mark.parametrize(
    ("error", "status", "lines"),
    [
        (WorkloadError("a.yaml: x: one\na.yaml: y: two"), 1, ["a.yaml: x: one", "a.yaml: y: two"]),
        (ProblemError("head_dim 3 is not allowed"), 1, ["head_dim 3 is not allowed"]),
        (BudgetError("the budget is spent"), 3, ["the budget is spent"]),
    ],
)
def test_a_users_mistake_is_printed_by_line_and_ends_with_its_status(
    monkeypatch, capsys, error, status, lines
):
    def fail() -> None:
        raise error

    monkeypatch.setattr("autoflash.workload.workload_schema", fail)
    assert run(monkeypatch, "schema") == status
    out, err = capsys.readouterr()
    assert (out, err.splitlines()) == ("", [f"error: {line}" for line in lines])


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("autoflash.workload.workload_schema", lambda: 1 / 0)
    monkeypatch.setattr(sys, "argv", ["autoflash", "schema"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_ctrl_c_ends_with_130(monkeypatch):
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("autoflash.workload.workload_schema", interrupt)
    assert run(monkeypatch, "schema") == 130


@pytest.mark.parametrize("argument", ["schema", "--version"], ids=["much", "little"])
def test_a_reader_that_leaves_early_is_no_error(argument):
    buffered = {name: each for name, each in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [*RUN, argument], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.wait()


@pytest.mark.parametrize(
    "arguments",
    [
        ["spaec"],
        ["space"],
        ["space", "w.yaml", "--op", "decode"],
        ["space", "--op", "decode", "--batch", "0"],
        ["space", "--op", "decode", "--batch", "True"],
        ["space", "--op", "decode", "--seqlen-k", "nan"],
        ["space", "--op", "backwards"],
        ["render"],
        ["render", "--op", "prefill", "--variant", "prefill"],
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_2_before_anything_is_done(monkeypatch, capsys, arguments):
    assert run(monkeypatch, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Error: " in err


def test_a_missing_workload_is_one_line(monkeypatch, capsys, tmp_path):
    missing = tmp_path / "none.yaml"
    assert run(monkeypatch, "space", str(missing)) == 1
    assert capsys.readouterr().err == f"error: {missing}: No such file or directory\n"


def test_an_unknown_gpu_is_answered_with_the_known_ones(monkeypatch, capsys):
    assert run(monkeypatch, "space", "--op", "decode", "--gpu", "H200X") == 1
    assert "known are AMD_Instinct_MI300X" in capsys.readouterr().err


def test_the_schema_that_is_printed_is_json(monkeypatch, capsys):
    assert run(monkeypatch, "schema") == 0
    assert json.loads(capsys.readouterr().out)["title"] == "WorkloadFile"


def test_render_prints_the_variant_that_the_switches_name(monkeypatch, capsys):
    from autoflash.problem import Variant
    from autoflash.render import render

    assert run(monkeypatch, "render", "--op", "prefill", "--causal") == 0
    causal = render(Variant(family="prefill", op="prefill", causal=True)).text
    assert capsys.readouterr().out == causal
    assert run(monkeypatch, "render", "--op", "decode", "--paged") == 0
    assert capsys.readouterr().out != causal


def test_render_by_name_gives_the_same_text_as_by_switches(monkeypatch, capsys):
    run(monkeypatch, "render", "--op", "decode", "--paged")
    by_switches = capsys.readouterr().out
    assert run(monkeypatch, "render", "--variant", "decode_paged") == 0
    assert capsys.readouterr().out == by_switches


def test_render_writes_a_file_and_says_where_it_cannot(monkeypatch, capsys, tmp_path):
    written = tmp_path / "kernel.py"
    assert run(monkeypatch, "render", "--op", "prefill", "-o", str(written)) == 0
    assert "def plan(" in written.read_text()
    nowhere = tmp_path / "none" / "kernel.py"
    assert run(monkeypatch, "render", "--op", "prefill", "-o", str(nowhere)) == 1
    assert f"cannot write {nowhere}: No such file" in capsys.readouterr().err


def test_an_unknown_variant_is_answered_with_the_nearest(monkeypatch, capsys):
    assert run(monkeypatch, "render", "--variant", "decode_pagd") == 1
    assert capsys.readouterr().err.endswith("did you mean decode_paged?\n")


def test_a_family_of_another_op_is_refused(monkeypatch, capsys):
    assert run(monkeypatch, "render", "--op", "decode", "--family", "prefill") == 1
    assert capsys.readouterr().err == "error: family prefill: serves prefill, not decode\n"


def test_space_accounts_for_every_config_of_the_family(monkeypatch, capsys):
    from math import prod

    from autoflash.families import FAMILIES

    assert run(monkeypatch, "space", "--op", "decode", "--gpu", "NVIDIA_A10", "--json") == 0
    ((told),) = json.loads(capsys.readouterr().out)
    assert told["gpu"] == "NVIDIA A10"
    assert told["problem"]["seqlen_q"] == 1
    family = told["families"]["decode"]
    size = prod(len(knob.values) for knob in FAMILIES["decode"].knobs)
    assert len(family["candidates"]) + sum(family["refused"].values()) == size
    assert family["candidates"] and family["refused"]


def test_space_of_a_workload_lists_its_problems(monkeypatch, capsys):
    example = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
    assert run(monkeypatch, "space", str(example), "--refused") == 0
    out = capsys.readouterr().out
    assert "decode bf16, batch 2, heads 4/2, head_dim 64, 256 keys, pages of 16, on" in out
    assert "    refused " in out


def test_doctor_names_what_is_there_and_what_its_lack_means(monkeypatch, capsys):
    monkeypatch.setattr("autoflash.gpu.cuda_available", lambda: False)
    assert run(monkeypatch, "doctor", "--json") == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert found["autoflash"]["found"] == __version__
    assert found["gpu"]["missing"].startswith("nothing can be measured")
    assert os.environ["AUTOFLASH_DB"] in found["database"]["found"]


def test_doctor_answers_where_no_folder_can_be_written(monkeypatch, capsys, tmp_path):
    taken = tmp_path / "file"
    taken.write_text("")
    monkeypatch.setenv("AUTOFLASH_CACHE", str(taken / "cache"))
    assert run(monkeypatch, "doctor") == 0
    assert "set AUTOFLASH_CACHE" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        *(["--budget", each] for each in ("0s", "0.0h", "-5m", "nan", "inf", "10", "True", "1e3s")),
        *(["--seed", each] for each in ("-1", "nan", "True", "1.5")),
        ["--gpu", "-1"],
        ["--effort", "some"],
        ["--strategy", "best"],
    ],
    ids=" ".join,
)
def test_numbers_that_would_silently_change_a_search_are_wrong_usage(  # case S12
    monkeypatch, capsys, options
):
    """S12"""
    assert run(monkeypatch, "tune", "none.yaml", *options) == 2
    assert options[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90.0), ("10m", 600.0), ("1h", 3600.0), ("1.5m", 90.0)]
)
def test_a_budget_is_a_number_with_its_unit(text, seconds):
    assert budget_seconds(text) == seconds


def tuned(**changes: object) -> TuneResult:
    """What a search came to: one problem decided, one not."""
    decided = winner_of(prefill_of())
    fields = {
        "gpu": decided.gpu,
        "toolchain": decided.toolchain,
        "db": Path("some.db"),
        "run_id": 1,
        "decisions": (decided.decision,),
        "undecided": ((decode_of(), "every candidate failed"),),
        "trials": 3,
        "reused": 2,
        "seconds": 4.0,
    }
    return TuneResult(**{**fields, **changes})


def test_tune_gives_its_options_to_the_search_and_prints_what_it_came_to(
    monkeypatch, capsys, tmp_path
):
    asked = {}

    def tune(workload, **options):
        asked.update(options, workload=workload)
        return tuned()

    monkeypatch.setattr("autoflash.tune.tune", tune)
    example = str(Path(__file__).parents[2] / "examples" / "quickstart.yaml")
    options = ["--db", str(tmp_path / "a.db"), "--gpu", "1", "--target", "NVIDIA_A10"]
    options += ["--effort", "max", "--budget", "2m", "--seed", "7", "--strategy", "random"]
    options += ["--lock-clocks"]
    assert run(monkeypatch, "tune", example, *options) == 0
    assert asked.pop("workload").name == "quickstart"
    assert asked == {
        "db": tmp_path / "a.db",
        "gpu_index": 1,
        "target": "NVIDIA_A10",
        "effort": "max",
        "budget_s": 120.0,
        "seed": 7,
        "strategy": "random",
        "lock_clocks": True,
        "argv": ["tune", example, *options],
    }
    out, err = capsys.readouterr()
    assert "prefill bf16 causal, batch 1, heads 8/2" in out
    assert "undecided: decode bf16" in err and "every candidate failed" in err


def test_tune_as_json_is_for_scripts(monkeypatch, capsys):
    curves = ((prefill_of(), ((0.25, 12.0), (1.5, 10.0))),)
    result = tuned(busy=Shares(gpus=0.872, processes=0.934), anytime=curves)
    monkeypatch.setattr("autoflash.tune.tune", lambda workload, **options: result)
    example = str(Path(__file__).parents[2] / "examples" / "quickstart.yaml")
    assert run(monkeypatch, "tune", example, "--json") == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert "the GPU was at work for 87 % of the time, its process for 93 %" in err
    assert (told["gpu_busy"], told["process_busy"]) == (0.872, 0.934)
    (curve,) = told["anytime"]
    assert curve["problem"] == told["decisions"][0]["problem"]
    assert curve["curve"] == "0.250:12.000 1.500:10.000"
    assert told["gpu"] == "NVIDIA H200"
    assert told["decisions"][0]["winner_us"] == winner_of(prefill_of()).decision.winner_us
    assert told["undecided"][0]["reason"] == "every candidate failed"


def test_several_gpus_give_a_result_for_each_type(monkeypatch, capsys, tmp_path):
    asked = {}

    def tune_on_chosen(workload, chosen, **options):
        asked.update(options, chosen=chosen)
        return [tuned(run_id=1), tuned(run_id=2, gpu=replace(tuned().gpu, name="NVIDIA A10"))]

    monkeypatch.setattr("autoflash.fleet.tune_on_chosen", tune_on_chosen)
    example = str(Path(__file__).parents[2] / "examples" / "quickstart.yaml")
    options = ["--gpus", "0,1", "--db", str(tmp_path / "a.db"), "--seed", "3"]
    assert run(monkeypatch, "tune", example, *options, "--json") == 0
    assert (asked["chosen"], asked["seed"], asked["db"]) == ("0,1", 3, tmp_path / "a.db")
    told = json.loads(capsys.readouterr().out)["results"]
    assert [(each["gpu"], each["run_id"]) for each in told] == [
        ("NVIDIA H200", 1),
        ("NVIDIA A10", 2),
    ]
    assert run(monkeypatch, "tune", example, *options) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("gpu") and "NVIDIA A10" in rows[-1]


def test_a_dry_run_tells_what_would_be_tried_and_starts_and_writes_nothing(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr("autoflash.tune.tune", lambda *_, **options: pytest.fail("it was started"))
    example = str(Path(__file__).parents[2] / "examples" / "quickstart.yaml")
    options = ["--dry-run", "--target", "NVIDIA_A10", "--db", str(tmp_path / "a.db")]
    assert run(monkeypatch, "tune", example, *options, "--effort", "quick", "--json") == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert {row["gpu"] for row in told["forecast"]} == {"NVIDIA A10"}
    most = EFFORTS["quick"].max_candidates
    assert all(row["tried"] == min(most, row["candidates"]) for row in told["forecast"])
    assert told["seconds"] == pytest.approx(sum(r["seconds"] for r in told["forecast"]), abs=0.5)
    assert (
        err.startswith("notice: nothing was started")
        and "compiling and checking" in err
        and not list(tmp_path.iterdir())
    )
    assert run(monkeypatch, "tune", example, *options) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(told["forecast"]) + 1


def test_a_ray_cluster_is_searched_at_the_address_given(monkeypatch, capsys, tmp_path):
    asked = {}

    def tune_on_ray(workload, address, **options):
        asked.update(options, address=address)
        return [tuned()]

    monkeypatch.setattr("autoflash.cluster.tune_on_ray", tune_on_ray)
    example = str(Path(__file__).parents[2] / "examples" / "quickstart.yaml")
    options = ["--ray", "ray://head:10001", "--db", str(tmp_path / "a.db"), "--effort", "quick"]
    assert run(monkeypatch, "tune", example, *options, "--json") == 0
    assert (asked["address"], asked["effort"]) == ("ray://head:10001", "quick")
    assert len(json.loads(capsys.readouterr().out)["results"]) == 1


@pytest.mark.parametrize(
    "other",
    [["--gpu", "1"], ["--gpus", "all"], ["--target", "x"], ["--dry-run"], ["--lock-clocks"]],
)
def test_a_ray_cluster_is_asked_for_alone(monkeypatch, other):
    assert run(monkeypatch, "tune", "a.yaml", "--ray", "auto", *other) == 2


def test_several_gpus_and_one_gpu_are_not_asked_for_together(monkeypatch):
    example = str(Path(__file__).parents[2] / "examples" / "quickstart.yaml")
    assert run(monkeypatch, "tune", example, "--gpus", "all", "--gpu", "1") == 2
    assert run(monkeypatch, "tune", example, "--gpus", "all", "--target", "NVIDIA_A10") == 2


def test_a_predicted_choice_shows_no_times(monkeypatch, capsys):
    decision = replace(winner_of(prefill_of()).decision, source="predicted")
    result = tuned(decisions=(decision,))
    monkeypatch.setattr("autoflash.tune.tune", lambda workload, **options: result)
    example = str(Path(__file__).parents[2] / "examples" / "quickstart.yaml")
    assert run(monkeypatch, "tune", example, "--json") == 0
    (told,) = json.loads(capsys.readouterr().out)["decisions"]
    assert (told["source"], told["winner_us"], told["default_us"]) == ("predicted", None, None)


@pytest.fixture
def shipped(monkeypatch) -> None:
    """Nothing is shipped: the winners that count are those of the tests."""
    monkeypatch.setattr("autoflash.store.shipped_winners", list)


def database(path: Path, *problems: Problem, **of_decision: object) -> Path:
    """A database with a made-up winner for each problem."""
    winners = [winner_of(problem) for problem in problems]
    with Store.open(path) as store:
        chain = winners[0].toolchain
        how = {"seed": 0, "effort": "quick", "budget_s": None, "argv": [], "protocol": "1"}
        run_id = store.start_run(winners[0].gpu, chain, **how)
        for winner in winners:
            store.add_problem(run_id, winner.decision.problem, winner.weight)
            store.record_decision(run_id, replace(winner.decision, **of_decision))
    return path


@pytest.mark.usefixtures("shipped")
def test_export_joins_databases_and_says_what_serves_each_problem(monkeypatch, capsys, tmp_path):
    first = database(tmp_path / "a.db", prefill_of())
    second = database(tmp_path / "b.db", decode_of())
    module = tmp_path / "attention_dispatch.py"
    both = ["--db", str(first), "--db", str(second)]
    assert run(monkeypatch, "export", *both, "-o", str(module), "--json") == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)
    assert [row["problem"].split()[0] for row in rows] == ["decode", "prefill"]
    assert {(row["gpu"], row["loses_percent"]) for row in rows} == {("NVIDIA H200", 0.0)}
    assert "2 problems served by 2 configs" in err
    compile(module.read_text(), str(module), "exec")
    digest = sha256(module.read_bytes()).hexdigest()
    recorded = "SELECT module_sha256, count(*) FROM exports JOIN exported_problems"
    with Store.open(first) as store:  # the topmost
        assert store.conn.execute(recorded).fetchall() == [(digest, 2)]
    with Store.open(second) as store:
        assert store.conn.execute(recorded).fetchall() == [(None, 0)]


@pytest.mark.usefixtures("shipped")
def test_one_of_a_thing_is_told_without_an_s(monkeypatch, capsys, tmp_path):
    own, module = database(tmp_path / "a.db", prefill_of()), str(tmp_path / "one.py")
    assert run(monkeypatch, "export", "--db", str(own), "-o", module) == 0
    assert f"{module}: 1 problem served by 1 config\n" in capsys.readouterr().err


@pytest.mark.usefixtures("shipped")
def test_an_export_from_a_database_that_nobody_may_write_is_made_and_not_recorded(
    monkeypatch, capsys, tmp_path
):
    measured = database(tmp_path / "a.db", prefill_of())
    module = tmp_path / "attention_dispatch.py"

    def refuse(self, *_):
        raise StoreError(f"{self.path}: attempt to write a readonly database")

    monkeypatch.setattr(Store, "record_export", refuse)
    assert run(monkeypatch, "export", "--db", str(measured), "-o", str(module)) == 0
    assert module.exists()
    assert "not recorded: " in (err := capsys.readouterr().err) and "readonly" in err


@pytest.mark.usefixtures("shipped")
def test_export_takes_what_is_predicted_only_when_it_is_asked_to(monkeypatch, capsys, tmp_path):
    predicted = str(database(tmp_path / "a.db", prefill_of(), source="predicted"))
    module = str(tmp_path / "attention_dispatch.py")
    assert run(monkeypatch, "export", "--db", predicted, "-o", module) == 1
    assert "--allow-predicted" in capsys.readouterr().err
    assert not Path(module).exists()
    assert run(monkeypatch, "export", "--db", predicted, "-o", module, "--allow-predicted") == 0


@pytest.mark.usefixtures("shipped")
def test_export_for_a_gpu_that_was_not_measured_is_an_error(monkeypatch, capsys, tmp_path):
    measured = str(database(tmp_path / "a.db", prefill_of()))
    module = str(tmp_path / "attention_dispatch.py")
    options = ["--db", measured, "-o", module, "--gpu", "NVIDIA_A10"]
    assert run(monkeypatch, "export", *options) == 1
    assert capsys.readouterr().err.startswith("error: nothing to export")


@pytest.mark.usefixtures("shipped")
def test_export_without_databases_says_that_nothing_is_stored(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("AUTOFLASH_DB", str(tmp_path / "none.db"))
    assert run(monkeypatch, "export", "-o", str(tmp_path / "a.py")) == 1
    assert capsys.readouterr().err == "error: nothing to export: no winners are stored\n"


def test_max_configs_of_nothing_is_wrong_usage(monkeypatch, capsys):
    assert run(monkeypatch, "export", "--max-configs", "0") == 2
