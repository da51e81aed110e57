"""Commands on samples: scores, and what tests the scores."""
import click


@click.group()
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
