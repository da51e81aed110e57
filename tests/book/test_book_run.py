import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

from dit_repro.book.chapters import select_chapters
from dit_repro.book.run import find_run, read_status, run_book, stamp, unfinished


@pytest.fixture
def runs(executed):
    """The run with the faults, the slow run, and the good chapter once more."""
    return sorted((executed / "_runs").iterdir())


@pytest.mark.parametrize("chapter, error", [("02_killed", "DeadKernelError"), ("04_early_exit", "SystemExit")])
def test_a_kernel_that_dies_or_exits_early_fails_the_run_and_keeps_its_notebook(runs, chapter, error):
    status = read_status(runs[0] / chapter)
    assert status["state"] == "failed" and error in status["error"]
    assert json.loads((runs[0] / "status.json").read_text())["state"] == "failed"
    cells = nbformat.read(runs[0] / chapter / "notebook.ipynb", 4).cells
    assert any(cell.get("execution_count") for cell in cells) and cells[-1].execution_count is None


def test_a_cell_over_its_time_limit_fails_the_run(runs):
    status = read_status(runs[1] / "03_slow")
    assert status["state"] == "failed" and "Timeout" in status["error"]


def test_one_failing_chapter_does_not_keep_the_others_from_running(executed, runs):
    assert json.loads((runs[0] / "status.json").read_text())["chapters"] == {
        "01_good": "ok", "02_killed": "failed", "04_early_exit": "failed"}
    said = (executed / "said.txt").read_text()
    assert "01_good (smoke): 7 code cells" in said and "01_good: ok" in said
    assert "    encode: 40% done" in said
    assert "2 of 3 chapters failed" in said and "02_killed: DeadKernelError" in said


def test_an_exported_backend_or_kernelspec_changes_nothing(runs):
    # It was run with MPLBACKEND=agg, and a JUPYTER_PATH whose python3 is the program `false`.
    cells = nbformat.read(runs[0] / "01_good" / "notebook.ipynb", 4).cells
    plots = [cell for cell in cells if "plt.show()" in cell.source]
    assert "image/png" in plots[0].outputs[-1].data


def test_overrides_reach_the_kernel_with_their_type(runs):
    metrics = json.loads((runs[0] / "04_early_exit" / "results.json").read_text())["metrics"]
    assert (metrics["switch_is"]["value"], metrics["switch_type"]["value"]) == ("False", "bool")
    metrics = json.loads((runs[0] / "01_good" / "results.json").read_text())["metrics"]
    assert metrics["flag_is"]["value"] == "True"        # it has no such parameter
    assert metrics["half"] == {"value": 0.5, "seeds": 3, "interval": [0.4, 0.6]}


def test_the_source_is_not_touched_by_a_run(executed):
    source = (executed / "book" / "01_good.py").read_text()
    assert "injected" not in source and not list((executed / "book").glob("*.ipynb"))


def test_an_unchanged_chapter_is_used_again_and_a_changed_one_is_not(executed, runs, monkeypatch):
    monkeypatch.setattr("papermill.execute_notebook", lambda *a, **k: pytest.fail("ran an unchanged chapter"))
    said = []
    again = run_book(executed, ["1"], "smoke", echo=said.append)
    assert "nothing changed since" in said[0] and read_status(again / "01_good") == read_status(runs[2] / "01_good")
    shutil.rmtree(again)
    chapter = select_chapters(executed, ["1"])[0]
    values = {"profile": "smoke"}
    assert find_run(executed, "01_good", stamp(executed, chapter, values)) == runs[2] / "01_good"
    for other in ({"profile": "laptop"}, {"profile": "smoke", "flag": False}):
        assert find_run(executed, "01_good", stamp(executed, chapter, other)) is None
    for changed in ("code", "package", "device"):
        assert find_run(executed, "01_good", {**stamp(executed, chapter, values), changed: "other"}) is None


def test_a_run_stopped_by_the_user_is_marked_and_never_used_again(book, monkeypatch):
    def stop(*arguments, **options):
        raise KeyboardInterrupt
    monkeypatch.setattr("papermill.execute_notebook", stop)
    with pytest.raises(KeyboardInterrupt, match="stopped in 01_good; kept are latents"):
        run_book(book, [], "smoke", echo=lambda line: None)
    run = next((book / "_runs").iterdir())
    assert json.loads((run / "status.json").read_text())["state"] == "interrupted"
    assert read_status(run / "01_good")["state"] == "interrupted"
    assert find_run(book, "01_good", read_status(run / "01_good")["stamp"]) is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_running_cell_with_one_line_and_keeps_what_it_showed(slow_book, tmp_path, number):
    command = [sys.executable, "-m", "dit_repro", "run", "--profile", "smoke", "--no-build"]
    with open(tmp_path / "said.txt", "w") as said:
        # A shell in the background ignores Ctrl-C for its children, and so would these.
        process = subprocess.Popen(command, cwd=slow_book, stdout=said, stderr=said, start_new_session=True,
                                   preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                                   env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
    log = None
    while not (log and "shown" in log.read_text()) and process.poll() is None:
        time.sleep(0.1)
        log = next((slow_book / "_runs").glob("*/01_slow/log.txt"), None)
    os.killpg(process.pid, number)        # as a terminal does: to everything in the foreground
    assert process.wait() == 130
    lines = [line for line in (tmp_path / "said.txt").read_text().splitlines() if "cells" not in line]
    assert len(lines) == 1 and lines[0].startswith("dit-repro: stopped in 01_slow; kept are latents and training steps")
    run = log.parents[1]
    assert json.loads((run / "status.json").read_text())["state"] == "interrupted" and not (run / "02_next").exists()
    assert "shown" in (run / "01_slow" / "notebook.ipynb").read_text()
    assert "TCP" in (run / "01_slow" / "kernel.log").read_text()       # kept, though not shown
    assert str(run) not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout


def test_a_cell_without_a_count_or_with_an_error_is_not_a_whole_run():
    def cell(count, outputs=()):
        return nbformat.v4.new_code_cell("1", execution_count=count, outputs=list(outputs))
    error = nbformat.v4.new_output("error", ename="ValueError", evalue="no", traceback=[])
    assert unfinished(nbformat.v4.new_notebook(cells=[cell(1), cell(2)])) is None
    assert unfinished(nbformat.v4.new_notebook(cells=[cell(1), cell(None)])) == "cell 2 never ran"
    assert unfinished(nbformat.v4.new_notebook(cells=[cell(1, [error])])) == "cell 1 raised ValueError: no"
