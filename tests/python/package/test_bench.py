"""The training benchmark, bench/train_lm.py, at its smallest size: training, sweeps, results and plots, and its
behavior with invalid arguments and failing optimizers."""

import importlib
import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("numpy")

pytestmark = pytest.mark.usefixtures("one_thread")  # the model is small

FOLDER = Path(__file__).resolve().parents[3] / "bench"
OURS = ["adamw", "muon", "muon-of-torch", "normuon"]
OURS += ["shampoo", "shampoo-period", "kl_shampoo", "soap", "soap-period"]


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delenv("TORCHIUM_PEERS", raising=False)


@pytest.fixture
def train(monkeypatch, tmp_path):
    """Runs bench/train_lm.py on the CPU; returns its exit status and results."""

    def run(*arguments, path=None):
        import train_lm

        out = path or tmp_path / "figures.json"
        always = ["--device", "cpu", "--out", str(out), "--cache", str(tmp_path / "cache")]
        monkeypatch.setattr(sys, "argv", ["train_lm.py", *always, *arguments])
        return train_lm.main(), json.loads(out.read_text())

    return run


def test_every_optimizer_of_ours_learns(train, tmp_path, capsys):
    status, figures = train("--steps", "20", "--optimizers", "torch-adamw,ours")
    assert status == 0 and figures["failed"] == []
    assert [run["name"] for run in figures["runs"]] == ["torch-adamw", *OURS]
    for run in figures["runs"]:
        losses = run["curve"]["losses"]
        assert run["curve"]["steps"] == [5, 10, 15, 20] and len(losses) == 4
        assert losses[0] > 4.5, "it begins near the logarithm of 256"
        assert max(losses[-1], run["held_out_loss"]) < losses[0] - 0.8, f"{run['name']} has not learnt"
        assert run["loss"] == pytest.approx(sum(losses) / 4, rel=1e-4)
        assert run["step_ms"] > 0 and run["slowest_step_ms"] > 0
        assert 0 < run["curve"]["seconds"][0] < run["seconds"] == run["curve"]["seconds"][-1]
        assert run["ours"] is (run["name"] != "torch-adamw")
        assert run.get("failed_factors", 0) == 0
    theirs, ours = figures["runs"][:2]
    assert ours["curve"]["losses"] == pytest.approx(theirs["curve"]["losses"], rel=2e-3)
    output = capsys.readouterr().out
    assert all(run["label"] in output for run in figures["runs"])
    assert (tmp_path / "figures.svg").exists()


def test_a_sweep_is_written_down_and_its_best_is_taken(train):
    figures = train("--steps", "5", "--sweep", "--sweep-steps", "5", "--optimizers", "muon")[1]
    rows = figures["sweep"]
    assert 4 <= len(rows) <= 7 and {row["method"] for row in rows} == {"muon"}
    best = min(rows, key=lambda row: row["loss"])
    assert [row for row in rows if row["chosen"]] == [best]
    run = figures["runs"][0]
    assert (run["matrices"], run["rest"]) == (best["matrices"], best["rest"])


def test_one_that_fails_is_reported_and_the_others_go_on(train, tmp_path, monkeypatch, capsys):
    peers = tmp_path / "peers"
    peers.mkdir()
    (peers / "soap.py").write_text("def SOAP(*parameters, **options):\n    raise ValueError('not today')\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    arguments = ["--steps", "5", "--optimizers", "vyas-soap,adamw", "--peer-path", str(peers)]
    status, figures = train(*arguments)
    sys.modules.pop("soap", None)
    assert status == 1
    assert figures["failed"] == [{"what": "vyas-soap", "why": "ValueError: not today"}]
    assert [run["name"] for run in figures["runs"]] == ["adamw"]
    assert "FAILED vyas-soap" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizers", "muon,adan"], "there is no adan"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--sweep-steps", "-1"], "--sweep-steps must be at least 1, got -1"),
        (["--size", "huge"], "invalid choice: 'huge'"),
        (["--peer-path", "/nowhere"], "there is no folder /nowhere"),
        (["--steps", "many"], "invalid int value: 'many'"),
    ],
)
def test_wrong_arguments_are_errors(train, capsys, tmp_path, arguments, message):
    with pytest.raises(SystemExit) as refused:
        train(*arguments)
    assert refused.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "figures.json").exists()


def test_checkouts_of_the_text_are_named(train, tmp_path):
    for given in ([], ["--text", str(tmp_path)]):
        with pytest.raises(SystemExit, match=r"ansible/ansible.*sympy/sympy.*github"):
            train("--size", "33m", *given)


# --- other benchmarks -------------------------------------------------------------------------------------------------


def test_the_table_of_targets(tmp_path, monkeypatch):
    """A dry run of all GPU cases: no row is missing, and no error large."""
    import compare

    out = tmp_path / "table.json"
    arguments = ["--device", "cpu", "--tiny", "--quick", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments])
    assert compare.main() == 0
    found = json.loads(out.read_text())
    rows = {*range(1, 17), 18, 19, 20, 21, 24, 45, 46}
    assert found["failed"] == [] and rows <= {row["row"] for row in found["rows"]}
    assert all(row["ours_ms"] > 0 for row in found["rows"])
    errors = [error for row in found["rows"] for error in row["errors"].values()]
    assert errors and all(error is not None and error < 1e-2 for error in errors)
    assert len(found["memory"]) == 5 and len(found["calls"]) == 36 and len(found["steps"]) == 6


DRAWN = [
    ("training", "draw", "train-lm-33m", "train-lm-33m"),
    ("training", "headline", "train-lm-33m", "headline"),
]


@pytest.mark.parametrize(("module", "function", "results", "picture"), DRAWN)
def test_pictures_of_the_pages_are_drawn_from_the_results(module, function, results, picture):
    draw = getattr(importlib.import_module(f"plots.{module}"), function)
    figures = json.loads((FOLDER / "results" / f"{results}.json").read_text())
    assert draw(figures) == (FOLDER.parent / "docs" / "images" / f"{picture}.svg").read_text()
