"""A sample at a time, by hand: widgets for a live notebook."""
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch import Tensor

from dit_repro.diffusion import NoiseSchedule

from .collapse import CollapseDetector
from .guidance import Guidance
from .sampler import sample
from .thresholding import clamp_x0


def explorer(models: Mapping[str, Callable], schedule: NoiseSchedule, class_names: Sequence[str], *,
             decode: Callable[[Tensor], Tensor], detector: CollapseDetector, **settings):
    """Widgets for class, scale, seed, clamp and checkpoint, a button that samples, and what came out below.

    models: {checkpoint's name: function that loads it}. settings: of `sample`, the same for all.
    """
    import ipywidgets
    from PIL import Image

    def draw(class_name, scale, seed, clamp, checkpoint):
        latents = sample(models[checkpoint](), [list(class_names).index(class_name)], schedule, seeds=[seed],
                         guidance=Guidance(scale), x0_transform=clamp_x0(detector.limit) if clamp else None, **settings)
        latents = latents.cpu()
        images = decode(latents).cpu()
        statistics = detector.statistics(images, latents)
        verdict = "collapsed" if detector.judge(statistics).collapsed[0] else "an image"
        print(f"{verdict}: largest latent {statistics.largest_latent[0]:,.1f}, of real images {detector.limit:.1f}")
        picture = Image.fromarray(np.asarray(images[0]).transpose(1, 2, 0))
        return picture.resize((256, 256), Image.Resampling.NEAREST)

    return ipywidgets.interactive(
        draw, {"manual": True, "manual_name": "Sample"}, class_name=list(class_names), scale=(1.0, 6.0, 0.5),
        seed=ipywidgets.BoundedIntText(0, min=0, max=2**31 - 1), clamp=False, checkpoint=list(models))
