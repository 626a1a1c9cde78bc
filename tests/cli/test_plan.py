"""`zerostd plan`: modules and numbers, on described machines; and what it says to bad input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from planning.machines import H200
from zerostd.cli.main import app
from zerostd.cli.plan import MACHINE
from zerostd.monitoring.texts import seconds_text, short_size
from zerostd.planning import Plan
from zerostd.policy import Stage, Tier
from zerostd.preparing.budgets import FOR_LIBRARIES
from zerostd.sharding.layout import ALIGNMENT

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CLUSTER = ROOT / "benchmarks" / "clusters" / "1024x8.json"
PAPER = {  # Table 1, GB on one device at stages 1, 2 and 3
    "7.5B": {1: "120 120 120", 4: "52.5 41.3 30", 16: "35.6 21.6 7.5", 64: "31.4 16.6 1.88"},
    "128B": {1: "2048 2048 2048", 4: "896 704 512", 16: "608 368 128", 64: "536 284 32"},
    "1T": {1: "16000 16000 16000", 4: "7000 5500 4000", 16: "4750 2875 1000", 64: "4187 2218 250"},
}
PAPER["7.5B"] |= {256: "30.4 15.4 0.47", 1024: "30.1 15.1 0.12"}
PAPER["128B"] |= {256: "518 263 8", 1024: "513 257 2"}
PAPER["1T"] |= {256: "4046 2054 62.5", 1024: "4011 2013 15.6"}

Plan_ = Callable[..., Result]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan_:
    """`plan("--params", "1B")` in the directory of the factories."""
    monkeypatch.chdir(HERE)
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def run(*words: object) -> Result:
        return CliRunner().invoke(app, ["plan", *(str(word) for word in words)])

    return run


def refused(result: Result) -> str:
    """What was said: one line on stderr, and no traceback."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("zerostd: ")
    return line


def made(result: Result) -> Plan:
    assert result.exit_code == 0, result.output
    return Plan.from_json(result.stdout)


# -- numbers --


def test_numbers_on_a_cluster_as_a_program() -> None:
    words = ["plan", "--params", "7.5B", "--cluster", str(CLUSTER), "--json"]
    found = subprocess.run([sys.executable, "-m", "zerostd", *words], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stderr) == (0, "")
    plan = Plan.from_json(found.stdout)
    assert (plan.world_size, plan.stage) == (1, Stage.PARAMETERS)
    assert plan.limits[Tier.HOST] == 1_800_000_000_000
    assert plan.predicted.step_s is None
    assert all(plan.predicted.total(tier) <= limit for tier, limit in plan.limits.items())


def test_batch_gives_a_time(plan: Plan_) -> None:
    words = ("--params", "1.3B", "--cluster", CLUSTER, "--samples", 1, "--sequence", 512, "--accumulate", 2)
    result = plan(*words, "--world", 8, "--stage", 3, "--clip", "--recompute")
    assert result.exit_code == 0, result.output
    assert "1.3 B parameters on 1,024 nodes" in result.stdout
    assert "Stage 3 on 8 ranks" in result.stdout and "A step takes" in result.stdout


