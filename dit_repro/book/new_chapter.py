"""Begin a chapter that obeys the notebook contract."""
import re
from pathlib import Path

from dit_repro.book.chapters import Chapter, chapters
from dit_repro.book.harvest import unexecuted
from dit_repro.files import atomic_write

_SOURCE = '''# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # {title}
#
# **The question?** The short answer, with the place in the paper or the post where it is claimed.
#
# Minutes on two CPU cores: smoke 1, laptop 5.

# %% tags=["parameters"]
profile: str = "laptop"    # smoke, laptop, gpu or paper
seed: int = 0              # of every draw in this chapter

# %%
from dit_repro.book import start

run = start(globals())

# %% [markdown]
# ## First section
#
# *Predict:* what will the number be?

# %%
run.record("{metric}", seed + 1)

# %%
run.say("The number is {{{metric}}}.")

# %% [markdown]
# <details><summary>Why</summary>
#
# Explain the difference between the guess and the measurement.
#
# </details>

# %% [markdown]
# ## Claims

# %%
run.claims()

# %% [markdown]
# ## What could not be shown at this scale
#
# Say it.
'''


def new_chapter(root: Path, number: int, title: str) -> Chapter:
    """Write book/NN_title.py with its pair and list it in _toc.yml; FileExistsError if the number is taken."""
    slug = re.sub(r"[^a-z0-9]+", "_", title.lower()).strip("_")
    if not slug or not 0 < number < 100:
        raise ValueError(f"a chapter needs a number from 1 to 99 and a title with letters, not {number} and {title!r}")
    name = f"{number:02d}_{slug}"
    if taken := sorted((root / "book").glob(f"{number:02d}_*")):
        raise FileExistsError(f"chapter {number} exists already: {taken[0].name}")
    toc = (root / "_toc.yml").read_text(encoding="utf-8")
    before = [chapter.name for chapter in chapters(root) if chapter.name < name]
    lines = toc.splitlines()
    at = next(index for index, line in enumerate(lines) if (f"book/{before[-1]}" if before else "chapters:") in line)
    indent = re.match(r"\s*", lines[at])[0] + ("" if before else "  ")
    lines.insert(at + 1, f"{indent}- file: book/{name}")
    chapter = Chapter(root / "book" / f"{name}.py")
    with atomic_write(chapter.source) as file:
        file.write(_SOURCE.format(title=title, metric=f"chapter_{number}_number"))
    import nbformat
    with atomic_write(chapter.pair) as file:
        file.write(nbformat.writes(unexecuted(chapter)) + "\n")
    with atomic_write(root / "_toc.yml") as file:
        file.write("\n".join(lines) + "\n")
    return chapter
