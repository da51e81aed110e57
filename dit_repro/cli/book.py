"""Commands on the book: run, publish, check, build."""
import sys

import click


@click.command()
@click.argument("chapters", nargs=-1)
@click.option("--profile", default="laptop", help="smoke, laptop, gpu, paper, gpu-rehearsal or paper-rehearsal")
@click.option("--data", metavar="FOLDER", help="where the images are; the same as -p data=FOLDER")
@click.option("--autoencoder", metavar="NAME", help="a name or a folder; the same as -p autoencoder=NAME")
@click.option("-p", "parameters", multiple=True, metavar="NAME=VALUE",
              help="set a parameter of the chapters that have it; repeatable")
@click.option("--timeout", type=int, help="seconds a cell may take, 0 for no limit [default: the profile's]")
@click.option("--fresh", is_flag=True, help="run chapters again whose code and settings have not changed")
@click.option("--build/--no-build", default=True, help="build the pages at the end")
def run(chapters, profile, data, autoencoder, parameters, timeout, fresh, build):
    """Run CHAPTERS (all without any; "03" is enough) and build the pages that show what was run."""
    from dit_repro.book.pages import build_pages
    from dit_repro.book.run import run_book
    from dit_repro.files import project_root

    given = [f"{name}={value}" for name, value in (("data", data), ("autoencoder", autoencoder)) if value]
    try:
        folder = run_book(project_root(), chapters, profile, [*given, *parameters], timeout, fresh, click.echo)
    except KeyboardInterrupt as stopped:
        click.echo(f"dit-repro: {stopped}", err=True)
        sys.exit(130)
    click.echo(f"notebooks, numbers and logs: {folder}")
    if build:
        click.echo(f"open {build_pages(project_root(), folder, strict=False)}")


@click.command()
@click.argument("run_folder", metavar="RUN_FOLDER")
@click.option("--results-only", is_flag=True, help="add the numbers, keep the committed pages")
@click.option("--check", is_flag=True, help="write nothing, fail when the run could not be published")
def harvest(run_folder, results_only, check):
    """Publish a run from _runs/ into the committed notebooks, results and scoreboard."""
    from pathlib import Path

    from dit_repro.book.harvest import harvest
    from dit_repro.files import project_root

    names = ", ".join(harvest(project_root(), Path(run_folder), results_only, check))
    click.echo(f"{'may be harvested:' if check else 'harvested'} {names}")


@click.command()
def lint():
    """Check that the committed book is what its sources say: pairs, stamps, outputs, claims."""
    from dit_repro.book.lint import lint
    from dit_repro.files import project_root

    problems = lint(project_root())
    for problem in problems:
        click.echo(problem)
    if errors := sum(problem.is_error for problem in problems):
        raise RuntimeError(f"{errors} problems keep the book from being published")


@click.command()
@click.option("--check", is_flag=True, help="write nothing, fail when something is out of date")
def scoreboard(check):
    """Compute the verdicts again: book/scoreboard.md, the tally, the claims tables of the chapters."""
    from dit_repro.book.claims import update
    from dit_repro.files import project_root

    changed = update(project_root(), check)
    click.echo("\n".join(changed) or "up to date")
    if check and changed:
        raise RuntimeError("out of date; run `dit-repro scoreboard`")


@click.command()
@click.option("--offline", is_flag=True, help="pages that load nothing from the network; needs npm once")
@click.pass_context
def book(ctx, offline):
    """Build the pages of the committed book, strictly: lint first, and a warning fails."""
    from dit_repro.book.pages import build_pages
    from dit_repro.files import project_root

    ctx.invoke(lint)
    click.echo(f"open {build_pages(project_root(), offline=offline)}")


@click.command("new-chapter")
@click.argument("number", type=int)
@click.argument("title")
def new_chapter(number, title):
    """Begin chapter NUMBER: a source and its notebook that obey the contract, listed in _toc.yml."""
    from dit_repro.book.new_chapter import new_chapter
    from dit_repro.files import project_root

    click.echo(new_chapter(project_root(), number, title).source)
