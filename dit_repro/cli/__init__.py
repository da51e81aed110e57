"""`dit-repro`: every command, a few lines each, in one file a theme. Imports live inside them, so --help is instant."""
import sys

import click

from dit_repro.cli import book, data, sampling, scoring, speed, stability, training


class _Commands(click.Group):
    """Turns an error that a user can act on into one line and exit code 1."""

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.Abort):  # both are RuntimeErrors: --help, Ctrl-C
            raise
        except (ValueError, OSError, RuntimeError, ImportError) as error:
            click.echo(f"dit-repro: {error}", err=True)
            sys.exit(1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
def main():
    """Replicate Scalable Diffusion Models with Transformers: run the book, or one part of it."""


for command in (data.embed, data.encode, data.latents, training.train, training.runs, training.convert, training.plan,
                sampling.sample, scoring.fid, speed.bench, stability.stability, book.run, book.harvest, book.lint,
                book.scoreboard, book.book, book.new_chapter):
    main.add_command(command)
