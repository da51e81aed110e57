"""Commands on images and latents."""
import click


@click.group()
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


@click.command()
@click.argument("out", metavar="STORE")
@click.option("--images", default="embedded", metavar="embedded|FOLDER",
              help="Images to encode; a FOLDER holds Fashion-MNIST IDX files or a folder of images for each class.")
@click.option("--split", default="train", type=click.Choice(["train", "test"]), help="Of Fashion-MNIST.")
@click.option("--resolution", type=click.IntRange(8), metavar="PIXELS", help="Crop, for class folders.  [default: 256]")
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
        source = ImageSource.folder(images, resolution or 256, on_damaged)
    else:
        source = ImageSource.embedded(split) if images == "embedded" else ImageSource.idx(images, split)
    if resolution not in (None, source.resolution):
        raise ValueError(f"--resolution {resolution}: Fashion-MNIST is encoded at {source.resolution} pixels; leave "
                         "the option out, or give a folder of an image folder for each class")
    autoencoder = autoencoder or ("stabilityai/sd-vae-ft-ema" if class_folders else "embedded")
    device = device or (f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
    store = encode_to_store(source, load_autoencoder(autoencoder, device), out, batch_size, shard_size, dtype, workers)
    if store.manifest["shard_size"] != shard_size:
        click.echo(f"--shard-size {shard_size}: {out} is complete with {store.manifest['shard_size']} images a shard, "
                   "and stays as it is", err=True)
    click.echo(f"{out}: {len(store)} images of {store.num_classes} classes, {len(store.manifest['skipped'])} left out")


@click.group()
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
