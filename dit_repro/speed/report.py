"""What was measured, as lines, as verdicts and as a picture."""
from dataclasses import dataclass

from dit_repro.speed.ladder import POST_MS


@dataclass(frozen=True)
class Reading:
    """One number of a benchmark and the target it has to meet, if it has one."""
    name: str
    value: float
    unit: str                        # "x" for a ratio to a peer; s, ms, GB, %
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""

    @property
    def passed(self) -> bool:
        return ((self.at_least is None or self.value >= self.at_least)
                and (self.at_most is None or self.value <= self.at_most))

    def __str__(self) -> str:
        target = "".join(f", target {sign} {bound:g} {self.unit}: {'pass' if self.passed else 'MISS'}"
                         for sign, bound in ((">=", self.at_least), ("<=", self.at_most)) if bound is not None)
        return f"{self.name}: {self.value:.3g} {self.unit}{target}{f' ({self.note})' if self.note else ''}"


def ladder_table(result: dict) -> list[str]:
    """The lines that `bench ladder` prints: times are the median, with the fastest and slowest round behind it."""
    ceilings = ", ".join(f"{name} {flops / 1e12:.3g} TFLOP/s" for name, flops in result["ceilings"].items())
    lines = [f"{result['model']}, batch {result['batch_size']}, {result['tokens']} tokens on {result['device']}; "
             f"measured ceiling: {ceilings}",
             f"{'':10} {'rung':26} {'ms/step':>22} {'images/s':>9} {'speedup':>8} {'of limit':>8} {'peak GB':>8} "
             f"{'loss diff':>9} {'post, H100':>10}"]
    for rung in result["rungs"]:
        head = f"{rung['kind']:10} {rung['name']:26} "
        if "why_not" in rung:
            lines.append(f"{head}not measured: {rung['why_not']}")
            continue
        spread = f"{1e3 * rung['seconds']:.1f} ({1e3 * rung['fastest']:.1f}-{1e3 * rung['slowest']:.1f})"
        speedup = f"{rung['speedup']:.2f}x" if "speedup" in rung else ""
        difference = f"{rung['loss_difference']:.1e}" if "loss_difference" in rung else ""
        post = POST_MS.get(rung["name"], "") if rung["kind"] == "cumulative" and result["model"] == "DiT-B/2" else ""
        lines.append(f"{head}{spread:>22} {rung['images_per_second']:9.1f} {speedup:>8} {rung['utilization']:8.1%} "
                     f"{rung['peak_bytes'] / 1e9:8.2f} {difference:>9} {post:>10}")
    return lines


def ladder_figure(result: dict):
    """Bars of achieved flop/s, rung by rung, against the measured ceiling of each rung's precision."""
    from matplotlib.figure import Figure

    rungs = [rung for rung in result["rungs"] if rung["kind"] == "cumulative" and "seconds" in rung]
    figure = Figure(figsize=(7, 0.5 + 0.4 * len(rungs)), layout="constrained")
    axes = figure.subplots()
    for row, rung in enumerate(rungs):
        limit = result["ceilings"][rung["settings"]["precision"]] / 1e12
        reached = rung["utilization"] * limit
        axes.barh(row, limit, color="none", edgecolor="#6b6b73", linewidth=1)
        axes.barh(row, reached, color="#2a6f97")
        axes.annotate(f"{1e3 * rung['seconds']:.1f} ms, {rung['utilization']:.0%} of its limit", (reached, row), (4, 0),
                      textcoords="offset points", va="center", fontsize=8.5)
    axes.set_yticks(range(len(rungs)), [rung["name"] for rung in rungs])
    axes.invert_yaxis()
    axes.set_xlabel("TFLOP/s of the model; the frame is the fastest matrix product in the same precision")
    axes.set_title(f"{result['model']}, batch {result['batch_size']}, {result['device']}")
    return figure
