"""Commands that measure time and memory."""
import click


@click.group()
def bench():
    """Measure speed, against peers and against the device's limit."""


@bench.command()
@click.option("--model", default="DiT-B/2", help="A name in the paper's table, or DiT-nano/2.")
@click.option("--batch", default=256, type=click.IntRange(1), help="Images a step.")
@click.option("--input-size", default=32, type=click.IntRange(2), help="Of the latents; 32 is 256 tokens at patch 2.")
@click.option("--device", metavar="DEVICE", help="[default: cuda if there is one, else cpu]")
@click.option("--compile/--no-compile", default=None, help="[default: on a GPU]")
@click.option("--repeats", default=5, type=click.IntRange(5), help="Rounds over all rungs.")
@click.option("--out", metavar="FILE.json", help="Write every number there, and a chart beside it.")
def ladder(model, batch, input_size, device, compile, repeats, out):
    """One training step, faster one change at a time, each change also alone; float32 at the bottom."""
    from pathlib import Path

    from dit_repro.files import write_json
    from dit_repro.speed.ladder import run_ladder
    from dit_repro.speed.report import ladder_figure, ladder_table
    from dit_repro.training.parallel import DEVICE

    result = run_ladder(model, batch, device or DEVICE, input_size=input_size, compile=compile, repeats=repeats)
    click.echo("\n".join(ladder_table(result)))
    if out:
        write_json(out, result)
        ladder_figure(result).savefig(Path(out).with_suffix(".svg"))


@bench.command("gpu-check")
@click.argument("out", metavar="OUT.json")
def gpu_check(out):
    """The ladder for S/2 and B/2, and XL/2's memory, on one GPU in six minutes."""
    from dit_repro.speed.gpu_check import gpu_check

    for reading in gpu_check(out):
        click.echo(reading)


def _add_benchmark(name, help):
    @bench.command(name, help=help)
    def run_benchmarks():
        from dit_repro.speed.benchmarks import BENCHMARKS

        for benchmark in BENCHMARKS.values() if name == "all" else [BENCHMARKS[name]]:
            for reading in benchmark():
                click.echo(reading)


for _name, _help in {
    "all": "Every benchmark below.",
    "step": "A training step against diffusers' model of the same size.",
    "sampling": "50 guided steps against DiTPipeline.",
    "store": "Reading latents against one file an image, and at ImageNet's size.",
    "disk": "What the disk reads for a random row of a store that is not in memory.",
    "encode": "The autoencoder over the embedded images.",
    "frechet": "The Frechet distance against scipy's matrix square root.",
    "startup": "How long the command line takes to answer.",
    "book": "Every chapter at the smoke profile.",
}.items():
    _add_benchmark(_name, _help)
