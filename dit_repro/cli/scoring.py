"""Commands on samples: scores, and what tests the scores."""
import click

from dit_repro.cli.training import WEIGHTS

EXTRACTORS = ("inception", "classifier", "dinov2")


@click.group()
def fid():
    """Score images, and test what scores them."""


def feature_extractor(features, weights, device="cpu", stand_ins=False):
    from dit_repro.evaluation import DINOV2, InceptionFeatures, TimmFeatures, load_classifier

    if features == "dinov2" and not weights:
        raise ValueError("--features dinov2 needs --feature-weights FILE.safetensors, from timm's page on the Hugging "
                         "Face hub")
    checked = {"sha256": None} if stand_ins else {}
    made = {"classifier": load_classifier, "inception": lambda: InceptionFeatures(weights, **checked),
            "dinov2": lambda: TimmFeatures(weights, DINOV2, size=224)}[features]()
    return made.to(device)


features_option = click.option("--features", default="inception", type=click.Choice(EXTRACTORS),
                               help="inception is FID's; classifier is embedded, for 32x32 Fashion-MNIST.")
stand_ins_option = click.option("--stand-ins", is_flag=True, help="Take any weights of Inception's layout, for a "
                                                                  "rehearsal; the score is not called FID then.")
feature_weights_option = click.option("--feature-weights", metavar="FILE",
                                      help="Of the features' network.  [default: torch's cache, inception]")


def scoring_options(command):
    """What both commands that score take, handed on to `_score` by name."""
    for option in reversed((
            click.option("--reference", required=True, metavar="REFERENCE",
                         help="A folder, an .npz of images, an .npz with mu and sigma (ADM's reference batches), or "
                              "'embedded', the training images in this package."),
            click.option("--crop", type=click.IntRange(8), metavar="PIXELS",
                         help="REFERENCE holds class folders of any pictures: crop them as for training."),
            click.option("--mode", default="adm", type=click.Choice(["adm", "strict"]),
                         help="adm: as published. strict: order-proof Inception Score, float32 precision and recall."),
            features_option, feature_weights_option, stand_ins_option,
            click.option("--reference-count", type=click.IntRange(2), metavar="N",
                         help="Images behind mu and sigma, where the file does not say (ImageNet: 1281167)."),
            click.option("--cache", metavar="FOLDER",
                         help="Keep features here: a killed command goes on. Needed under torchrun."),
            click.option("--out", metavar="FILE.json", help="Also write scores and protocol."))):
        command = option(command)
    return command


def _score(ranks, samples, reference, crop, mode, features, feature_weights, stand_ins, reference_count, cache,
           out, **protocol):
    from pathlib import Path

    from dit_repro.evaluation import evaluate
    from dit_repro.files import write_json

    if crop and not Path(reference).is_dir():
        raise ValueError(f"--crop {crop}: only a folder of class folders is cropped, not {reference}")
    if reference == "embedded":
        from dit_repro.latents import ImageSource
        reference = ImageSource.embedded("train")
    elif crop:
        from dit_repro.latents import ImageSource
        reference = ImageSource.folder(reference, crop)
    extractor = feature_extractor(features, feature_weights, ranks.device, stand_ins)
    scores = evaluate(samples, reference, extractor, mode, cache=cache, reference_count=reference_count, **protocol)
    if ranks.is_main:
        click.echo(scores.report())
        if out:
            write_json(out, scores.to_json())


@fid.command()
@click.argument("samples", metavar="SAMPLES")
@scoring_options
def score(samples, **options):
    """Score SAMPLES, a folder or an .npz, against a reference. Works under torchrun."""
    from dit_repro.training.parallel import connect

    with connect() as ranks:
        _score(ranks, samples, **options)