def test_activations_are_chosen(plan: Plan_, tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_text(H200.to_json())
    words = ("--params", "6.7B", "--cluster", tmp_path / "machine.json", "--samples", 8, "--accumulate", 1)
    words += ("--budget", "device=60GiB,disk=0")
    kept, chosen, by_name = (
        made(plan(*words, *more, "--json")) for more in (("--activations", "keep"), (), ("--activations", "any"))
    )
    assert kept.activations == {"*": "keep"} and chosen == by_name
    done = {chosen.activations_of(name) for name in chosen.homes}
    assert "recompute+host" in done and chosen.predicted.step_s < 0.9 * kept.predicted.step_s
    again = made(plan(*words, "--activations", "recompute", "--json"))
    assert again.activations == {"*": "recompute"}
    assert made(plan(*words, "--recompute", "--json")) == again
    by_host = plan(*words, "--activations", "keep, host")
    assert by_host.exit_code == 0 and "Activations: " in by_host.stdout and "A step takes" in by_host.stdout


def test_batch_is_divided(plan: Plan_) -> None:
    words = (
        "--params",
        "1.3B",
        "--cluster",
        CLUSTER,
        "--batch",
        12,
        "--budget",
        "device=24GiB",
        "--activations",
        "any",
    )
    result = plan(*words)
    assert result.exit_code == 0, result.output
    assert "A step of 12 samples is divided into passes of" in result.stdout
    for size, passes in ((12, 1), (6, 2), (4, 3), (3, 4), (2, 6), (1, 12)):
        assert f"\n  {size} x {passes}: " in result.stdout
    assert "passes of 3: accumulate=4" in plan(*words, "--samples", 3).stdout
    assert "passes of 6: accumulate=2" in plan(*words, "--accumulate", 2).stdout


def test_scaling_chooses_activations_too(plan: Plan_) -> None:
    words = (
        "--params",
        "6.7B",
        "--cluster",
        CLUSTER,
        "--samples",
        16,
        "--accumulate",
        1,
        "--scaling",
        "8,64",
        "--json",
    )
    kept, chosen = (json.loads(plan(*words, "--activations", ways).stdout) for ways in ("keep", "keep,recompute"))
    assert kept[0]["refused"] and not chosen[0]["refused"]
    assert 0 < chosen[0]["compute_s"] <= chosen[0]["step_s"] * 1.001


def test_budget_is_kept(plan: Plan_) -> None:
    words = ("--params", "1.3B", "--cluster", CLUSTER, "--budget", "device=8GiB,host=40GiB", "--json")
    found = made(plan(*words))
    assert found.limits == {Tier.DEVICE: 8 * 2**30 - FOR_LIBRARIES, Tier.HOST: 40 * 2**30}
    assert found.predicted.total(Tier.DEVICE) <= found.limits[Tier.DEVICE]
    assert found.predicted.total(Tier.HOST) > 2**30
    halves = made(plan(*words, "--world", 2))
    assert halves.limits[Tier.HOST] == 20 * 2**30  # a node's is shared by its ranks, a device is a rank's own


def test_config_is_read(plan: Plan_, tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 1000, "n_positions": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = made(plan("--config", tmp_path / "config.json", "--cluster", CLUSTER, "--samples", 2, "--json"))
    assert found.predicted.step_s is not None and len(found.homes) == 6


@pytest.mark.parametrize(("precision", "width"), [("fp32", 16), ("bf16", 14), ("fp16", 16)])
def test_precision_decides_the_widths(plan: Plan_, precision: str, width: int) -> None:
    result = plan("--params", "100M", "--cluster", CLUSTER, "--precision", precision, "--json")
    kinds = made(result).predicted.bytes[Tier.DEVICE]
    by_name = {kind.value: size for kind, size in kinds.items() if kind.value != "buffers"}
    numel, rest = divmod(sum(by_name.values()), width)
    assert rest == 0 and 10**8 <= numel < 10**8 + ALIGNMENT * len(made(result).homes)
    assert by_name["parameters"] == (4 if precision == "fp32" else 2) * numel


def test_plan_is_saved(plan: Plan_, tmp_path: Path) -> None:
    result = plan("--params", "100M", "--cluster", CLUSTER, "--output", tmp_path / "plan.json")
    assert result.exit_code == 0 and "Stage 3 on 1 rank" in result.stdout
    assert Plan.load(tmp_path / "plan.json").world_size == 1


def test_what_does_not_fit_is_one_line_with_the_bytes(plan: Plan_) -> None:
    line = refused(plan("--params", "1T", "--cluster", CLUSTER))
    assert "is missing" in line and "bytes" in line


# -- the paper --


@pytest.mark.parametrize("size", PAPER)
def test_table_is_the_papers(plan: Plan_, size: str) -> None:
    result = plan("--table", "--params", size, "--json")
    assert result.exit_code == 0, result.output
    (rows,) = json.loads(result.stdout).values()
    found = {row["devices"]: [row[f"stage_{stage}"] for stage in (1, 2, 3)] for row in rows}
    assert found == {devices: [float(digits) for digits in row.split()] for devices, row in PAPER[size].items()}


@pytest.mark.parametrize("name", ["five-v100", "dgx2-400", "h200-1"])
def test_clusters_come_with_the_package(plan: Plan_, name: str) -> None:
    result = plan("--params", "100M", "--cluster", name, "--json")
    assert made(result).world_size == 1
    assert "other machines are dgx2-400, five-v100, h200-1" in refused(plan("--params", "1B", "--cluster", "dgx3"))
    assert name in MACHINE


def test_machines_are_known_by_name(plan: Plan_) -> None:
    found = made(plan("--params", "13B", "--machine", "8xh100-80", "--json"))
    assert found.world_size == 8 and 40e9 < found.limits[Tier.DEVICE] < 80e9
    assert made(plan("--params", "13B", "--machine", "4x8xa100-80", "--json")).world_size == 32
    assert made(plan("--params", "1B", "--machine", "8xh100-80", "--world", 2, "--json")).world_size == 2
    assert made(plan("--params", "1B", "--machine", "h100-80", "--json")).world_size == 1
    assert made(plan("--params", "13B", "--machine", "4x8a100-80", "--json")).world_size == 32
    assert "did you mean 8xh100-80?" in refused(plan("--params", "13B", "--machine", "8xh100"))
    assert "8xh100-80 for a node of eight" in refused(plan("--params", "13B", "--machine", "dgx"))
    assert "--disk-path is for this machine only" in refused(
        plan("--params", "1B", "--machine", "1xt4-16", "--disk-path", ".")
    )


def test_plans_that_need_not_be_exact_may_have_codes(plan: Plan_) -> None:
    words = ("--params", "20B", "--machine", "1xh200-141", "--budget", "device=120GiB,host=60GiB")
    assert "is missing" in refused(plan(*words))
    assert made(plan(*words, "--no-exact", "--json")).codec == {"optimizer_states": "int8"}


def test_page_of_a_plan_has_its_numbers_and_other_budgets(plan: Plan_, tmp_path: Path) -> None:
    words = (
        "--params",
        "1.3B",
        "--machine",
        "1xt4-16",
        "--samples",
        1,
        "--recompute",
        "--html",
        tmp_path / "plan.html",
    )
    result = plan(*words, "--json")
    page = (tmp_path / "plan.html").read_text()
    found = made(result)
    assert f"<dt>step</dt><dd>{seconds_text(found.predicted.step_s)}</dd>" in page
    assert (
        f"device: {short_size(found.predicted.total(Tier.DEVICE))} of {short_size(found.limits[Tier.DEVICE])}" in page
    )
    data = json.loads(re.search(r'id="report">(.*?)</script>', page)[1])
    assert len(data["others"]) > 3 and {"limit", "step", "device"} <= data["others"][0].keys()
    (simulated,) = data["runs"][0]["timeline"]["steps"]
    assert simulated["to_s"] == pytest.approx(found.predicted.step_s)
    assert {"loop", "compute", "cpu"} <= {row["lane"] for row in simulated["rows"]}
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")


def test_plans_of_a_page_use_one_measurement_of_the_model(plan: Plan_, tmp_path: Path) -> None:
    words = ("factories:counted", "--cluster", CLUSTER, "--json")
    forwards: list[int] = []
    for more in ((), ("--html", tmp_path / "plan.html")):
        made(plan(*words, *more))
        seen = sys.modules["factories"].FORWARDS
        forwards.append(len(seen))
        seen.clear()
    assert forwards[0] == forwards[1] > 0
    page = (tmp_path / "plan.html").read_text()
    assert len(json.loads(re.search(r'id="report">(.*?)</script>', page)[1])["others"]) > 3


def test_a_budget_beyond_the_machine_is_told_of(plan: Plan_) -> None:
    words = ("--params", "1B", "--budget", "device=500GiB")
    assert "but 1xt4-16, from published rates has 14.90 GiB free" in plan(*words, "--machine", "1xt4-16").stdout


def test_plans_and_tables_fit_80_columns(plan: Plan_) -> None:
    words = ("--params", "13B", "--machine", "8xa100-40", "--samples", 1)
    table = plan(*words).stdout.split("\n\n")[1]
    rows = plan(*words, "--scaling", "8,16,1024").stdout.splitlines()[1:5]
    assert table.startswith("tier") and max(map(len, [*table.splitlines(), *rows])) <= 80


def test_table_takes_several_models(plan: Plan_) -> None:
    result = plan("--table", "--params", "7.5B", "--params", "1T")
    assert result.exit_code == 0
    assert "gpt-7.5B" in result.stdout and "gpt-1T" in result.stdout and "16.6" in result.stdout


# -- scaling --


def test_scaling_has_a_row_for_each_world(plan: Plan_) -> None:
    words = ("--params", "1.3B", "--cluster", CLUSTER, "--samples", 1, "--recompute")
    result = plan(*words, "--scaling", "64,8,16", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [row["world_size"] for row in rows] == [8, 16, 64]
    assert rows[0]["efficiency"] == 1.0 and rows[0]["tokens_per_s"] == 1024 * rows[0]["samples_per_s"]
    assert all(row["samples"] == row["passes"] == 1 and 0 < row["tflops"] < 989 for row in rows)
    table = plan(*words, "--scaling", "2")
    assert "TFLOP/s" in table.stdout
    assert table.exit_code == 0 and "efficiency" in table.stdout and "tokens/s" in table.stdout


def test_scaling_of_a_function_takes_its_batch(plan: Plan_) -> None:
    result = plan("factories:with_batch", "--cluster", CLUSTER, "--scaling", "1,2", "--json")
    assert result.exit_code == 0, result.output
    assert [row["refused"] for row in json.loads(result.stdout)] == ["", ""]


# -- functions --


@pytest.mark.parametrize("name", ["alone", "with_optimizer", "with_batch"])
def test_function_is_planned_to_the_byte(plan: Plan_, name: str) -> None:
    found = made(plan(f"factories:{name}", "--cluster", CLUSTER, "--world", 2, "--precision", "bf16", "--json"))
    assert found.world_size == 2
    assert (found.predicted.step_s is not None) == (name == "with_batch")


def test_time_without_wires_is_told_of(plan: Plan_, tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_text(without(wires=[]))
    for source in (("factories:with_batch",), ("--params", "1M", "--samples", 1)):
        found = made(plan(*source, "--cluster", tmp_path / "machine.json", "--world", 2, "--json"))
        assert any("no wires" in note for note in found.notes)


def test_function_under_meta_allocates_nothing(plan: Plan_) -> None:
    result = plan("factories:huge", "--meta", "--cluster", CLUSTER, "--precision", "bf16", "--accumulate", 1)
    assert result.exit_code == 0, result.output
    assert "Tower: 13 B parameters" in result.stdout and "A step takes" in result.stdout


def test_function_that_raises_shows_its_own_traceback_and_its_name(plan: Plan_) -> None:
    result = plan("factories:raises", "--cluster", CLUSTER)
    assert (result.exit_code, result.stdout) == (2, "")
    first, *_, last = result.stderr.splitlines()
    assert first == "Traceback (most recent call last):"
    assert 'factories.py", line' in result.stderr and "sources.py" not in result.stderr
    assert "KeyError: 'no such size'" in result.stderr
    assert last == "zerostd: the function 'factories:raises' failed: KeyError: 'no such size'"


def test_function_that_leaves_is_told_of(plan: Plan_) -> None:
    assert "'factories:leaves' failed: SystemExit" in plan("factories:leaves").stderr.splitlines()[-1]


def test_module_that_fails_shows_its_own_traceback(plan: Plan_, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_by_design.py").write_text("import no_such_package_at_all\n")
    result = plan("broken_by_design:make")
    assert result.exit_code == 2
    assert 'broken_by_design.py", line 1' in result.stderr and "importlib" not in result.stderr
    assert "zerostd: the module 'broken_by_design' failed: ModuleNotFoundError" in result.stderr.splitlines()[-1]


# -- bad input --


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "no model to plan"),
        (("factories:alone", "--params", "1B"), "more than one model"),
        (("--params", "1B", "--config", "config.json"), "more than one model"),
        (("--params", "1B", "--params", "2B"), "--table only"),
        (("--params", "7.5X"), "'7.5X' is not a number of parameters"),
        (("--params", "1B", "--stage", 4), "stage=4 is not a ZeRO stage"),
        (("--params", "1B", "--world", 0), "world=0"),
        (("--params", "1B", "--world", -2), "world=-2"),
        (("--params", "1B", "--accumulate", 0), "accumulate=0"),
        (("--params", "1B", "--samples", 0), "samples=0"),
        (("--params", "1B", "--batch", 0), "batch=0"),
        (
            ("--params", "1B", "--batch", 8, "--samples", 3),
            "a batch of 8 cannot be divided into passes of 3 samples",
        ),
        (
            ("--params", "1B", "--batch", 8, "--accumulate", 3),
            "a batch of 8 cannot be divided into 3 passes: ",
        ),
        (("--params", "1B", "--batch", 8, "--scaling", "8"), "with --scaling give the samples of a step"),
        (
            ("--params", "1B", "--samples", 1, "--activations", "burn"),
            "'burn' is unknown; use keep, recompute, recompute+host, host",
        ),
        (("--params", "1B", "--samples", 1, "--activations", ""), "'' is unknown"),
        (("--params", "1B", "--samples", 1, "--activations", "any", "--recompute"), "give one of them"),
        (("--params", "1B", "--activations", "any"), "give --samples or --batch"),
        (("factories:alone", "--batch", 8), "a function decides these itself"),
        (("factories:alone", "--samples", 1, "--activations", "any"), "a function decides these itself"),
        (("--params", "1B", "--precision", "fp8"), "precision='fp8' is unknown"),
        (("--params", "1B", "--budget", "device=24GiBB"), "'24GiBB' is not a size"),
        (("--params", "1B", "--budget", "device=-24GiB"), "'-24GiB' is not a size"),
        (("--params", "1B", "--budget", "device="), "'' is not a size"),
        (("--params", "1B", "--budget", "tape=24GiB"), "'tape' is not a tier; use device, host, disk"),
        (("--params", "1B", "--budget", "24GiB"), "'24GiB' must have the form tier=size"),
        (("--params", "1B", "--budget", "host=1GiB,host=2GiB"), "host is given twice"),
        (("--params", "1B", "--budget", "disk=1TB"), "but no disk is known"),
        (("--params", "1B", "--disk-path", "/"), "--disk-path is for this machine only"),
        (("--params", "1B", "--scaling", "8,many"), "give numbers of ranks"),
        (("--params", "1B", "--scaling", "8", "--table"), "exclude each other"),
        (("--params", "1B", "--step-samples", 8), "needs --scaling"),
        (("--params", "1B", "--output", "/no/such/folder/plan.json"), "cannot be written"),
        (("--params", "1B", "--meta"), "--meta goes with"),
        (("--config", "no/such/config.json"), "config.json cannot be read: No such file"),
        (("--config", "config.json", "--hidden", 8), "go with --params"),
        (("factories:alone", "--samples", 2), "a function decides these itself"),
        (("factories:alone", "--scaling", "1"), "scaling needs the samples of one pass"),
        (("factories:nothing",), "no 'nothing' in the module 'factories'"),
        (("no_such_module:make",), "no module 'no_such_module'"),
        (("no_such_package.inside:make",), "no module 'no_such_package.inside'"),
        (("factories",), "'factories' must have the form module:function"),
        (("factories:NOT_A_FUNCTION",), "is of type int, not a function"),
        (("factories:number",), "returned int; it must return a model"),
        (("factories:two_numbers",), "returned int as its optimizer"),
        (("factories:with_optimizer", "--stage", 9), "stage=9 is not a ZeRO stage"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_one_line(plan: Plan_, words: tuple[object, ...], said: str) -> None:
    assert said in refused(plan(*words, "--cluster", CLUSTER))


def without(**changes: Any) -> str:
    """The cluster's profile with other fields; those that are None are left out."""
    data = {**json.loads(CLUSTER.read_text()), **changes}
    return json.dumps({name: value for name, value in data.items() if value is not None})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("", "is not JSON"),
        ("[]", "measure again"),
        ("{}", "'name'"),
        ("null", "measure again"),
        (without(processor=None), "the field 'processor' is missing"),
        (without(name=None), "the field 'name' is missing"),
        (without(speed=9), "no field 'speed'"),
        (without(matrix={}), "matrix is {}, but must have fields"),
        (without(free={}), "free.device is missing"),
        (without(free={"host": 10**12}), "free.device is missing"),
        (without(free={"device": "80GB"}), "free.device is '80GB'"),
        (without(matrix={"bfloat16": 0}), "matrix.bfloat16 is 0"),
        (without(ranks_per_node=0), "ranks_per_node is 0"),
        (without(link={"up": 0, "down": 1e9, "both": 1e9}), "link.up is 0"),
        (without(processor={"num_cores": "many", "update_ns": {"1": 1}, "memory": 1e9}), "num_cores is 'many'"),
        (without(resident_ns=-1), "resident_ns is -1"),
        (without(resident_ns="fast"), "resident_ns is 'fast'"),
        (without(link={"up": "1e9", "down": 1e9, "both": 1e9}), "link.up is '1e9'"),
    ],
)
def test_bad_profile_is_one_line(plan: Plan_, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "machine.json").write_text(text)
    assert said in refused(plan("--params", "1B", "--cluster", tmp_path / "machine.json"))


def test_missing_and_binary_profiles_are_one_line(plan: Plan_, tmp_path: Path) -> None:
    missing = tmp_path / "nowhere.json"
    assert "nowhere.json cannot be read: No such file" in refused(plan("--params", "1B", "--cluster", missing))
    (tmp_path / "machine.json").write_bytes(b"\xff\xfe\x00\x01")
    assert "is not JSON" in refused(plan("--params", "1B", "--cluster", tmp_path / "machine.json"))


@pytest.mark.parametrize("size", [40, 60])
def test_a_plan_without_a_disk_uses_the_device_up_to_its_limit(plan: Plan_, size: int) -> None:
    """Its first answer is over the limit by working memory."""
    machine = ("--machine", "h200-1", "--budget", f"device={size}GiB")
    found = made(plan("--params", "7B", "--samples", 4, "--accumulate", 1, "--clip", *machine, "--json"))
    assert found.predicted.total(Tier.DEVICE) > 0.95 * found.limits[Tier.DEVICE]
