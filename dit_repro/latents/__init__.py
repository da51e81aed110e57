"""Chapter 1: images, the autoencoder, and the store of latents that training reads."""
from dit_repro.latents.autoencoder import Autoencoder, load_autoencoder, psnr, train_autoencoder
from dit_repro.latents.encode import encode_to_store
from dit_repro.latents.images import ImageSource, make_embedded_images
from dit_repro.latents.store import LatentStore

__all__ = ["Autoencoder", "ImageSource", "LatentStore", "encode_to_store", "load_autoencoder", "make_embedded_images",
           "psnr", "train_autoencoder"]
