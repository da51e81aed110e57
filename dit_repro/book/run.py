"""Run chapters through papermill into _runs/, and say honestly whether each one ran to its end."""
import json
import os
import shutil
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

from dit_repro.book import provenance
from dit_repro.book.chapters import Chapter, cast_parameters, select_chapters
from dit_repro.files import write_json

CELL_SECONDS = {"smoke": 300, "laptop": 1800, "gpu": 3600, "paper": None}    # time limit of one cell; None is no limit


def run_book(root: Path, wanted=(), profile: str = "laptop", overrides=(), timeout: int | None = None,
             fresh: bool = False, echo=print) -> Path:
    """Run the chapters in `wanted` (all for none) and return the folder _runs/<time>-<profile>/ that keeps them.

    overrides: "key=value" texts. timeout: seconds a cell may take, 0 for no limit, None for the profile's limit. A
    chapter whose code, package, versions, device, profile and parameters have a good run already is copied from it,
    unless `fresh`. Raises RuntimeError, after all chapters were tried, when one did not run to its end.
    """
    selected = select_chapters(root, wanted)
    parameters = cast_parameters(selected, profile, overrides)
    stamps = {chapter.name: stamp(root, chapter, parameters[chapter.name]) for chapter in selected}
    folder = _new_folder(root, profile)
    status = {"state": "running", "profile": profile, "overrides": list(overrides),
              "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "python": sys.executable, "chapters": {}}
    try:
        for chapter in selected:
            made = None if fresh else find_run(root, chapter.name, stamps[chapter.name])
            if made:
                shutil.copytree(made, folder / chapter.name)
                echo(f"{chapter.name}: nothing changed since {made.parent.name}, used again (--fresh runs it anew)")
                state = "ok"
            else:
                state = _run_chapter(root, chapter, parameters[chapter.name], stamps[chapter.name], folder,
                                     CELL_SECONDS[profile] if timeout is None else timeout or None, echo)
            status["chapters"][chapter.name] = state
            write_json(folder / "status.json", status)
        failed = [name for name, state in status["chapters"].items() if state != "ok"]
        status["state"] = "failed" if failed else "ok"
    except BaseException:
        status["state"] = "interrupted"
        raise
    finally:
        write_json(folder / "status.json", status)
    if failed:
        reasons = [f"{name}: {read_status(folder / name)['error']}" for name in failed]
        raise RuntimeError(f"{len(failed)} of {len(selected)} chapters failed; their notebooks are kept in {folder}\n  "
                           + "\n  ".join(reasons))
    return folder


def stamp(root: Path, chapter: Chapter, parameters: dict) -> dict:
    """What the outputs of a chapter depend on; two runs with equal stamps need not both be made."""
    effective = {name: parameter.default for name, parameter in chapter.parameters.items()} | parameters
    return {"code": provenance.code_hash(chapter.notebook), "package": provenance.package_hash(chapter.source),
            "profile": parameters["profile"], "parameters": effective, "device": provenance.device(),
            "versions": provenance.versions(), "commit": provenance.commit(root)}


def find_run(root: Path, name: str, wanted: dict) -> Path | None:
    """The newest good run of a chapter with this stamp; the commit may differ, since the code did not."""
    for folder in sorted((root / "_runs").glob(f"*/{name}"), reverse=True):
        status = read_status(folder)
        if status["state"] == "ok" and {**status["stamp"], "commit": wanted["commit"]} == wanted:
            return folder
    return None


def read_status(folder: Path) -> dict:
    """status.json of one chapter's run; a run that left none was killed."""
    path = folder / "status.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"state": "failed", "error": "killed"}


def _run_chapter(root: Path, chapter: Chapter, parameters: dict, made_with: dict, folder: Path, cell_seconds,
                 echo) -> str:
    import nbformat
    import papermill
    output = folder / chapter.name
    (output / "figures").mkdir(parents=True)
    progress = output / "progress.txt"
    progress.touch()
    total = sum(cell.cell_type == "code" for cell in chapter.notebook.cells)
    usual = _last_seconds(root, chapter.name, made_with["profile"])
    echo(f"{chapter.name} ({made_with['profile']}): {total} code cells"
         + (f", last time {usual:.0f} s" if usual else ""))
    status = {"state": "running", "stamp": made_with}
    write_json(output / "status.json", status)
    began, error = time.time(), None
    try:
        source = nbformat.v4.new_notebook(cells=chapter.notebook.cells, metadata={
            "kernelspec": {"name": "python3", "language": "python", "display_name": "Python 3 (ipykernel)"}})
        nbformat.write(source, output / "notebook.ipynb")
        with _kernel_environment(output, progress), open(output / "log.txt", "w", encoding="utf-8") as log, \
                _follow(output / "notebook.ipynb", progress, began, usual, echo):
            papermill.execute_notebook(
                output / "notebook.ipynb", output / "notebook.ipynb", parameters, kernel_name="python3",
                cwd=root / "book", progress_bar=False, execution_timeout=cell_seconds, start_timeout=180,
                autosave_cell_every=30, stdout_file=log, stderr_file=log)
        error = unfinished(nbformat.read(output / "notebook.ipynb", 4))
    except BaseException as problem:
        first_line = (str(problem).strip() or "no message").splitlines()
        name = getattr(problem, "ename", type(problem).__name__)
        error = f"{name}: {getattr(problem, 'evalue', first_line[0])}"
        if isinstance(problem, (KeyboardInterrupt, SystemExit)):
            raise
    finally:
        status |= {"state": "failed" if error else "ok", "seconds": round(time.time() - began, 1)}
        write_json(output / "status.json", status | ({"error": error} if error else {}))
    echo(f"{chapter.name}: {error or 'ok'}, {status['seconds']:.0f} s")
    return status["state"]


def unfinished(notebook) -> str | None:
    """Why an executed notebook is not a whole run, or None. papermill's own metadata calls dead kernels completed."""
    for index, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "code" and cell.source.strip():
            for output in cell.outputs:
                if output.output_type == "error":
                    return f"cell {index} raised {output.ename}: {output.evalue}"
            if cell.execution_count is None:
                return f"cell {index} never ran"
    return None


@contextmanager
def _kernel_environment(output: Path, progress: Path):
    """The environment that a chapter's kernel inherits, with a kernelspec of our own that no other python3 shadows."""
    kernel = output / "jupyter" / "kernels" / "python3" / "kernel.json"
    write_json(kernel, {"argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
                        "display_name": "Python 3 (ipykernel)", "language": "python"})
    changes = {"DIT_REPRO_OUTPUT": str(output), "DIT_REPRO_PROGRESS": str(progress), "PYTHONHASHSEED": "0",
               "JUPYTER_PATH": str(kernel.parents[2]),
               "MPLBACKEND": None}     # an exported "agg" would silently drop every figure
    before = {name: os.environ.get(name) for name in changes}
    try:
        _set_environment(changes)
        yield
    finally:
        _set_environment(before)
        shutil.rmtree(output / "jupyter")


def _set_environment(values: dict) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _follow(notebook: Path, progress: Path, began: float, usual: float | None, echo):
    """Report cells done, time left and the kernel's own progress lines, until the block ends."""
    stop = threading.Event()

    def watch():
        offset, told, done, stopped = 0, time.time(), 0, False
        while not stopped:
            stopped = stop.wait(1)
            with open(progress, encoding="utf-8") as file:
                file.seek(offset)
                for line in file.read().splitlines()[-1:]:     # a fast loop writes many a second
                    echo(f"    {line}")
                offset = file.tell()
            if time.time() - told >= 5 and (count := _cells_done(notebook)) and count[0] != done:
                done, total = count
                elapsed, told = time.time() - began, time.time()
                left = max(usual - elapsed, 0) if usual else elapsed / done * (total - done)
                echo(f"  {done}/{total} cells, {elapsed:.0f} s, about {left:.0f} s left")
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _cells_done(notebook: Path) -> tuple[int, int] | None:
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    except ValueError:     # papermill is writing it
        return None
    cells = [cell for cell in cells if cell["cell_type"] == "code"
             and "injected-parameters" not in cell["metadata"].get("tags", [])]
    return sum(cell["execution_count"] is not None for cell in cells), len(cells)


def _last_seconds(root: Path, name: str, profile: str) -> float | None:
    for folder in sorted((root / "_runs").glob(f"*-{profile}*/{name}"), reverse=True):
        if (status := read_status(folder))["state"] == "ok":
            return status["seconds"]
    return None


def _new_folder(root: Path, profile: str) -> Path:
    stem = root / "_runs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{profile}"
    for suffix in ("", *(f"-{n}" for n in range(2, 100))):
        try:
            folder = stem.with_name(stem.name + suffix)
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
    raise FileExistsError(f"{stem}: too many runs in one second")
