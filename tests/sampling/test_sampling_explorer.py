import torch
from torch import nn

from dit_repro.diffusion import NoiseSchedule
from dit_repro.sampling import CollapseDetector, explorer

REAL = torch.randn(100, 4, 4, 4, generator=torch.Generator().manual_seed(0))


class Outward(nn.Module):
    in_channels, input_size, num_classes, learn_sigma = 4, 4, 3, False

    def forward(self, x, t, y):
        return x - 0.5


def decode(latents):
    return (128 + 30 * latents[:, :3]).round().clamp(0, 255).to(torch.uint8)


def test_explorer_samples_what_its_widgets_say_when_asked(capsys):
    asked = []

    def load(name):
        return lambda: asked.append(name) or Outward()

    detector = CollapseDetector.fit(decode(REAL), REAL, 0.01)
    made = explorer({name: load(name) for name in ("early", "late")}, NoiseSchedule.cosine(1000),
                    ["shirt", "bag", "shoe"], decode=decode, detector=detector, steps="4")
    choices = {child.description: child for child in made.children if hasattr(child, "description")}
    assert {"class_name", "scale", "seed", "clamp", "checkpoint"} <= {*choices}
    assert asked == []  # nothing before the button
    choices["checkpoint"].value, choices["class_name"].value = "late", "bag"
    picture = made.f(**{widget.description: widget.value for widget in made.kwargs_widgets})
    assert asked == ["late"] and picture.size == (256, 256)
    said = capsys.readouterr().out
    assert said.startswith("collapsed") and "largest latent" in said
    made.f(class_name="bag", scale=1.0, seed=0, clamp=True, checkpoint="early")
    assert asked == ["late", "early"]
    clamped = float(capsys.readouterr().out.split("latent ")[1].split(",")[0])
    assert clamped < 5 < float(said.split("latent ")[1].split(", of")[0].replace(",", ""))
