import re

import pytest

from dit_repro.book.chapters import PROFILES, REHEARSALS, Parameter, cast_parameters, chapters, select_chapters
from dit_repro.book.run import _locate_data, run_book


@pytest.fixture
def book_of_two(book):
    """The toy book with a parameter `data`, and a second chapter whose `flag` is called `switch`."""
    source = book / "book" / "01_good.py"
    text = source.read_text()
    source.write_text(text.replace("flag: bool", 'data: str = ""\nflag: bool'))
    (book / "book" / "02_other.py").write_text(text.replace("flag", "switch"))
    toc = book / "_toc.yml"
    toc.write_text(toc.read_text().replace("      - file: book/01_good", "      - file: book/01_good\n"
                                           "      - file: book/02_other"))
    return book


def test_the_book_and_the_experiments_name_the_same_profiles():
    from dit_repro.profiles import PROFILES as experiments
    assert tuple(experiments) == (*PROFILES, *REHEARSALS)


@pytest.mark.parametrize("annotation, text, value", [
    ("bool", "false", False), ("bool", "True", True),
    ("int", "50", 50), ("int", "1_000", 1000),
    ("float", "1e-3", 0.001), ("float", "2", 2.0),
    ("str", "false", "false"), ("str", "3", "3"),
    ("int | None", "none", None), ("int | None", "7", 7), ("int | float", "0.5", 0.5), ("str | None", "x", "x"),
    ("list", "[1, 'a']", [1, "a"]), ("list[int]", "[1, 2]", [1, 2]), ("list[float]", "[1, 0.5]", [1, 0.5]),
    ("dict", "{'a': 1}", {"a": 1}),
])
def test_a_parameter_gets_the_declared_type(annotation, text, value):
    cast = Parameter("name", annotation, None).cast(text)
    assert cast == value and type(cast) is type(value)


@pytest.mark.parametrize("annotation, text", [
    ("bool", "0"), ("bool", "yes"), ("int", "1.5"), ("int", "many"), ("int", "none"), ("float", "fast"),
    ("list", "1"), ("list", "[1"), ("list[int]", "['a']"), ("list[int]", "[1.5]"), ("dict", "[1]"),
    ("int | None", "1.5"),
])
def test_a_value_of_another_type_is_refused_with_the_type(annotation, text):
    with pytest.raises(ValueError, match=r"name=.*is not of type " + re.escape(annotation)):
        Parameter("name", annotation, None).cast(text)


def test_chapters_are_chosen_by_number_or_name_in_reading_order(executed):
    names = [chapter.name for chapter in select_chapters(executed, ["4", "01", "03_slow", "4"])]
    assert names == ["01_good", "03_slow", "04_early_exit"]
    assert select_chapters(executed) == chapters(executed)


@pytest.mark.parametrize("wanted, profile, overrides, message", [
    (["9"], "smoke", [], "unknown chapter '9'; the chapters are 01_good"),
    ([], "tiny", [], "unknown profile 'tiny'; the profiles are smoke, laptop, gpu, paper"),
    ([], "smoke", ["num_step=5"], "unknown parameter 'num_step=5'; give NAME=VALUE with one of data, flag, num_steps"),
    ([], "smoke", ["flag"], "unknown parameter 'flag'"),
    ([], "smoke", ["profile=gpu"], "chosen with --profile"),
    ([], "smoke", ["flag=0"], "flag='0' is not of type bool"),
    (["1"], "smoke", ["switch=true"], "one of data, flag, num_steps; switch is a parameter of 02_other"),
    ([], "smoke", ["data=nowhere"], "data=nowhere: expected a folder with the four Fashion-MNIST IDX files, or with "
     "train/ and val/ that hold a folder for each class (ImageNet's layout); there is no such folder"),
    ([], "smoke", ["data=book"], "found neither there"),
])
def test_a_typing_error_stops_before_anything_runs(book_of_two, wanted, profile, overrides, message, monkeypatch):
    monkeypatch.chdir(book_of_two)
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
        run_book(book_of_two, wanted, profile, overrides)
    assert not (book_of_two / "_runs").exists()


def test_a_folder_given_relative_to_the_user_reaches_the_kernel_as_the_same_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)          # a kernel works in book/
    (tmp_path / "mine" / "train").mkdir(parents=True)
    (tmp_path / "mine" / "val").mkdir()
    values = {"data": "mine", "autoencoder": "stabilityai/sd-vae-ft-ema"}
    _locate_data(values)
    assert values == {"data": str(tmp_path / "mine"), "autoencoder": "stabilityai/sd-vae-ft-ema"}
    (tmp_path / "idx").mkdir()
    (tmp_path / "idx" / "t10k-images-idx3-ubyte.gz").touch()
    for value in ("embedded", "", "idx"):
        _locate_data({"data": value, "autoencoder": "embedded"})
    with pytest.raises(FileNotFoundError, match=r"autoencoder=\./vae: no such folder; expected a folder"):
        _locate_data({"autoencoder": "./vae"})
    values = {"official": "idx/t10k-images-idx3-ubyte.gz", "first_recipe": "", "clip": "mine"}
    _locate_data(values)
    assert values == {"official": str(tmp_path / "idx" / "t10k-images-idx3-ubyte.gz"), "first_recipe": "",
                      "clip": str(tmp_path / "mine")}
    with pytest.raises(FileNotFoundError, match="clip=CLIP: there is no such file"):
        _locate_data({"clip": "CLIP"})


def test_a_parameter_reaches_only_the_chapters_that_declare_it(executed):
    source = executed / "book" / "04_early_exit.py"
    without = [line for line in source.read_text().splitlines(keepends=True) if not line.startswith("flag:")]
    source.write_text("".join(without))
    values = cast_parameters(select_chapters(executed, ["1", "4"]), "gpu", ["flag=false"])
    assert values == {"01_good": {"profile": "gpu", "flag": False}, "04_early_exit": {"profile": "gpu"}}


@pytest.mark.parametrize("line", ["scale = 2.0", "scale: float = 2.0 * 2", "scale: tuple = (1, 2)", "import os"])
def test_a_parameters_cell_may_hold_annotated_literals_only(book, line):
    source = book / "book" / "01_good.py"
    source.write_text(source.read_text().replace("flag: bool = True", f"{line}\nflag: bool = True"))
    with pytest.raises(ValueError, match="parameters cell may hold only"):
        _ = chapters(book)[0].parameters
