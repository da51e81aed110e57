"""What the scalar recurrence leaves out, each on the smallest problem that shows it: Adam, clipping, loss scaling."""
import torch


def adam_spike(ratio: float, betas=(0.9, 0.999), num_steps: int = 2_000, after: int = 60,
               clip_norm: float | None = None) -> list[float]:
    """Moves of one weight under Adam, in units of the rate, from a gradient `ratio` times the usual one onwards.

    Gradients are +1 and -1 in turn for `num_steps` steps, then once `ratio`, then +1 and -1 again: a list of 1 + after.
    A single move is at most (1 - beta1) / sqrt(1 - beta2), 3.2 for the defaults, however large the ratio is.
    """
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer, moves = torch.optim.Adam([weight], lr=1.0, betas=betas), []
    for step in range(num_steps + 1 + after):
        weight.grad = torch.full_like(weight, ratio if step == num_steps else (-1.0) ** step)
        if clip_norm:
            torch.nn.utils.clip_grad_norm_([weight], clip_norm)
        before = float(weight.detach())
        optimizer.step()
        if step >= num_steps:
            moves.append(float(weight.detach()) - before)
    return moves


def clip_outcomes(clip_norm: float = 1.0):
    """Ten gradients of size one, the last replaced by a large, infinite or undefined one, before and after clipping.

    A pandas DataFrame: the norm before, how many of the ten are finite after, and the largest move of the nine others.
    """
    import pandas
    rows = []
    for name, bad in (("finite", 1.0), ("finite, large", 1e6), ("infinite", torch.inf), ("NaN", torch.nan)):
        weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(10)]
        for weight in weights:
            weight.grad = torch.ones(1)
        weights[-1].grad.fill_(bad)
        norm = torch.nn.utils.clip_grad_norm_(weights, clip_norm)
        after = torch.cat([weight.grad for weight in weights])
        rows.append({"last gradient": name, "norm before": float(norm), "finite after": int(after.isfinite().sum()),
                     "the other nine": float(after[0])})
    return pandas.DataFrame(rows)


def scaled_training(overflows, num_steps: int = 40, initial_scale: float = 2.0**16):
    """Descent on x^2 / 2 with PyTorch's loss scaling, some steps overflowing: a pandas DataFrame, a row a step.

    overflows(step) says whether the scaled gradient of a step is infinite. Such a step is skipped and halves the scale;
    the loss is logged in every step, taken or not.
    """
    import pandas
    x = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([x], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=initial_scale, growth_interval=10)
    rows = []
    for step in range(1, num_steps + 1):
        optimizer.zero_grad()
        loss = (x.square() / 2).sum()
        scaler.scale(loss).backward()
        if overflows(step):
            x.grad.fill_(torch.inf)
        before = float(x.detach())
        scaler.step(optimizer)
        scaler.update()
        rows.append({"step": step, "loss": float(loss.detach()), "scale": scaler.get_scale(),
                     "skipped": float(x.detach()) == before})
    return pandas.DataFrame(rows)
