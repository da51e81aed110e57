"""Commands on a run that broke, or may have."""
import click

from dit_repro.cli.scoring import EXTRACTORS, feature_extractor, feature_weights_option


@click.group()
def stability():
    """Look into a run: capture a step, take it again, find what is wrong first."""


@stability.command()
@click.argument("run_folder", metavar="RUN_FOLDER")
@click.option("--step", required=True, type=click.IntRange(1), help="The step to capture; 1 is the first.")
@click.option("--out", metavar="FILE", help="[default: captures/step-STEP.safetensors in the run]")
@click.option("--fault", metavar="NAME", help="Plant a fault of dit_repro.stability.FAULTS into the step.")
def capture(run_folder, step, out, fault):
    """Keep everything of one step: inputs, draws, activations, losses, gradients, moments, update.

    The nearest earlier checkpoint is the start; the steps from there are replayed.
    """
    from pathlib import Path

    from dit_repro.stability import capture_step

    path = Path(out) if out else Path(run_folder) / "captures" / f"step-{step:08d}.safetensors"
    capture_step(run_folder, step, path, fault=fault)
    click.echo(f"wrote {path}, {path.stat().st_size / 1e6:.0f} MB")


@stability.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--precision", type=click.Choice(["fp64", "fp32", "tf32", "bf16", "fp16"]),
              help="[default: the captured one]")
@click.option("-o", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one setting; may be repeated.")
def replay(file, precision, overrides):
    """Take the captured step in FILE again and print how far each quantity moved."""
    from dit_repro.stability import replay

    click.echo(replay(file, precision, overrides).to_string(index=False, float_format="{:.3g}".format))


@stability.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--autoencoder", metavar="NAME", help="Check the pixels too, for a capture that holds its images.")
def localize(file, autoencoder):
    """Name the first quantity of a captured step that rounding cannot explain. Exit code 1 where there is one."""
    from dit_repro.latents import load_autoencoder
    from dit_repro.stability import Capture, localize_first_broken

    finding = localize_first_broken(Capture.load(file), load_autoencoder(autoencoder) if autoencoder else None)
    click.echo(finding.table().to_string(index=False, float_format="{:.2g}".format))
    if finding.first:
        raise ValueError(str(finding))
    click.echo(finding)


@stability.command()
@click.argument("run_folder", metavar="RUN_FOLDER")
@click.option("--samples", default=100, type=click.IntRange(0), help="Guided samples to look at; 0 for none.")
@click.option("--features", type=click.Choice(EXTRACTORS),
              help="[default: classifier for Fashion-MNIST, else inception]")
@feature_weights_option
def check(run_folder, samples, features, feature_weights):
    """What a run folder says: losses beside their baselines, when the loss broke and the alarm came, weights.

    And what its samples say: does the model use its labels, and does it repeat its training images?
    """
    from dit_repro.latents import LatentStore
    from dit_repro.latents.images import FASHION_MNIST_CLASSES
    from dit_repro.stability import check_behavior
    from dit_repro.stability.post_mortem import summary
    from dit_repro.training import RunFolder
    from dit_repro.training.parallel import DEVICE

    run = RunFolder(run_folder)
    click.echo("\n".join(summary(run)))
    if samples and run.checkpoints():
        known = LatentStore.open(run.config().latents).class_names == FASHION_MNIST_CLASSES
        extractor = feature_extractor(features or ("classifier" if known else "inception"), feature_weights, DEVICE)
        click.echo("\n".join(check_behavior(run, extractor, samples, DEVICE)))
