"""The reference page: every public name with its signature and docstring, read from the sources without importing."""
import ast
import re
from functools import cache
from pathlib import Path

ROOMS = ("profiles", "latents", "models", "diffusion", "training", "sampling", "evaluation", "speed", "stability",
         "book")
PAGE = "book/api"   # in _toc.yml; its text is made when the pages are built
HEADER = """# Reference

What notebooks import, room by room; data flows through the rooms in this order. Shapes are in the docstrings: *N*
images, *C* channels, *H* by *W* cells.
"""


def api_page(package: Path) -> str:
    """Markdown for book/api.md, from the `__all__` of each room of `package`."""
    parts = [HEADER]
    for room in ROOMS:
        tree = _parse(package / room / "__init__.py")
        parts.append(f"## dit_repro.{room}\n\n{ast.get_docstring(tree) or ''}\n")
        parts += [f"{_entry(name, node, file)}\n*In `{file.relative_to(package.parent).as_posix()}`.*\n"
                  for name, node, file in _public(package, room, tree)]
    return "\n".join(parts)


@cache   # asked again for every name that a room lists
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _public(package: Path, room: str, tree: ast.Module):
    """The names of `__all__` in alphabetical order, each with the node that defines it and that node's file."""
    listed = next((ast.literal_eval(node.value) for node in tree.body
                   if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"), [])
    for name in sorted(listed, key=str.lower):
        yield name, *_definition(package, package / room / "__init__.py", name)


def _definition(package: Path, file: Path, name: str) -> tuple[ast.stmt, Path]:
    """The node that defines a name, found by following imports from `file`, and its file."""
    for node in _parse(file).body:
        assigned = [getattr(target, "id", None) for target in getattr(node, "targets", ())]
        if name in (getattr(node, "name", None), *assigned):
            return node, file
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            start = file.parent if node.level else package.parent
            module = start.joinpath(*node.module.split("."))
            return _definition(package, module / "__init__.py" if module.is_dir() else module.with_suffix(".py"), name)
    raise ValueError(f"{file} lists {name} and does not define it")


def _arguments(method: ast.FunctionDef) -> str:
    return re.sub(r"^(self|cls)(, )?", "", ast.unparse(method.args))


def _entry(name: str, node: ast.stmt, file: Path) -> str:
    if isinstance(node, ast.Assign):
        line = file.read_text(encoding="utf-8").splitlines()[node.lineno - 1]
        code, _, comment = line.partition("  # ")
        if isinstance(node.value, ast.Dict):
            code = f"{name} = {{{', '.join(f'{ast.unparse(key)}: ...' for key in node.value.keys)}}}"
        return f"### {name}\n\n```python\n{code.rstrip()}\n```\n\n{comment.strip()}\n"
    text = ast.get_docstring(node) or ""
    if isinstance(node, ast.ClassDef):
        fields = [ast.unparse(part) for part in node.body if isinstance(part, ast.AnnAssign)
                  and not part.target.id.startswith("_")]
        methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
        start = next((part for part in methods if part.name == "__init__"), None)
        head = f"class {name}" + (f"({_arguments(start)})" if start else "")
        code = "\n".join([head, *(f"    {field}" for field in fields)])
        shown = [f"- `{part.name}({_arguments(part)})`: "
                 + (ast.get_docstring(part) or "").partition("\n\n")[0].replace("\n", " ")
                 for part in methods if not part.name.startswith("_") and ast.get_docstring(part)]
        return f"### {name}\n\n```python\n{code}\n```\n\n{text}\n\n" + "\n".join(shown) + "\n"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"### {name}\n\n```python\n{name}({ast.unparse(node.args)}){returns}\n```\n\n{text}\n"
