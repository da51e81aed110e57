"""Commands on runs: train, list, export, convert, and what one would cost."""
import sys

import click

WEIGHTS = {"ema": "ema", "raw": "model"}   # averaged, or as the optimizer left them: in an option, and in a file


@click.command()
@click.argument("run_folder", metavar="RUN_FOLDER")
@click.option("--config", "config_file", type=click.Path(exists=True, dir_okay=False), metavar="FILE.json",
              help="Settings of a new run.  [default: those in RUN_FOLDER]")
@click.option("-o", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one setting; may be repeated.")
def train(run_folder, config_file, overrides):
    """Train the run in RUN_FOLDER, or go on with it. Works under torchrun.

    SIGTERM, SIGUSR1 and Ctrl-C finish the step, save and exit with code 85: the same command goes on from there.
    torchrun itself exits with 1, and passes SIGUSR1 on only with --signals-to-handle.
    """
    import os
    from pathlib import Path

    from dit_repro.latents import LatentStore
    from dit_repro.training import RESUME_ME, RunFolder, TrainConfig, Trainer, advice

    config = TrainConfig.from_json(Path(config_file).read_text()) if config_file else RunFolder(run_folder).config()
    config = config.override(overrides)
    if os.environ.get("RANK", "0") == "0" and not RunFolder(run_folder).checkpoints():
        for sentence in advice(config, LatentStore.open(config.latents)):
            click.echo(f"note: {sentence}", err=True)
    if Trainer(config, run_folder, _preview(config) if config.preview_every else None).run() == "interrupted":
        sys.exit(RESUME_ME)


def _preview(config):
    """Draws the first eight classes with fixed seeds, side by side: (model, path) -> path.png."""
    import torch
    from PIL import Image

    from dit_repro.files import atomic_write
    from dit_repro.latents import LatentStore, load_autoencoder
    from dit_repro.sampling import Guidance, sample

    autoencoder = load_autoencoder(LatentStore.open(config.latents).manifest["autoencoder"]["id"])
    labels = torch.arange(min(8, config.num_classes))

    def draw(model, path):
        latents = sample(model, labels, config.noise_schedule(), "50", seeds=range(len(labels)),
                         guidance=Guidance(1.5))  # (N, C, h, w)
        row = torch.cat([*autoencoder.decode(latents)], dim=2).permute(1, 2, 0)  # (H, N * W, 3)
        with atomic_write(f"{path}.png", "wb") as file:
            Image.fromarray(row.numpy()).save(file, "PNG")

    return draw


@click.group(invoke_without_command=True)
@click.option("--folder", metavar="FOLDER", help="Where to look.  [default: runs/ in the workspace]")
@click.pass_context
def runs(ctx, folder):
    """List runs: state, step, checkpoints and their size, alarms."""
    if ctx.invoked_subcommand:
        return
    from contextlib import suppress
    from pathlib import Path

    from dit_repro.files import workspace
    from dit_repro.training import RunFolder

    root = Path(folder) if folder else workspace() / "runs"
    if folder and not root.is_dir():
        raise FileNotFoundError(f"no folder {root}: give the one that holds the runs")
    found = sorted(file.parent for file in root.glob("**/config.json") if (file.parent / "checkpoints").is_dir())
    click.echo(f"{len(found)} runs in {root}")
    for run in map(RunFolder, found):
        status, size = run.status(), 0
        for file in run.checkpoint_folder.glob("*"):
            with suppress(FileNotFoundError):   # a run that is training prunes its files
                size += file.stat().st_size
        alarms = [f"{event['kind']} at {event['step']}" for event in run.events() if event["event"] == "alarm"]
        click.echo(f"{run.path.relative_to(root)}: {status['state']} at step {status['step']} of "
                   f"{run.config().num_steps}; {len(run.checkpoints())} checkpoints, {size / 1e6:.0f} MB; "
                   f"alarms: {', '.join(alarms) or 'none'}{'; ' + status['reason'] if 'reason' in status else ''}")


@runs.command("verify")
@click.argument("run_folder", metavar="RUN_FOLDER")
def verify_run(run_folder):
    """Read every checkpoint of a run and compare it with its checksums."""
    from dit_repro.training import RunFolder

    RunFolder(run_folder).config()
    results = RunFolder(run_folder).verify()
    for path, problem in results:
        click.echo(f"{path.name}: {problem or 'good'}")
    if bad := sum(problem is not None for _, problem in results):
        raise ValueError(f"{bad} of {len(results)} checkpoints are damaged; a resumed run goes back to a good one")


@runs.command("export-ema")
@click.argument("run_folder", metavar="RUN_FOLDER")
@click.option("--step", type=int, help="[default: the newest checkpoint]")
@click.option("--out", metavar="FILE", help="[default: checkpoints/ema-STEP.safetensors in the run]")
def export_ema(run_folder, step, out):
    """Write the EMA weights alone, under the names of the released checkpoint."""
    from dit_repro.training import RunFolder

    click.echo(RunFolder(run_folder).export_ema(step, out))


@click.command()
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option("--to", required=True, type=click.Choice(["diffusers", "released"]),
              help="A DiTPipeline folder, or one plain state dict (.safetensors or .pt).")
@click.option("--weights", default="ema", type=click.Choice([*WEIGHTS]), help="Which of a training checkpoint.")
@click.option("--autoencoder", metavar="NAME",
              help="diffusers: embedded, stabilityai/sd-vae-ft-ema, or a folder; without, from_pretrained needs vae=.")
@click.option("--class-names", type=click.Path(exists=True, dir_okay=False), metavar="FILE",
              help="diffusers: one name a line.")
@click.option("--schedule", type=click.Choice(["linear", "cosine"]),
              help="diffusers: the schedule the model was trained with.  [default: the run's, else linear]")
def convert(source, destination, to, weights, autoencoder, class_names, schedule):
    """Convert a DiT: SRC is a checkpoint file, a run folder (its newest checkpoint) or a diffusers folder."""
    from pathlib import Path

    from dit_repro.models import from_diffusers, load_released_checkpoint, save_released_checkpoint, to_diffusers
    from dit_repro.training import RunFolder
    from dit_repro.training.checkpoints import checkpoint_path

    run = RunFolder(source)
    if steps := run.checkpoints():
        schedule, source = schedule or run.config().schedule, checkpoint_path(run.checkpoint_folder, "step", steps[-1])
    model = from_diffusers(source) if Path(source).is_dir() else load_released_checkpoint(source, WEIGHTS[weights])
    if to == "released":
        save_released_checkpoint(model, destination)
    else:
        if autoencoder:
            from dit_repro.latents import load_autoencoder
            autoencoder = load_autoencoder(autoencoder).model
        names = Path(class_names).read_text(encoding="utf-8").splitlines() if class_names else None
        to_diffusers(model, destination, autoencoder, names, schedule or "linear")
    click.echo(f"wrote {destination}" + "; read its README.md before sampling" * (to == "diffusers"))


@click.command()
@click.option("--profile", default="paper", help="smoke, laptop, gpu, paper, gpu-rehearsal or paper-rehearsal")
@click.option("-o", "overrides", multiple=True, metavar="KEY=VALUE",
              help="Change one training setting, such as model=DiT-XL/2; may be repeated.")
@click.option("--gpu", default="h100", help="a100, h100, h200, l40s or rtx4090")
@click.option("--gpus", default=1, type=click.IntRange(1), help="How many of them.")
@click.option("--images", type=click.IntRange(1), help="[default: the embedded 16,000, or ImageNet's 1,281,167]")
@click.option("--utilization", type=float, help="Share of the stated peak that is reached.  [default: 0.35]")
def plan(profile, overrides, gpu, gpus, images, utilization):
    """What a profile's training will cost: memory, disk and hours, without a GPU."""
    from dataclasses import replace

    from dit_repro.profiles import get_profile
    from dit_repro.speed.plan import plan_run

    profile = get_profile(profile)
    config, given = profile.train, {"images": images, "utilization": utilization}
    if profile.data.path == "embedded":
        config, given["images"] = replace(config, input_size=8, num_classes=10), images or 16_000
    for line in plan_run(config.override(overrides), gpu=gpu, gpus=gpus,
                         **{name: value for name, value in given.items() if value is not None}).lines():
        click.echo(line)