@fid.command()
@click.argument("model", metavar="RUN|FILE")
@click.option("--count", default=50_000, type=click.IntRange(4), help="Images to draw.")
@click.option("--step", type=click.IntRange(1), help="Checkpoint of the run.  [default: the newest]")
@click.option("--weights", default="ema", type=click.Choice([*WEIGHTS]), help="Averaged or as trained.")
@click.option("--steps", default="250", help="Of the sampler.")
@click.option("--guidance", default=1.0, type=click.FloatRange(0), help="Scale, on the paper's three channels.")
@click.option("--labels", default="random", type=click.Choice(["random", "balanced"]), help="How labels are chosen.")
@click.option("--seed", default=0, help="Of the labels; image i has seed i.")
@click.option("--batch", default=250, type=click.IntRange(1), help="Images at once.")
@click.option("--autoencoder", metavar="NAME", help="[default: the one that the run's latents come from]")
@scoring_options
def run(model, count, step, weights, steps, guidance, labels, seed, batch, autoencoder, **options):
    """Draw images from a training run, or from a released checkpoint's file, and score them; no picture is written.

    Works under torchrun: each rank draws its own images, and the scores are the same on any number of ranks.
    """
    from pathlib import Path

    from dit_repro.diffusion import NoiseSchedule
    from dit_repro.files import workspace
    from dit_repro.latents import LatentStore, load_autoencoder
    from dit_repro.models import load_released_checkpoint
    from dit_repro.sampling import Guidance, SampleSet, draw_labels
    from dit_repro.training import RunFolder
    from dit_repro.training.parallel import connect

    with connect() as ranks:
        if Path(model).is_dir():
            folder = RunFolder(model)
            config, network = folder.config(), folder.load_model(step, ema=weights == "ema")
            schedule = config.noise_schedule()
            autoencoder = autoencoder or LatentStore.open(config.latents).manifest["autoencoder"]["id"]
        else:
            if step:
                raise ValueError(f"--step {step}: {model} is one checkpoint; steps are those of a run folder")
            network = load_released_checkpoint(model, WEIGHTS[weights])
            schedule = NoiseSchedule.linear(1000)
        if autoencoder is None:
            raise ValueError("--autoencoder is missing: a released checkpoint does not say which one it was trained on "
                             "(DiT: stabilityai/sd-vae-ft-ema)")
        samples = SampleSet(network.to(ranks.device), draw_labels(count, network.num_classes, labels, seed), schedule,
                            load_autoencoder(autoencoder, ranks.device), workspace() / "samples", labels, steps=steps,
                            guidance=Guidance(guidance), batch_size=batch)
        _score(ranks, samples, **options, **samples.protocol)


@fid.command()
@click.option("--images", metavar="FOLDER|NPZ", help="Real images.  [default: embedded Fashion-MNIST]")
@click.option("--features", default="classifier", type=click.Choice(EXTRACTORS),
              help="What the faults are measured in; classifier is embedded, for 32x32 Fashion-MNIST.")
@feature_weights_option
@click.option("--adm-samples", metavar="NPZ", help="Instead: score this public file with Inception features ...")
@click.option("--adm-reference", metavar="NPZ", help="... against this one, and compare with what ADM published.")
@click.option("--anchor", default="ADM-G+U 256", type=click.Choice(["ADM-G+U 256", "ADM-G 128"]),
              help="Which public file it is.")
@click.option("--cache", metavar="FOLDER", help="Keep the features of the public files here.")
def doctor(images, features, feature_weights, adm_samples, adm_reference, anchor, cache):
    """Plant known faults and show what each does to a score; or reproduce published scores from public files."""
    import torch

    from dit_repro.evaluation import check_anchors, diagnose, evaluate
    from dit_repro.evaluation.image_sets import open_images
    from dit_repro.training.parallel import DEVICE

    if cache and not adm_samples:
        raise ValueError("--cache is for --adm-samples: the planted faults are computed anew each time")
    if bool(adm_samples) != bool(adm_reference):
        raise ValueError("--adm-samples and --adm-reference go together")
    if adm_samples:
        extractor = feature_extractor("inception", feature_weights, DEVICE)
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
        extractor = feature_extractor(features, feature_weights, DEVICE)
        findings = diagnose(extractor, torch.cat([opened.read(i, i + 1) for i in some]),
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
