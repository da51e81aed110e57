"""`dit-repro`: every command of the book, a few lines each. Imports live inside the commands, so --help is instant."""
import sys

import click


class _Commands(click.Group):
    """Turns an error that a user can act on into one line and exit code 1."""

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.Abort):  # both are RuntimeErrors: --help, Ctrl-C
            raise
        except (ValueError, FileNotFoundError, FileExistsError, RuntimeError) as error:
            click.echo(f"dit-repro: {error}", err=True)
            sys.exit(1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
def main():
    """Replicate Scalable Diffusion Models with Transformers: run the book, or one part of it."""


@main.group()
def embed():
    """Make the data files inside the package again."""


@embed.command("images")
@click.option("--idx", required=True, metavar="FOLDER", help="Folder with the four Fashion-MNIST IDX files.")
@click.option("--out", metavar="FOLDER", help="Where to write.  [default: the package's own folder]")
def embed_images(idx, out):
    """The 20,000 embedded images: the same files from the same input."""
    from dit_repro.latents.images import EMBEDDED, make_embedded_images

    make_embedded_images(idx, out or EMBEDDED)
    click.echo(f"wrote 16,000 train and 4,000 test images to {out or EMBEDDED}")


@embed.command("autoencoder")
@click.option("--out", required=True, metavar="FOLDER", help="Where to write; load it with --autoencoder FOLDER.")
@click.option("--num-steps", default=2_000, type=click.IntRange(25), help="Training steps at batch 64.")
def embed_autoencoder(out, num_steps):
    """The embedded autoencoder, trained on the embedded images (20 minutes on two idle cores)."""
    from dit_repro.latents import ImageSource, psnr, train_autoencoder

    autoencoder = train_autoencoder(out, ImageSource.embedded("train"), num_steps)
    images = ImageSource.embedded("test").images(range(4_000))
    click.echo(f"held-out PSNR {psnr(autoencoder, images):.2f} dB, {psnr(autoencoder, images, border=2):.2f} dB inside "
               f"the padding; scale factor {autoencoder.scale_factor:.5f}")


@embed.command("classifier")
@click.option("--idx", required=True, metavar="FOLDER", help="Folder with the four Fashion-MNIST IDX files.")
@click.option("--out", metavar="FOLDER", help="Where to write.  [default: the package's own folder]")
def embed_classifier(idx, out):
    """The small classifier that judges samples, trained on the full 60,000 images (8 minutes on one core)."""
    from dit_repro.evaluation.classifier import EMBEDDED, accuracy, save_classifier, train_classifier
    from dit_repro.latents import ImageSource

    train, test = ImageSource.idx(idx, "train"), ImageSource.embedded("test")
    classifier = train_classifier(train.images(range(len(train))), train.labels, train.class_names)
    images = test.images(range(len(test)))
    plain, flipped = (accuracy(classifier, x, test.labels) for x in (images, images.flip(-1)))
    save_classifier(classifier, out or EMBEDDED, held_out_accuracy=plain, held_out_accuracy_flipped=flipped)
    click.echo(f"held-out accuracy {plain:.2%}, flipped {flipped:.2%}; wrote {out or EMBEDDED}")


@main.command()
@click.argument("out", metavar="STORE")
@click.option("--images", default="embedded", metavar="embedded|FOLDER",
              help="Images to encode; a FOLDER holds Fashion-MNIST IDX files or a folder of images for each class.")
@click.option("--split", default="train", type=click.Choice(["train", "test"]), help="Of Fashion-MNIST.")
@click.option("--resolution", default=256, type=click.IntRange(8), metavar="PIXELS", help="Crop, for class folders.")
@click.option("--on-damaged", default="raise", type=click.Choice(["raise", "skip"]), help="For an unreadable image.")
@click.option("--autoencoder", metavar="NAME|FOLDER",
              help="embedded, stabilityai/sd-vae-ft-ema, stabilityai/sd-vae-ft-mse or a diffusers folder.  "
                   "[default: embedded for Fashion-MNIST, stabilityai/sd-vae-ft-ema for class folders]")
@click.option("--batch-size", default=64, type=click.IntRange(1), help="Images a forward pass, on each rank.")
@click.option("--shard-size", default=8192, type=click.IntRange(1), help="Images a file; what a kill can lose.")
@click.option("--dtype", default="float16", type=click.Choice(["float16", "float32"]), help="Of the stored moments.")
@click.option("--workers", type=click.IntRange(0), help="Image decoding processes.  [default: one a core, at most 8]")
@click.option("--device", metavar="DEVICE", help="[default: this rank's GPU if there is one, else cpu]")
def encode(out, images, split, resolution, on_damaged, autoencoder, batch_size, shard_size, dtype, workers, device):
    """Encode images into a latent STORE, plain and flipped. Killed, it goes on when run again. Works under torchrun."""
    import os
    from pathlib import Path

    import torch

    from dit_repro.latents import ImageSource, encode_to_store, load_autoencoder

    class_folders = images != "embedded" and not list(Path(images).glob("*-ubyte*"))
    if class_folders:
        source = ImageSource.folder(images, resolution, on_damaged)
    else:
        source = ImageSource.embedded(split) if images == "embedded" else ImageSource.idx(images, split)
    autoencoder = autoencoder or ("stabilityai/sd-vae-ft-ema" if class_folders else "embedded")
    device = device or (f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
    store = encode_to_store(source, load_autoencoder(autoencoder, device), out, batch_size, shard_size, dtype, workers)
    click.echo(f"{out}: {len(store)} images of {store.num_classes} classes, {len(store.manifest['skipped'])} left out")


@main.group()
def latents():
    """Look at a latent store."""


@latents.command()
@click.argument("store")
def verify(store):
    """Compare every file of a latent STORE with its checksum."""
    from dit_repro.latents import LatentStore

    opened = LatentStore.open(store)
    opened.verify()
    click.echo(f"{store}: {len(opened)} images in {len(opened.manifest['shards'])} shards, every checksum matches")


@latents.command()
@click.argument("store")
def info(store):
    """Print what a latent STORE holds and what it was made from."""
    from dit_repro.latents import LatentStore

    manifest = LatentStore.open(store).manifest
    lists = {key: len(manifest[key]) for key in ("class_names", "shards", "skipped")}
    for key, value in {**manifest, **lists}.items():
        click.echo(f"{key:15} {value}")


@main.command()
@click.argument("run_folder", metavar="RUN_FOLDER")
@click.option("--config", "config_file", type=click.Path(exists=True, dir_okay=False), metavar="FILE.json",
              help="Settings of a new run.  [default: those in RUN_FOLDER]")
@click.option("-o", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one setting; may be repeated.")
def train(run_folder, config_file, overrides):
    """Train the run in RUN_FOLDER, or go on with it. Works under torchrun.

    SIGTERM, SIGUSR1 and Ctrl-C finish the step, save and exit with code 85: the same command goes on from there.
    """
    from pathlib import Path

    from dit_repro.training import RESUME_ME, RunFolder, TrainConfig, Trainer

    config = TrainConfig.from_json(Path(config_file).read_text()) if config_file else RunFolder(run_folder).config()
    config = config.override(overrides)
    if Trainer(config, run_folder, _preview(config) if config.preview_every else None).run() == "interrupted":
        sys.exit(RESUME_ME)


def _preview(config):
    """Draws the first eight classes with fixed seeds, side by side: (model, path) -> path.png."""
    import torch
    from PIL import Image

    from dit_repro.diffusion import NoiseSchedule
    from dit_repro.files import atomic_write
    from dit_repro.latents import LatentStore, load_autoencoder
    from dit_repro.sampling import Guidance, sample

    autoencoder = load_autoencoder(LatentStore.open(config.latents).manifest["autoencoder"]["id"])
    labels = torch.arange(min(8, config.num_classes))

    def draw(model, path):
        latents = sample(model, labels, getattr(NoiseSchedule, config.schedule)(), "50", seeds=range(len(labels)),
                         guidance=Guidance(1.5))  # (N, C, h, w)
        row = torch.cat([*autoencoder.decode(latents)], dim=2).permute(1, 2, 0)  # (H, N * W, 3)
        with atomic_write(f"{path}.png", "wb") as file:
            Image.fromarray(row.numpy()).save(file, "PNG")

    return draw


@main.group()
def fid():
    """Score images, and test what scores them."""


def _extractor(features, weights, device="cpu"):
    from dit_repro.evaluation import DinoFeatures, InceptionFeatures, load_classifier

    if features == "dinov2" and not weights:
        raise ValueError("--features dinov2 needs --weights FILE.safetensors, from timm's page on the Hugging Face hub")
    made = {"classifier": load_classifier, "inception": lambda: InceptionFeatures(weights),
            "dinov2": lambda: DinoFeatures(weights)}[features]()
    return made.to(device)


features_option = click.option("--features", default="inception",
                               type=click.Choice(["inception", "classifier", "dinov2"]),
                               help="inception is FID's; classifier is embedded, for 32x32 Fashion-MNIST.")
weights_option = click.option("--weights", metavar="FILE", help="Of the features.  [default: torch's cache, inception]")


@fid.command()
@click.argument("samples", metavar="SAMPLES")
@click.option("--reference", required=True, metavar="REFERENCE",
              help="A folder, an .npz of images, or an .npz with mu and sigma (ADM's reference batches).")
@click.option("--mode", default="adm", type=click.Choice(["adm", "strict"]),
              help="adm: as published. strict: order-proof Inception Score, float32 precision and recall.")
@features_option
@weights_option
@click.option("--reference-count", type=click.IntRange(2), metavar="N",
              help="Images behind mu and sigma, where the file does not say (ImageNet: 1281167).")
@click.option("--cache", metavar="FOLDER", help="Keep features here: a killed command goes on. Needed under torchrun.")
@click.option("--out", metavar="FILE.json", help="Also write scores and protocol.")
def score(samples, reference, mode, features, weights, reference_count, cache, out):
    """Score SAMPLES, a folder or an .npz, against a reference. Works under torchrun."""
    from dit_repro.evaluation import evaluate
    from dit_repro.files import write_json
    from dit_repro.training.parallel import connect

    with connect() as ranks:
        extractor = _extractor(features, weights, ranks.device)
        scores = evaluate(samples, reference, extractor, mode, cache=cache, reference_count=reference_count)
        if ranks.is_main:
            click.echo(scores.report())
            if out:
                write_json(out, scores.to_json())


@fid.command()
@click.option("--images", metavar="FOLDER|NPZ", help="Real images.  [default: embedded Fashion-MNIST]")
@click.option("--features", default="classifier", type=click.Choice(["inception", "classifier", "dinov2"]))
@weights_option
@click.option("--adm-samples", metavar="NPZ", help="Instead: score this public file with Inception features ...")
@click.option("--adm-reference", metavar="NPZ", help="... against this one, and compare with what ADM published.")
@click.option("--anchor", default="ADM-G+U 256", type=click.Choice(["ADM-G+U 256", "ADM-G 128"]),
              help="Which public file it is.")
@click.option("--cache", metavar="FOLDER", help="Keep the features of the public files here.")
def doctor(images, features, weights, adm_samples, adm_reference, anchor, cache):
    """Plant known faults and show what each does to a score; or reproduce published scores from public files."""
    import torch

    from dit_repro.evaluation import check_anchors, diagnose, evaluate
    from dit_repro.evaluation.image_sets import open_images

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if bool(adm_samples) != bool(adm_reference):
        raise ValueError("--adm-samples and --adm-reference go together")
    if adm_samples:
        extractor = _extractor("inception", weights, device)
        scores = evaluate(adm_samples, adm_reference, extractor, cache=cache, reference_count=1_281_167)
        rows = check_anchors(scores, anchor)
        for row in rows:
            click.echo(f"{'pass' if row.passed else 'FAIL'}  {row.score:16} {row.measured:10.4f}, published "
                       f"{row.published} +- {row.tolerance}")
        bad = sum(not row.passed for row in rows)
    else:
        labels = None
        if images is None:
            from dit_repro.latents import ImageSource
            labels = (images := ImageSource.embedded("test")).labels
        opened = open_images(images)
        some = torch.linspace(0, opened.count - 1, min(opened.count, 5_000)).round().long().tolist()
        findings = diagnose(_extractor(features, weights, device), torch.cat([opened.read(i, i + 1) for i in some]),
                            None if labels is None else labels[some])
        for f in findings:
            click.echo(f"{f.verdict:12} {f.fault:38} {f.score:32} {f.before:9.4f} -> {f.after:9.4f} +- {f.noise:.4f}")
        bad = sum(f.verdict == "wrong" for f in findings)
    if bad:
        raise RuntimeError(f"{bad} results are not what they should be: do not trust a score of this setup")


@fid.command()
@click.argument("samples", metavar="SAMPLES")
@click.argument("out", metavar="OUT.npz")
def npz(samples, out):
    """Write the images of a folder as the .npz that the ADM evaluator reads, a batch in memory at a time."""
    from dit_repro.evaluation import write_npz

    write_npz(out, samples)
    click.echo(f"wrote {out}")


@main.group(invoke_without_command=True)
@click.option("--folder", metavar="FOLDER", help="Where to look.  [default: runs/ in the workspace]")
@click.pass_context
def runs(ctx, folder):
    """List runs: state, step, checkpoints and their size, alarms."""
    if ctx.invoked_subcommand:
        return
    from pathlib import Path

    from dit_repro.files import workspace
    from dit_repro.training import RunFolder

    root = Path(folder) if folder else workspace() / "runs"
    found = sorted(file.parent for file in root.glob("**/config.json") if (file.parent / "checkpoints").is_dir())
    click.echo(f"{len(found)} runs in {root}")
    for run in map(RunFolder, found):
        status, size = run.status(), sum(file.stat().st_size for file in run.checkpoint_folder.glob("*"))
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


@main.command()
@click.argument("chapters", nargs=-1)
@click.option("--profile", default="laptop", help="smoke, laptop, gpu or paper")
@click.option("-p", "parameters", multiple=True, metavar="NAME=VALUE",
              help="set a parameter of the chapters; repeatable")
@click.option("--timeout", type=int, help="seconds a cell may take, 0 for no limit [default: the profile's]")
@click.option("--fresh", is_flag=True, help="run chapters again whose code and settings have not changed")
@click.option("--build/--no-build", default=True, help="build the pages at the end")
def run(chapters, profile, parameters, timeout, fresh, build):
    """Run CHAPTERS (all without any; "03" is enough) and build the pages that show what was run."""
    from dit_repro.book.pages import build_pages
    from dit_repro.book.run import run_book
    from dit_repro.files import project_root

    folder = run_book(project_root(), chapters, profile, parameters, timeout, fresh, click.echo)
    click.echo(f"notebooks, numbers and logs: {folder}")
    if build:
        click.echo(f"open {build_pages(project_root(), folder, strict=False)}")


@main.command()
@click.argument("run_folder", metavar="RUN_FOLDER")
@click.option("--results-only", is_flag=True, help="add the numbers, keep the committed pages")
def harvest(run_folder, results_only):
    """Publish a run from _runs/ into the committed notebooks, results and scoreboard."""
    from pathlib import Path

    from dit_repro.book.harvest import harvest
    from dit_repro.files import project_root

    click.echo("harvested " + ", ".join(harvest(project_root(), Path(run_folder), results_only)))


@main.command()
def lint():
    """Check that the committed book is what its sources say: pairs, stamps, outputs, claims."""
    from dit_repro.book.lint import lint
    from dit_repro.files import project_root

    problems = lint(project_root())
    for problem in problems:
        click.echo(problem)
    if errors := sum(problem.is_error for problem in problems):
        raise RuntimeError(f"{errors} problems keep the book from being published")


@main.command()
@click.option("--check", is_flag=True, help="write nothing, fail when something is out of date")
def scoreboard(check):
    """Compute the verdicts again: book/scoreboard.md, the tally, the claims tables of the chapters."""
    from dit_repro.book.claims import update
    from dit_repro.files import project_root

    changed = update(project_root(), check)
    click.echo("\n".join(changed) or "up to date")
    if check and changed:
        raise RuntimeError("out of date; run `dit-repro scoreboard`")


@main.command()
@click.option("--offline", is_flag=True, help="pages that load nothing from the network; needs npm once")
@click.pass_context
def book(ctx, offline):
    """Build the pages of the committed book, strictly: lint first, and a warning fails."""
    from dit_repro.book.pages import build_pages
    from dit_repro.files import project_root

    ctx.invoke(lint)
    click.echo(f"open {build_pages(project_root(), offline=offline)}")


@main.command()
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option("--to", required=True, type=click.Choice(["diffusers", "released"]),
              help="A DiTPipeline folder, or one plain state dict (.safetensors or .pt).")
@click.option("--weights", default="ema", type=click.Choice(["ema", "model"]), help="Which of a training checkpoint.")
@click.option("--autoencoder", metavar="NAME",
              help="diffusers: embedded, stabilityai/sd-vae-ft-ema, or a folder; without, from_pretrained needs vae=.")
@click.option("--class-names", type=click.Path(exists=True), metavar="FILE", help="diffusers: one name a line.")
@click.option("--schedule", default="linear", type=click.Choice(["linear", "cosine"]),
              help="diffusers: the schedule the model was trained with.")
def convert(source, destination, to, weights, autoencoder, class_names, schedule):
    """Convert a DiT: SRC is a checkpoint file or a diffusers folder."""
    from pathlib import Path

    from dit_repro.models import from_diffusers, load_released_checkpoint, save_released_checkpoint, to_diffusers

    model = from_diffusers(source) if Path(source).is_dir() else load_released_checkpoint(source, weights)
    if to == "released":
        save_released_checkpoint(model, destination)
    else:
        if autoencoder:
            from dit_repro.latents import load_autoencoder
            autoencoder = load_autoencoder(autoencoder).model
        names = Path(class_names).read_text(encoding="utf-8").splitlines() if class_names else None
        to_diffusers(model, destination, autoencoder, names, schedule)
    click.echo(f"wrote {destination}" + "; read its README.md before sampling" * (to == "diffusers"))


@main.command()
@click.option("--profile", default="paper", help="smoke, laptop, gpu or paper")
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


@main.group()
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

    import torch

    from dit_repro.files import write_json
    from dit_repro.speed.ladder import run_ladder
    from dit_repro.speed.report import ladder_figure, ladder_table

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    result = run_ladder(model, batch, device, input_size=input_size, compile=compile, repeats=repeats)
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
    "encode": "The autoencoder over the embedded images.",
    "frechet": "The Frechet distance against scipy's matrix square root.",
    "startup": "How long the command line takes to answer.",
}.items():
    _add_benchmark(_name, _help)


@main.command("new-chapter")
@click.argument("number", type=int)
@click.argument("title")
def new_chapter(number, title):
    """Begin chapter NUMBER: a source and its notebook that obey the contract, listed in _toc.yml."""
    from dit_repro.book.new_chapter import new_chapter
    from dit_repro.files import project_root

    click.echo(new_chapter(project_root(), number, title).source)


if __name__ == "__main__":
    main()
