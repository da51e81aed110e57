"""Gradient descent on f(x) = x^2 / 2, exactly: the smallest case of a rate that is too high, with a lab for it."""
import hashlib
from pathlib import Path

import torch

RATES = (0.5, 2.5)   # of the source's lab: one that halves x, one that overshoots by more than it corrects


def descend(rate: float, num_steps: int, start: float = 1.0) -> list[float]:
    """x after 0, 1, ... num_steps steps x <- x - rate * x; it shrinks for 0 < rate < 2 and for no other rate."""
    visited = [start]
    for _ in range(num_steps):
        x = visited[-1]
        visited.append(x - rate * x)
    return visited


def minimize(make_optimizer, num_steps: int, clip_norm: float | None = None, curvature: float = 1.0,
             start: float = 1.0) -> list[float]:
    """x after 0, 1, ... num_steps steps of a PyTorch optimizer on curvature * x^2 / 2, in float64."""
    x = torch.nn.Parameter(torch.tensor([start], dtype=torch.float64))
    optimizer, visited = make_optimizer([x]), [start]
    for _ in range(num_steps):
        optimizer.zero_grad()
        (curvature * x.square() / 2).sum().backward()
        if clip_norm:
            torch.nn.utils.clip_grad_norm_([x], clip_norm)
        optimizer.step()
        visited.append(float(x.detach()))
    return visited


class QuadraticLab:
    """Reset, predict, Step. On a page it needs no kernel; `widget()` is the same for a live notebook.

    Without scripts it shows the first steps of each of `rates`.
    """

    def __init__(self, rates=RATES):
        self.rates = tuple(rates)

    def _repr_html_(self) -> str:
        tables = "".join(f"<p>&eta; = {rate:.2f}: x = {', '.join(map(str, descend(rate, 2)))}</p>"
                         for rate in self.rates)
        buttons = "".join(f'<button type="button" data-rate="{rate:.2f}">&eta; = {rate:.2f}</button>'
                          for rate in self.rates)
        page = (Path(__file__).parent / "quadratic.html").read_text(encoding="utf-8")
        for field, text in {"ID": "lab-" + hashlib.sha256(repr(self.rates).encode()).hexdigest()[:12],
                            "TABLES": tables, "BUTTONS": buttons, "RATE": f"{self.rates[0]:.2f}"}.items():
            page = page.replace(f"%{field}%", text)
        return page

    def __repr__(self) -> str:
        return f"quadratic lab, rates {', '.join(f'{rate:.2f}' for rate in self.rates)}"

    def widget(self):
        """The lab as ipywidgets: a rate, a prediction, Step and Reset, and every value so far."""
        import ipywidgets
        rate = ipywidgets.FloatText(self.rates[0], description="rate", step=0.05)
        guess = ipywidgets.Text(description="I predict")
        step, reset = ipywidgets.Button(description="Step"), ipywidgets.Button(description="Reset")
        shown = ipywidgets.HTML()
        rows = []

        def restart(_=None):
            rows[:] = [("", 1.0)]
            show()

        def advance(_):
            rows.append((guess.value, descend(rate.value, 1, rows[-1][1])[1]))
            show()

        def show():
            guess.value = ""
            shown.value = "<br>".join(f"x after step {n}: {x}" + (f" (predicted {said})" if said else "")
                                      for n, (said, x) in enumerate(rows))

        step.on_click(advance)
        reset.on_click(restart)
        rate.observe(restart, names="value")
        restart()
        return ipywidgets.VBox([rate, guess, ipywidgets.HBox([step, reset]), shown])
