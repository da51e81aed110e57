"""What a number was made with: code, package, versions, device and commit."""
import ast
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

# Files of the package that cannot change what a notebook computes or draws.
_MACHINERY = {f"book/{name}.py" for name in ("run", "harvest", "lint", "claims", "pages", "chapters", "new_chapter")}


def digest(value) -> str:
    """First 16 hexadecimal digits of the SHA-256 of `value` as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def sealed(record: dict) -> dict:
    """`record` with a digest over all of it, so that a change by hand shows."""
    content = {name: value for name, value in record.items() if name != "digest"}
    return {**content, "digest": digest(content)}


def code_hash(notebook) -> str:
    """Hash of the code cells of an nbformat notebook; prose and parameters injected by papermill do not count."""
    return digest([cell.source.rstrip() for cell in notebook.cells
                   if cell.cell_type == "code" and "injected-parameters" not in cell.metadata.get("tags", [])])


def package_hash(source: Path) -> str:
    """Hash of the files of dit_repro that a chapter's source imports, directly or through others, with their data.

    A change elsewhere in the package does not make the chapter's outputs old.
    """
    root = Path(__file__).parents[1]
    files, pending = set(), [source]
    while pending:
        for file in _imported_files(root, pending.pop()) - files:
            files.add(file)
            pending.append(file)
    data = {path for folder in {file.parent for file in files} - {root} for path in folder.rglob("*")
            if path.is_file() and path.suffix not in (".py", ".pyc")}
    return digest([[path.relative_to(root).as_posix(), _sha256(*_version(path))] for path in sorted(files | data)])


def _version(path: Path) -> tuple:
    status = path.stat()
    return path, status.st_mtime_ns, status.st_size


@cache
def _sha256(path: Path, modified: int, size: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _imported_files(root: Path, source: Path) -> set[Path]:
    """Files of the package named by the imports of one Python file, wherever in it they stand."""
    modules = _imported_modules(root, *_version(source))
    files = {module.with_suffix(".py") for module in modules}
    files |= {folder / "__init__.py" for module in modules for folder in (module, *module.parents)}
    return {file for file in files if file.is_file() and root in file.parents
            and file.relative_to(root).as_posix() not in _MACHINERY}


@cache
def _imported_modules(root: Path, source: Path, modified: int, size: int) -> set[Path]:
    modules = set()
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise ValueError(f"{source.name}: line {error.lineno} is not valid Python: {error.msg}") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {root.parent.joinpath(*alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = source.parents[node.level - 1] if node.level else root.parent
            module = start.joinpath(*(node.module or "").split("."))
            modules |= {module, *(module / alias.name for alias in node.names)}
    return {module for module in modules if root in (module, *module.parents)}


def portable(parameters: dict) -> dict:
    """Parameters as they may be published: of an absolute path only the last part, since the rest is one machine's."""
    return {name: f".../{Path(value).name}" if isinstance(value, str) and os.path.isabs(value) else value
            for name, value in parameters.items()}


def versions() -> dict:
    """Versions of Python and of the libraries that change numbers, read without importing them."""
    return {"python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("torch", "diffusers", "timm", "numpy")}}


def device() -> str:
    """The GPU that torch sees, or the CPU model and its usable cores.

    torch is imported only where an NVIDIA driver is installed, so a card costs nothing on a CPU machine.
    """
    if "torch" in sys.modules or shutil.which("nvidia-smi"):
        import torch
        if torch.cuda.is_available():
            count = torch.cuda.device_count()
            return torch.cuda.get_device_name(0) + (f" x {count}" if count > 1 else "")
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
                 platform.processor() or platform.machine())
    model = re.sub(r"\((R|TM)\)| CPU| Processor", "", model)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"CPU, {cores} cores ({model})"


def commit(root: Path) -> str:
    """Short commit of the checkout, "-dirty" when the package or a chapter differs from it; "none" outside git."""
    def git(*arguments):
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True).stdout
    try:
        revision = git("rev-parse", "--short=12", "HEAD").strip()
        changed = git("status", "--porcelain", "--", "dit_repro", "book/*.py").strip()
    except (OSError, subprocess.CalledProcessError):
        return "none"
    return revision + ("-dirty" if changed else "")
