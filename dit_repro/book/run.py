"""Run chapters through papermill into _runs/, and say honestly whether each one ran to its end."""
import json
import os
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path

from dit_repro.book import provenance
from dit_repro.book.chapters import (
    DATA_PARAMETERS,
    MODEL_PARAMETERS,
    REHEARSALS,
    Chapter,
    cast_parameters,
    chapters,
    select_chapters,
)
from dit_repro.files import write_json

# Time limit of one cell; None is no limit.
CELL_SECONDS = {"smoke": 300, "laptop": 1800, "gpu": 3600, "paper": None, **dict.fromkeys(REHEARSALS, 1800)}


def run_book(root: Path, wanted=(), profile: str = "laptop", overrides=(), timeout: int | None = None,
             fresh: bool = False, echo=print) -> Path:
    """Run the chapters in `wanted` (all for none) and return the folder _runs/<time>-<profile>/ that keeps them.

    overrides: "key=value" texts. timeout: seconds a cell may take, 0 for no limit, None for the profile's limit. A
    chapter whose code, package, versions, device, profile and parameters have a good run already is copied from it,
    unless `fresh`. Raises RuntimeError, after all chapters were tried, when one did not run to its end, and
    KeyboardInterrupt, saying what is kept, on Ctrl-C or SIGTERM.
    """
    selected = select_chapters(root, wanted)
    parameters = cast_parameters(selected, profile, overrides, chapters(root))
    for values in parameters.values():
        _locate_data(values)
    stamps = {chapter.name: stamp(root, chapter, parameters[chapter.name]) for chapter in selected}
    folder = _new_folder(root, profile)
    status = {"state": "running", "profile": profile, "overrides": list(overrides),
              "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "python": sys.executable, "chapters": {}}
    before = _sigterm(_stop)
    try:
        for chapter in selected:
            status["chapters"][chapter.name] = "interrupted"      # until it is over
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
    except KeyboardInterrupt:
        status["state"] = "interrupted"
        kept = ["latents and training steps (a training goes on by itself)", f"what {chapter.name} showed so far"]
        kept = [name for name, state in status["chapters"].items() if state == "ok"] + kept
        raise KeyboardInterrupt(f"stopped in {chapter.name}; kept are {', '.join(kept)}, in {folder}. The same command "
                                "goes on; finished chapters are not run again") from None
    except BaseException:
        status["state"] = "failed"
        raise
    finally:
        _sigterm(before)
        write_json(folder / "status.json", status)
    if failed:
        reasons = [f"{name}: {read_status(folder / name)['error']}" for name in failed]
        raise RuntimeError(f"{len(failed)} of {len(selected)} chapters failed; notebooks and logs are kept in {folder}"
                           + "".join(f"\n  {reason}" for reason in reasons))
    return folder


def _stop(signal_number, frame):
    raise KeyboardInterrupt


def _sigterm(handler):
    """Install `handler` for SIGTERM and return the one before; signals are for the main thread only."""
    if handler is not None and threading.current_thread() is threading.main_thread():
        return signal.signal(signal.SIGTERM, handler)
    return None


def _locate_data(values: dict) -> None:
    """Make paths of the user's folder absolute, since a kernel works in book/; FileNotFoundError before any starts."""
    for name in MODEL_PARAMETERS:
        if value := values.get(name):
            values[name] = str(Path(value).expanduser().absolute())
            if not Path(values[name]).exists():
                raise FileNotFoundError(f"{name}={value}: there is no such file or folder")
    for name in DATA_PARAMETERS:
        if not (value := values.get(name)) or value == "embedded":
            continue
        path = Path(value).expanduser().absolute()
        if path.is_dir():
            values[name] = str(path)
        if name == "data" and not (any(path.glob("*-images-idx3-ubyte*"))
                                   or ((path / "train").is_dir() and (path / "val").is_dir())):
            raise FileNotFoundError(f"data={value}: expected a folder with the four Fashion-MNIST IDX files, or with "
                                    "train/ and val/ that hold a folder for each class (ImageNet's layout); "
                                    + ("found neither there" if path.is_dir() else "there is no such folder"))
        if name == "autoencoder" and value[0] in "/.~" and not path.is_dir():
            raise FileNotFoundError(f"autoencoder={value}: no such folder; expected a folder with config.json and "
                                    'weights as diffusers saves them, or a name such as "stabilityai/sd-vae-ft-ema"')


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
    try:
        return json.loads((path := folder / "status.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"state": "failed", "error": "killed"}
    except ValueError as error:
        return {"state": "failed", "error": f"{path} is damaged ({error}); run the chapter again"}


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
        with _kernel_environment(output, progress), open(output / "log.txt", "w", 1, "utf-8") as log, \
                _follow(output / "notebook.ipynb", progress, began, usual, echo):
            _until_done_or_stopped(output, lambda: papermill.execute_notebook(
                output / "notebook.ipynb", output / "notebook.ipynb", parameters, kernel_name="python3",
                cwd=root / "book", progress_bar=False, execution_timeout=cell_seconds, start_timeout=180,
                autosave_cell_every=30, stdout_file=log, stderr_file=log,
                shutdown_kernel="immediate"))   # torch takes seconds to leave, and all is written
        error = unfinished(nbformat.read(output / "notebook.ipynb", 4))
    except BaseException as problem:
        first_line = (str(problem).strip() or "no message").splitlines()
        name = getattr(problem, "ename", type(problem).__name__)
        error = f"{name}: {getattr(problem, 'evalue', first_line[0])}"
        if isinstance(problem, (KeyboardInterrupt, SystemExit)):
            error = "stopped by the user"
            raise
    finally:
        state = "interrupted" if error == "stopped by the user" else "failed" if error else "ok"
        status |= {"state": state, "seconds": round(time.time() - began, 1)}
        write_json(output / "status.json", status | ({"error": error} if error else {}))
    echo(f"{chapter.name}: {error or 'ok'}, {status['seconds']:.0f} s")
    return status["state"]


def _until_done_or_stopped(output: Path, execute) -> None:
    """Call `execute` in a thread, because in the main thread nbclient answers Ctrl-C itself: it kills the kernel.

    On Ctrl-C the kernel is interrupted, as Lab would, so that its notebook is saved; after 20 s it is killed.
    """
    import psutil
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(execute)
        try:
            future.result()
        except KeyboardInterrupt:
            asked = time.monotonic()
            while not future.done():      # again and again, since between two cells a kernel does not listen
                for process in psutil.Process().children():
                    with suppress(psutil.Error):
                        if str(output) in " ".join(process.cmdline()):
                            process.send_signal(signal.SIGINT if time.monotonic() - asked < 20 else signal.SIGKILL)
                wait([future], timeout=1)
            raise


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
    # What a kernel itself says (that it talks over TCP, how it died) goes to a file, not between our lines.
    log = f"os.open({str(output / 'kernel.log')!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)"
    start = f"import os; os.dup2({log}, 2); from ipykernel.kernelapp import launch_new_instance as start; start()"
    write_json(kernel, {"argv": [sys.executable, "-c", start, "-f", "{connection_file}"],
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
        status = read_status(folder)
        if status["state"] == "ok" and status["stamp"]["profile"] == profile:   # not its rehearsal
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
