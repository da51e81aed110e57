"""Commands that draw pictures."""
import click

from dit_repro.cli.training import WEIGHTS


@click.command()
@click.argument("run_folder", metavar="RUN_FOLDER")
@click.argument("out", metavar="OUT_FOLDER")
@click.option("--class", "classes", multiple=True, metavar="NAME", help="Of the training folder; may be repeated.  "
                                                                        "[default: every class]")
@click.option("--per-class", default=8, type=click.IntRange(1), help="Images of each class.")
@click.option("--step", type=click.IntRange(0), help="Checkpoint.  [default: the newest]")
@click.option("--weights", default="ema", type=click.Choice([*WEIGHTS]), help="Averaged or as trained.")
@click.option("--steps", default="250", metavar="COUNT", help="Sampling steps, of the schedule of the training.")
@click.option("--guidance", default=1.5, help="Scale; 1 is none.")
@click.option("--seed", default=0, type=click.IntRange(0), help="Of the first image of a class; the others follow it.")
@click.option("--autoencoder", metavar="NAME|FOLDER", help="[default: the one that the run's latents were made with]")
@click.option("--batch-size", default=64, type=click.IntRange(1), help="Images at once.")
def sample(run_folder, out, classes, per_class, step, weights, steps, guidance, seed, autoencoder, batch_size):
    """Draw pictures from the run in RUN_FOLDER: OUT_FOLDER/CLASS/SEED.png. Pictures that are there are kept."""
    import json
    from pathlib import Path

    from PIL import Image

    from dit_repro.files import atomic_write, write_json
    from dit_repro.latents import LatentStore, load_autoencoder
    from dit_repro.sampling import Guidance
    from dit_repro.sampling import sample as draw
    from dit_repro.training import RunFolder
    from dit_repro.training.parallel import DEVICE

    run = RunFolder(run_folder)
    config = run.config()
    store = LatentStore.open(config.latents)
    if unknown := [name for name in classes if name not in store.class_names]:
        raise ValueError(f"no class {', '.join(unknown)}; the classes are {', '.join(store.class_names)}")
    wanted = [(name, seed + i, Path(out) / name / f"{seed + i:06d}.png")
              for name in classes or store.class_names for i in range(per_class)]
    missing = [row for row in wanted if not row[2].exists()]
    decoder = load_autoencoder(autoencoder or store.manifest["autoencoder"]["id"], DEVICE)
    if decoder.sha256 != store.manifest["autoencoder"]["sha256"]:
        click.echo(f"note: {decoder} is not the autoencoder of the training latents, "
                   f"{store.manifest['autoencoder']['id']}: pictures may be off in color and contrast", err=True)
    step = max(run.checkpoints(), default=None) if step is None else step
    settings = {"run": str(run.path.resolve()), "step": step, "weights": weights, "steps": steps, "guidance": guidance,
                "autoencoder": decoder.sha256}
    note = Path(out) / ".settings.json"   # hidden, since scores are computed from this folder
    held = json.loads(note.read_text()) if note.is_file() else settings
    if changed := [f"{name} {held[name]} is now {settings[name]}" for name in settings if held[name] != settings[name]]:
        raise ValueError(f"{out} holds pictures drawn under other settings ({', '.join(changed)}): use another folder")
    model = run.load_model(step, ema=weights == "ema").to(DEVICE)
    for first in range(0, len(missing), batch_size):
        part = missing[first:first + batch_size]
        latents = draw(model, [store.class_names.index(name) for name, _, _ in part],
                       config.noise_schedule(), steps, seeds=[seed for _, seed, _ in part],
                       guidance=Guidance(guidance), batch_size=batch_size)
        write_json(note, settings)   # once they have proved to be valid, and before the first picture
        for image, (_, _, path) in zip(decoder.decode(latents), part):
            with atomic_write(path, "wb") as file:
                Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "PNG")
    click.echo(f"{out}: {len(missing)} pictures drawn, {len(wanted) - len(missing)} were there")
