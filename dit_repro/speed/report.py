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
        axes.annotate(f"{1e3 * rung['seconds']:.1f} ms, {rung['utilization']:.0%} of its limit", (1, row), (6, 0),
                      xycoords=("axes fraction", "data"), textcoords="offset points", va="center", fontsize=8.5)
    axes.set_yticks(range(len(rungs)), [rung["name"] for rung in rungs])
    axes.invert_yaxis()
    axes.set_xlabel("TFLOP/s of the model; the frame is the fastest matrix product in the same precision")
    axes.set_title(f"{result['model']}, batch {result['batch_size']}, {result['device']}")
    return figure


def ladder_frame(result: dict):
    """A ladder as a pandas Styler for a notebook: one row a rung, with the reason where there is no number."""
    import pandas as pd

    columns = {"ms a step": lambda r: f"{1e3 * r['seconds']:.1f}",
               "range": lambda r: f"{1e3 * r['fastest']:.1f} to {1e3 * r['slowest']:.1f}",
               "images/s": lambda r: f"{r['images_per_second']:,.0f}",
               "speedup": lambda r: f"{r['speedup']:.2f}x" if "speedup" in r else "",
               "of its limit": lambda r: f"{r['utilization']:.0%}", "peak GB": lambda r: f"{r['peak_bytes'] / 1e9:.3g}",
               "loss differs": lambda r: f"{r['loss_difference']:.0e}" if "loss_difference" in r else ""}
    rows = []
    for rung in result["rungs"]:
        row = {"kind": rung["kind"], "rung": rung["name"]}
        measured = {name: "" if "why_not" in rung else show(rung) for name, show in columns.items()}
        post = POST_MS.get(rung["name"], "") if rung["kind"] == "cumulative" else ""
        rows.append({**row, **measured, "not measured": rung.get("why_not", ""), "the post's ms (B/2, H100)": post})
    return pd.DataFrame(rows).style.hide(axis="index")


def shares_figure(parts: dict[str, dict[str, float]]):
    """One bar a case, divided by what the time goes to; parts: {case: {group: share}}."""
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys(group for shares in parts.values() for group in shares))
    figure = Figure(figsize=(7, 1.5 + 0.45 * len(parts)), layout="constrained")
    axes = figure.subplots()
    left = dict.fromkeys(parts, 0.0)
    for index, group in enumerate(groups):
        widths = [100 * shares.get(group, 0.0) for shares in parts.values()]
        axes.barh(list(parts), widths, left=list(left.values()), label=group, color=f"C{index}", edgecolor="white")
        for case, width in zip(parts, widths):
            if width > 6:
                axes.annotate(f"{width:.0f}%", (left[case] + width / 2, case), ha="center", va="center", fontsize=8.5,
                              color="white")
            left[case] += width
    axes.set(xlabel="share of the time inside operators, %", xlim=(0, 100))
    axes.invert_yaxis()
    axes.grid(False)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8.5)
    return figure


def roofline_figure(operations: dict, ceiling: float, bandwidth: float):
    """Each operation at its intensity and speed, under what memory (bytes/s) and products (flop/s) allow."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    at = np.geomspace(0.005, 1000, 200)
    axes.loglog(at, np.minimum(ceiling, at * bandwidth) / 1e9, color="#26262b", linewidth=1.2)
    axes.set_title(f"memory {bandwidth / 1e9:,.0f} GB/s, fastest product {ceiling / 1e9:,.0f} GFLOP/s", fontsize=9)
    total = sum(operation.seconds for operation in operations.values())
    ascending = sorted(operations.items(), key=lambda item: item[1].flops / item[1].seconds)
    for height, (name, operation) in zip(np.linspace(0.05, 0.95, len(ascending)), ascending):
        point = operation.intensity, operation.flops / operation.seconds / 1e9
        axes.plot(*point, "o", color="#2a6f97", markersize=4 + 16 * (operation.seconds / total) ** 0.5, alpha=0.7)
        axes.annotate(f"{name}, {operation.seconds / total:.0%}", point, (1.02, height), va="center", fontsize=8.5,
                      textcoords="axes fraction", arrowprops={"arrowstyle": "-", "color": "#9a9aa2", "linewidth": 0.6,
                                                              "relpos": (0, 0.5), "shrinkA": 1})
    axes.set(xlabel="arithmetic intensity, flop a byte", ylabel="GFLOP/s", xlim=(0.005, 1000))
    return figure


def growth_figure(found: list):
    """Time and memory along each axis, on logarithms, with the fitted exponents."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    figure = Figure(figsize=(9, 4.6), layout="constrained")
    panels = figure.subplots(2, len(found), sharex="col", sharey="row")
    for column, growth in zip(panels.T, found):
        for axes, what, unit in zip(column, ("seconds", "peak_bytes"), (1e-3, 1e6)):
            axes.loglog(growth.values, [value / unit for value in getattr(growth, what)], "o-", color="#2a6f97")
            axes.set_title(f"exponent {growth.exponent(what):.2f}", fontsize=9)
            axes.set_xticks(growth.values, growth.values)
            axes.xaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_locator(NullLocator())
        column[1].set_xlabel(growth.axis)
    panels[0, 0].set_ylabel("ms a step")
    panels[1, 0].set_ylabel("peak memory, MB")
    return figure
