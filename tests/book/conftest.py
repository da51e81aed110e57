"""A toy book in a temporary folder, and one real run of it that all tests share."""
import json
import os
import shutil
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADER = """# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---
"""
PARAMETERS = '''
# %% [markdown]
# # {title}
#
# A question?

# %% tags=["parameters"]
profile: str = "laptop"          # smoke, laptop, gpu or paper
flag: bool = True                # a switch
num_steps: int | None = None     # None takes the profile's
'''
GOOD = PARAMETERS.format(title="Good") + '''
# %%
import matplotlib.pyplot as plt

from dit_repro.book import start

run = start(globals())

# %% [markdown]
# ## A measured section
#
# The level is drawn in [figure 1.1](#fig-level).

# %%
run.record("half", 0.5, seeds=[0, 1, 2], interval=(0.4, 0.6))
run.record("flag_is", str(flag))
run.record("flag_type", type(flag).__name__)
run.say(r"One half is {half:.2f}, from {half.low} to {half.high}, and $\\frac{1}{2}$ stays; see [it](#fig-level).")

# %%
plt.plot([0, 1], [1, 0])
plt.show()

# %%
figure, axes = plt.subplots()
axes.plot([0, 1], [0.5, 0.5])
run.figure(figure, "The level {half}.", name="level", alt="a flat line", export=True)

# %%
print("a line")
print("another")

# %%
run.claims()
'''
KILLED = PARAMETERS.format(title="Killed") + '''
# %%
import os

with open(os.environ["DIT_REPRO_PROGRESS"], "a") as file:
    file.write("encode: 40% done\\n")

# %%
os._exit(137)

# %%
after = 1
'''
SLOW = PARAMETERS.format(title="Slow") + '''
# %%
import time

time.sleep(60)

# %%
after = 1
'''
EARLY_EXIT = PARAMETERS.format(title="Early exit").replace("flag", "switch") + '''
# %%
import sys

from dit_repro.book import start

run = start(globals())
run.record("switch_is", str(switch))
run.record("switch_type", type(switch).__name__)
sys.exit(0)

# %%
after = 1
'''
CLAIMS = """
- {id: half, claim: "Half is a half.", source: post, place: "above", notebook: 01_good, metric: half, needs: smoke,
   expect: 0.5, abs_tol: 0.01}
- {id: more, claim: "Half is more than that.", source: paper, place: "table 4", notebook: 01_good, metric: half,
   needs: smoke, above: 0.7}
- {id: later, claim: "A later chapter.", source: lesson, place: "end", notebook: 09_later, metric: nothing, below: 1}
"""


def make_book(root: Path, sources: dict[str, str]) -> Path:
    """A book with these chapters, the claims above and this project's configuration."""
    (root / "book").mkdir(parents=True)
    for name, source in sources.items():
        (root / "book" / f"{name}.py").write_text(HEADER + source, encoding="utf-8")
    chapters = "\n".join(f"      - file: book/{name}" for name in sources)
    (root / "_toc.yml").write_text("format: jb-book\nroot: book/index\nparts:\n  - caption: Chapters\n"
                                   f"    numbered: true\n    chapters:\n{chapters}\n"
                                   "  - caption: Results\n    chapters:\n"
                                   "      - file: book/scoreboard\n", encoding="utf-8")
    shutil.copy(ROOT / "_config.yml", root)
    shutil.copytree(ROOT / "book" / "_static", root / "book" / "_static")
    shutil.copy(ROOT / "book" / "references.bib", root / "book")
    (root / "book" / "claims.yml").write_text(CLAIMS, encoding="utf-8")
    (root / "book" / "index.md").write_text("# Toy\n\n<!-- tally -->\n<!-- /tally -->\n", encoding="utf-8")
    return root


@pytest.fixture(scope="session")
def executed(tmp_path_factory) -> Path:
    """A toy book with three runs: one of every fault but the slow one, the slow one, and the good chapter once more.

    Kernels are slow to start, so the workers of pytest-xdist share them: the first makes the runs, the others wait.
    """
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "executed-book"
    done = root.with_suffix(".done")
    try:
        root.mkdir()
    except FileExistsError:
        while not done.exists():
            time.sleep(0.2)
        if done.read_text() != "good":
            pytest.fail(done.read_text())
        return root
    try:
        _make_runs(root)
        done.write_text("good")
    except BaseException as error:
        done.write_text(f"the shared runs could not be made: {error!r}")
        raise
    return root


def _make_runs(root: Path) -> None:
    from dit_repro.book.run import run_book
    make_book(root, {"01_good": GOOD, "02_killed": KILLED, "03_slow": SLOW, "04_early_exit": EARLY_EXIT})
    shadow = root / "shadow" / "kernels" / "python3" / "kernel.json"
    shadow.parent.mkdir(parents=True)
    shadow.write_text(json.dumps({"argv": ["false"], "display_name": "shadow", "language": "python"}))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MPLBACKEND", "agg")
        environment.setenv("JUPYTER_PATH", str(shadow.parents[2]))
        lines = []
        with pytest.raises(RuntimeError) as failure:
            run_book(root, ["1", "2", "4"], "smoke", ["switch=false"], echo=lines.append)
        (root / "said.txt").write_text("\n".join([*lines, str(failure.value)]), encoding="utf-8")
        with pytest.raises(RuntimeError):
            run_book(root, ["03_slow"], "smoke", timeout=3, echo=lambda line: None)
        run_book(root, ["01"], "smoke", fresh=True, echo=lambda line: None)


@pytest.fixture
def book(tmp_path) -> Path:
    """A toy book whose one chapter was never run."""
    return make_book(tmp_path / "book-root", {"01_good": GOOD})


@pytest.fixture
def slow_book(tmp_path) -> Path:
    """A toy book of two chapters that print a word and sleep."""
    slow = SLOW.replace("import time", "import time\nprint('shown')")
    return make_book(tmp_path / "slow-root", {"01_slow": slow, "02_next": slow})


@pytest.fixture
def good_book(executed, book) -> Path:
    """A copy of the toy book holding only its good chapter, harvested from its run."""
    from dit_repro.book.harvest import harvest
    run = sorted((executed / "_runs").iterdir())[-1]
    shutil.copytree(run, book / "_runs" / run.name)
    harvest(book, book / "_runs" / run.name)
    return book
