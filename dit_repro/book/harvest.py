"""Bring the outputs of a good run into the committed pair, cleaned and stamped, the same bytes every time."""
import json
import re
import shutil
from pathlib import Path

from dit_repro.book import claims as scores
from dit_repro.book.chapters import REHEARSALS, Chapter, chapters
from dit_repro.book.headline import compose_headline
from dit_repro.book.lint import notebook_problems, outputs_hash
from dit_repro.book.provenance import code_hash, digest, portable, sealed
from dit_repro.book.run import read_status
from dit_repro.files import atomic_write, sha256, write_json


def harvest(root: Path, run: Path, results_only: bool = False, check: bool = False) -> list[str]:
    """Publish every chapter of a run folder: pair, results, exported figures, then the scoreboard.

    results_only: leave the pairs alone and add the run's numbers, so that a page made at `laptop` can stand beside
    numbers from a GPU. check: write nothing. Raises ValueError, before anything is written, for a failed chapter, for
    code that has changed since, and for outputs that lint would refuse.
    """
    found = [chapter for chapter in chapters(root) if (run / chapter.name).is_dir()]
    if not found:
        raise FileNotFoundError(f"{run}: no chapter of this book was run there")
    problems = []
    for chapter in found:
        status = read_status(run / chapter.name)
        if status["state"] != "ok":
            raise ValueError(f"{chapter.name} did not run to its end in {run}: {status.get('error', status['state'])}")
        if (profile := status["stamp"]["profile"]) in REHEARSALS:
            raise ValueError(f"{run}: a rehearsal is not published, since its numbers mean nothing; run the profile "
                             f"that it rehearses, {profile.removesuffix('-rehearsal')}")
        if status["stamp"]["code"] != code_hash(chapter.notebook):
            raise ValueError(f"{chapter.name} has changed since {run.name}; run it again before harvesting")
        for figure in _results(run / chapter.name)["figures"].values():
            if not (picture := run / chapter.name / "figures" / figure["file"]).is_file():
                raise ValueError(f"{picture} is missing; run {chapter.name} again before harvesting")
        page = published(chapter, run / chapter.name)
        problems += [problem for problem in notebook_problems(chapter, page) if problem.is_error]
    if problems and not results_only:
        raise ValueError("not harvested:\n  " + "\n  ".join(map(str, problems)))
    if not check:
        publish(root, run, results_only)
    return [chapter.name for chapter in found]


def publish(root: Path, run: Path, results_only: bool = False) -> None:
    """Write the chapters of a good run into the book under `root`, unchecked."""
    for chapter in chapters(root):
        if (run / chapter.name).is_dir():
            if not results_only:
                _write_pair(chapter, published(chapter, run / chapter.name))
                _publish_figures(root, chapter, run / chapter.name)
            _publish_results(root, chapter, run / chapter.name)
    compose_headline(root / "figures")
    scores.update(root)


def published(chapter: Chapter, run: Path):
    """The notebook as a reader sees it: the source's cells, the run's outputs, and a stamp saying what made them."""
    import nbformat
    executed = nbformat.read(run / "notebook.ipynb", 4)
    status = read_status(run)
    notebook = unexecuted(chapter)
    ran = [cell for cell in executed.cells
           if cell.cell_type == "code" and "injected-parameters" not in cell.metadata.get("tags", [])]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for count, (cell, source) in enumerate(zip(code, ran, strict=True), 1):
        cell.execution_count = count
        cell.outputs = _merge_streams(source.outputs)
        alt = None
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count
            for metadata in output.get("metadata", {}).values():
                alt = alt or (metadata.get("alt") if isinstance(metadata, dict) else None)
        if alt:      # where Jupyter Book looks for the text that a screen reader speaks
            cell.metadata["mystnb"] = {**cell.metadata.get("mystnb", {}), "image": {"alt": alt}}
    notebook.metadata["dit_repro"] = sealed({**_stamp(run), "outputs": outputs_hash(notebook),
                                             "seconds": status["seconds"]})
    return notebook


def unexecuted(chapter: Chapter):
    """The source as a notebook with stable cell ids and a kernelspec, and no outputs."""
    import nbformat
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": {
        "display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}})
    seen = {}
    for cell in chapter.notebook.cells:
        new = {"code": nbformat.v4.new_code_cell, "markdown": nbformat.v4.new_markdown_cell,
               "raw": nbformat.v4.new_raw_cell}[cell.cell_type]
        identity = digest([cell.cell_type, cell.source])[:8]
        seen[identity] = seen.get(identity, 0) + 1
        metadata = {key: cell.metadata[key] for key in ("mystnb", "tags") if key in cell.metadata}
        notebook.cells.append(new(cell.source, id=f"{identity}-{seen[identity]}", metadata=metadata))
    return notebook


def _write_pair(chapter: Chapter, notebook) -> None:
    """Write book/NN_name.ipynb. The old stamp stays when only time and commit differ: an equal run, equal bytes."""
    import nbformat
    if chapter.pair.is_file():
        old = nbformat.read(chapter.pair, 4).metadata.get("dit_repro", {})
        if _same(old, notebook.metadata["dit_repro"]):
            notebook.metadata["dit_repro"] = old
    with atomic_write(chapter.pair) as file:
        file.write(nbformat.writes(notebook) + "\n")


def _publish_results(root: Path, chapter: Chapter, run: Path) -> None:
    made = _stamp(run)
    path = root / "book" / "_results" / f"{chapter.name}.{made['profile']}.json"
    results = {**made, "metrics": _results(run)["metrics"]}
    if not path.is_file() or not _same(json.loads(path.read_text(encoding="utf-8")), results):
        write_json(path, sealed(results))


def _publish_figures(root: Path, chapter: Chapter, run: Path) -> None:
    made = _stamp(run)
    for name, figure in _results(run)["figures"].items():
        if figure["export"]:
            (root / "figures").mkdir(exist_ok=True)
            for old in (root / "figures").glob(f"{name}.*"):     # it may have had the other format
                old.unlink()
            picture = shutil.copyfile(run / "figures" / figure["file"], root / "figures" / figure["file"])
            write_json(root / "figures" / f"{name}.json", sealed({
                "notebook": f"book/{chapter.name}.ipynb", "file": picture.name, "sha256": sha256(picture),
                "caption": figure["caption"], "alt": figure["alt"],
                **{key: made[key] for key in ("code", "package", "profile", "device")}}))


def _same(old: dict, new: dict) -> bool:
    """Whether two records of runs differ in nothing but when they were made."""
    old, new = ({name: value for name, value in record.items() if name not in ("seconds", "commit", "digest")}
                for record in (old, new))
    return old == new


def _stamp(run: Path) -> dict:
    made = read_status(run)["stamp"]
    return {**made, "parameters": portable(made["parameters"])}


def _results(run: Path) -> dict:
    path = run / "results.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"metrics": {}, "figures": {}}


def _merge_streams(outputs: list) -> list:
    merged = []
    for output in outputs:
        if output.output_type == "stream":
            output.text = re.sub(r"^.*\r(?!\n)", "", output.text, flags=re.M)     # "\r" overwrites its line
            if merged and merged[-1].output_type == "stream" and merged[-1].name == output.name:
                merged[-1].text += output.text
                continue
        merged.append(output)
    return merged
