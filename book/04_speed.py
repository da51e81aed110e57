# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Speed: one change at a time, against the limit
#
# **Question.** The post made a training step 8.31 times faster with four changes. What did each of them do, how far is the result from what the chip can, and what is left to gain on the machine in front of you?
#
# **Answer.** A step is matrix products, which a number format makes cheaper, and trips to memory, which a compiler saves; a change pays as much as the share of the step that it touches, and no more. So each rung below is shown against the limit of its own format, with its memory, and with the loss that it computes.
#
# *Claimed in:* the post, "An 8.3x speedup" and "Scaling to DiT-XL/2". *Time:* laptop 3 to 5 min on two cores; on one GPU, where it runs the post's ladder, about 15 min.

# %% tags=["parameters"]
profile: str = "laptop"  # smoke, laptop, gpu or paper
price: float = 3.0  # of a GPU hour, in dollars: an assumption, put yours here

# %%
from dit_repro.book import start

run = start(globals())

# %%
from dataclasses import replace

import pandas as pd
import torch

from dit_repro.models import DIT_CONFIGS, count_macs, count_parameters, create_model
from dit_repro.profiles import DEVICE, get_profile
from dit_repro.speed import GPUS, Bench, Settings, Step, shares
from dit_repro.speed.device import matmul_ceiling, memory_bandwidth
from dit_repro.speed.ladder import POST_MS, VARIANTS

speed = get_profile(profile).speed
device = torch.device(DEVICE)

# %% [markdown]
# ## The post's ladder, as arithmetic
#
# One H100, DiT-B/2, batch 256. The times are the post's. What stands beside them is worked out: a step is two operations for each multiply-accumulate, three forward passes' worth, and the peaks are the maker's for dense products.
#
# > **Predict first.** The last rung takes 105.1 ms. What share of the chip's stated bf16 peak is that: nine tenths, a half, a third?

# %%
h100 = GPUS["h100"]
with torch.device("meta"):
    b2 = create_model("DiT-B/2")
flops = 6 * count_macs(b2) * 256  # of one step
peaks = {"fp32": h100.fp32, "TF32": h100.tf32}
names = list(POST_MS)
before = dict(zip(names[1:], names))
rows = [{"rung": name, "ms a step (post)": ms, "images/s": 256 / ms * 1e3,
         "speedup": POST_MS[before[name]] / ms if name in before else 1.0, "TFLOP/s": flops / ms / 1e9,
         "of the stated peak": flops / ms * 1e3 / peaks.get(name, h100.bf16)} for name, ms in POST_MS.items()]
post = pd.DataFrame(rows).set_index("rung")
run.record("speedup_total_recomputed", POST_MS["fp32"] / POST_MS["compile"])
run.record("days_400k_at_874_ms", 400_000 * POST_MS["fp32"] / 1e3 / 86_400)
run.record("hours_400k_at_105_ms", 400_000 * POST_MS["compile"] / 1e3 / 3_600)
run.record("hours_350k_at_105_ms", 350_000 * POST_MS["compile"] / 1e3 / 3_600)
run.record("images_per_second_at_874_ms", post["images/s"]["fp32"])
run.record("images_per_second_at_105_ms", post["images/s"]["compile"])
run.record("post_peak_share_fp32", post["of the stated peak"]["fp32"])
run.record("post_peak_share_eager", post["of the stated peak"]["fused AdamW"])
run.record("post_peak_share_compiled", post["of the stated peak"]["compile"])
post.style.format({"images/s": "{:,.0f}", "speedup": "{:.2f}x", "TFLOP/s": "{:.0f}", "of the stated peak": "{:.0%}"})

# %% [markdown]
# Why does one change pay and another not? Each has a ceiling that can be worked out before anything is run. A format changes the peak of the products. AdamW reads a weight, its gradient and two moments and writes three of them back: seven numbers a weight, whatever it is made of. And what compiling saves in milliseconds is, at the memory's speed, a number of bytes that no longer travel.

# %%
HBM = 3.35e12  # bytes/s of an H100 SXM, its maker's number
parameters, stream = count_parameters(b2), 256 * 256 * DIT_CONFIGS["DiT-B/2"].width * 4  # bytes of one (N, T, D) in float32
run.record("adamw_ms_at_h100_bandwidth", 1e3 * 7 * 4 * parameters / HBM)
run.record("adamw_share_of_bf16_step", run["adamw_ms_at_h100_bandwidth"] / POST_MS["bf16 autocast"])
run.record("post_ms_saved_by_fused_adamw", POST_MS["bf16 autocast"] - POST_MS["fused AdamW"])
run.record("adamw_trips_saved", run["post_ms_saved_by_fused_adamw"] / run["adamw_ms_at_h100_bandwidth"])
saved = (POST_MS["fused AdamW"] - POST_MS["compile"]) / 1e3 * HBM / DIT_CONFIGS["DiT-B/2"].depth
run.record("trips_saved_a_block", saved / stream)
run.record("format_peak_ratio", h100.bf16 / h100.fp32)

# %% tags=["hide-input"]
run.say("""The post's table holds together: {speedup_total_recomputed:.2f}x, {days_400k_at_874_ms:.1f} days for 400,000 steps at the bottom and {hours_400k_at_105_ms:.1f} hours at the top. What it does not show is the limit. In float32 the step ran at {post_peak_share_fp32:.0%} of what the chip states for float32: little was left to gain there but by leaving the format. bf16's peak is {format_peak_ratio:.0f} times as high, and before compiling the step reached {post_peak_share_eager:.0%} of it, after compiling **{post_peak_share_compiled:.0%}**. Once products are cheap, the rest of the step is what takes the time.

AdamW's bytes take {adamw_ms_at_h100_bandwidth:.1f} ms at the memory's full speed, {adamw_share_of_bf16_step:.1%} of the bf16 step. The post saved {post_ms_saved_by_fused_adamw:.1f} ms with the fused kernel, {adamw_trips_saved:.1f} times what one trip over these bytes costs. The optimizer is too small a part of the step to gain more. Compiling saved as much as {trips_saved_a_block:.0f} trips of one activation tensor through memory in each block, forward and backward together: that is what fusing shifts, scales, gates, norms and casts into their neighbors is worth.

One number does not follow from the table. The remaining 350,000 steps took the post 11.9 hours; at 105.1 ms they are {hours_350k_at_105_ms:.1f}. Previews, checkpoints and whatever else the loop did are the difference.""")

# %% [markdown]
# ## The ladder on this machine
#
# The same ladder, measured here: cumulative, then each change alone on the slowest settings. All rungs warm up over the same fixed steps from the same weights, so that their losses can be compared; then rounds visit them in turn, so that a machine that slows down slows all of them. The limit is the fastest matrix product of this device in the rung's own format. Memory is weights, moments, average and what a step needs at its worst moment.
#
# > **Predict first.** Which of the changes does nothing here? Which makes it slower?

# %%
from dit_repro.speed import ladder_figure, ladder_frame, run_ladder

ladders = [run_ladder(model, batch_size, device, input_size=size, compile=speed.compile, alone=speed.alone,
                      variants={}, repeats=speed.repeats) for model, batch_size, size in speed.ladders]
for number, result in enumerate(ladders):
    run.figure(ladder_figure(result), name=f"ladder-{number}", caption=f"{result['model']} at batch {result['batch_size']}"
               ": what each cumulative rung reaches, in a frame as long as the device's fastest matrix product.")

# %%
from IPython.display import display

for result in ladders:
    display(ladder_frame(result))

# %%
def rungs(result: dict, kind: str) -> dict:
    """The rungs of a kind that were measured, by name."""
    return {rung["name"]: rung for rung in result["rungs"] if rung["kind"] == kind and "seconds" in rung}


steps = rungs(ladders[0], "cumulative")
best = min(steps.values(), key=lambda rung: rung["seconds"])
run.record("ladder_model", ladders[0]["model"])
run.record("ladder_total", best["speedup"])
run.record("ladder_best", best["name"])
run.record("ladder_utilization", best["utilization"])
before_bf16 = [*steps][[*steps].index("bf16 autocast") - 1]
run.record("bf16_gain", steps[before_bf16]["seconds"] / steps["bf16 autocast"]["seconds"])
run.record("loss_difference_bf16", steps["bf16 autocast"]["loss_difference"])
exact = [r["loss_difference"] for r in ladders[0]["rungs"] if r.get("settings", {}).get("precision") == "fp32" and "seconds" in r]
run.record("loss_difference_fp32_rungs", max(exact))

# %% tags=["hide-input"]
gained = "gains" if run["bf16_gain"] > 1.03 else "loses" if run["bf16_gain"] < 0.97 else "changes nothing"
pairs = list(zip(steps, [*steps][1:]))  # each rung and the one before it
unclear = [f'"{name}"' for below, name in pairs if steps[name]["fastest"] <= steps[below]["slowest"] and steps[below]["fastest"] <= steps[name]["slowest"]]
run.record("rungs_within_the_spread", len(unclear))
nothing = f"Of {', '.join(unclear)} the repeats overlap with those of the rung before: no gain is shown. " if unclear else ""
run.say("""For {ladder_model} the best cumulative rung here is "{ladder_best}", **{ladder_total:.2f} times** as fast as the first rung, at {ladder_utilization:.0%} of the limit of its format. bf16 autocast """ + gained + """: {bf16_gain:.2f} times as fast as the rung before it. """ + nothing + """

Over 20 fixed steps bf16 moves the loss by at most {loss_difference_bf16:.1e} of it, the rungs that stay in float32 by at most {loss_difference_fp32_rungs:.1e}. A rung that moved it visibly would be another training, not a faster one.""")

# %% [markdown]
# Not every change is a switch on the way up. Below some parts of the step are replaced by others that compute the same. The step that they are compared with has the fastest rung's precision and everything fused; one that is not compiled is compared with one that is not.

# %%
threads = torch.get_num_threads()
kept = {name: best["settings"][name] for name in ("precision", "compile")}
fast = Settings(**kept, threads=threads, fused=True, resident=DEVICE == "cuda", foreach_ema=True)
bf16 = {"compile": "", "precision": "bf16"}
others = {**VARIANTS, "compile": {"compile": "model"}, "bf16": bf16, "bf16, plain attention": {**bf16, "attention": "plain"}}
replaced = [run_ladder(model, batch_size, device, input_size=size, compile=speed.compile, alone=False, parity=False, baseline=fast,
                       rungs={}, variants=others, repeats=speed.repeats) for model, batch_size, size in speed.ladders]
for result in replaced:
    display(ladder_frame(result))
fast = replace(fast, compile="")
variants = rungs(replaced[0], "variant")
plain_step = variants["no compile"]
run.record("variants_precision", {"fp32": "float32"}.get(fast.precision, fast.precision))
for name in ("plain attention", "batched modulation", "activation checkpointing", "bf16", "bf16, plain attention", "compile"):
    if name in variants:
        run.record("variant_" + name.replace(",", "").replace(" ", "_"), plain_step["seconds"] / variants[name]["seconds"])
run.record("checkpointing_memory", variants["activation checkpointing"]["peak_bytes"] / plain_step["peak_bytes"])

# %% tags=["hide-input"]
run.say("""In {variants_precision}, not compiled, plain matrix products in place of fused attention run at {variant_plain_attention:.2f} times the speed, one product for all modulations at {variant_batched_modulation:.2f} times, and recomputing activations at {variant_activation_checkpointing:.2f} times with {checkpointing_memory:.0%} of the memory. """ + ("The compiler's step runs at {variant_compile:.2f} times its speed. " if "compile" in variants else "")
        + """In bf16 it runs at {variant_bf16:.2f} times the speed with fused attention and at {variant_bf16_plain_attention:.2f} times with plain products.""")

# %% [markdown]
# ## Where the time goes
#
# To know what a change can gain, take the step apart. Below every operator is timed inside one whole step: forward, backward, optimizer and average.

# %%
from dit_repro.speed import measure_operations, shares_figure

model, batch_size, size = speed.profiled
parts = {}
for case, settings in {"all fused": fast, "all fused, bf16": replace(fast, precision="bf16"),
                       "plain optimizer and average": Settings(fast.precision, threads=threads)}.items():
    step = Step(Bench(model, batch_size, device, size), settings)
    with step.active():
        parts[case] = shares(measure_operations(step, device, speed.repeats))
run.figure(shares_figure(parts), name="shares", caption=f"One training step of {model} at batch {batch_size}, operator by operator. "
           "A plain optimizer is many small operators, which count as elementwise.")
taken = parts["all fused"]
run.record("share_products", taken["matrix products"])
run.record("share_gelu", taken["GELU"])
run.record("share_attention", taken["attention"])
run.record("share_attention_bf16", parts["all fused, bf16"]["attention"])
run.record("share_optimizer", taken["optimizer and average"])

# %% [markdown]
# The roofline {cite}`williams2009roofline` says which of these could be faster at all. An operation that does much arithmetic on each byte is limited by the products, one that does little by memory. A point on the line cannot be improved by a better kernel, only by not being an operation of its own; a point far under it has a slow kernel, or is too small to keep the device busy.

# %%
from dit_repro.speed import block_operations, roofline_figure

bench = Bench(model, batch_size, device, size)
config, tokens = DIT_CONFIGS[model], bench.model.pos_embed.shape[1]
x, c = torch.randn(batch_size, tokens, config.width, device=device), torch.randn(batch_size, config.width, device=device)
ceiling, bandwidth = matmul_ceiling(device, "fp32"), memory_bandwidth(device)
operations = block_operations(bench.model.blocks[0], x, c, 4 * speed.repeats)
run.figure(roofline_figure(operations, ceiling, bandwidth), name="roofline", export=True,
           caption=f"One block of {model}, forward, float32, {batch_size} images of {tokens} tokens. Each operation at the speed it ran at; larger "
           "points took longer; the lines are measured on this device. Above the slope means that the data was still in a cache.",
           alt="Logarithmic scatter plot, flop a byte against GFLOP a second, a named point an operation with its share of the time. A "
           "slope, memory, meets a level, the fastest matrix product; how far a point lies under them is what a better kernel could win.")
run.record("ceiling_gflops", ceiling / 1e9)
run.record("bandwidth_gbytes", bandwidth / 1e9)
products = [o for o in operations.values() if o.group == "matrix products"]
run.record("block_products_of_ceiling", sum(o.flops for o in products) / sum(o.seconds for o in products) / ceiling)
run.record("gelu_of_ceiling", operations["GELU"].flops / operations["GELU"].seconds / ceiling)
run.record("gelu_over_copy", operations["GELU"].seconds * bandwidth / operations["GELU"].bytes)

# %% [markdown]
# On Linux a CPU has one more cost, which no operator shows by name. Memory that a step frees goes back to the kernel, and the next step takes it as fresh pages that are zeroed at the first touch. The trainer tells the C library to keep it. The pages are counted in a process of its own, where nothing has asked for that before.

# %%
from dit_repro.speed import fresh_pages

pages = fresh_pages(model, batch_size, size, fast)
if pages:
    run.record("fresh_pages_default", pages[0])
    run.record("fresh_pages_kept", pages[1])

# %% tags=["hide-input"]
run.record("gain_if_all_else_were_free", 1 / run["share_products"])
run.say("""Of a step's operators {share_products:.0%} is matrix products, {share_attention:.0%} attention, {share_gelu:.0%} GELU and its derivative, {share_optimizer:.0%} the optimizer and the average, all fused. If everything but the products were free, the step would be {gain_if_all_else_were_free:.2f} times as fast: that is the most that any change can bring which leaves the products alone. Already fused, optimizer and average take {share_optimizer:.0%}: no further change to them can win more. In bf16 attention takes **{share_attention_bf16:.0%}** of the step: """
        + ("as fused here it is a slow kernel in that format, and what the products gain is lost in it.\n\n" if run["share_attention_bf16"] > 2 * run["share_attention"] else
           "the format changes little about where the time goes.\n\n") + """In the block the products run at {block_products_of_ceiling:.0%} of the device's fastest product ({ceiling_gflops:,.0f} GFLOP/s). The GELU takes {gelu_over_copy:.1f} times as long as its bytes need at {bandwidth_gbytes:,.0f} GB/s: where that is well above one, it is the tangent that costs: a compiler that fuses it saves the trip, and the arithmetic only where its own tangent is cheaper.

""" + ("A step takes {fresh_pages_default:,} fresh pages as the C library does it by default, and {fresh_pages_kept:,} when freed memory is kept." if pages else
       "Fresh pages are not counted here: the step runs on a GPU, or the system does not say."))

# %% [markdown]
# ## How cost grows
#
# From one small step, each of batch, depth, width and tokens grows while the others stay. A slope of one in logarithms means twice the cost for twice the size. A block's products cost tokens times width squared, attention tokens squared times width; weights and their moments grow with the square of the width and not with the batch.
#
# > **Predict first.** The exponent of time over width: one, two? And the share of attention at 1,024 tokens?

# %%
from dit_repro.speed import Size, growth_figure, measure_growth

found = {growth.axis: growth for growth in measure_growth(Size(*speed.growth), device, speed.factors)}
run.figure(growth_figure([*found.values()]), name="growth", caption="Time and peak memory of a training step along four axes, "
           "with exponents fitted over all points. Small steps are dominated by what an operator costs before it begins.")
for axis, growth in found.items():
    run.record(f"time_exponent_{axis}", growth.exponent("seconds"))
    run.record(f"memory_exponent_{axis}", growth.exponent("peak_bytes"))
tokens = found["tokens"]
run.record("fewest_tokens", tokens.values[0])
run.record("most_tokens", tokens.values[-1])
run.record("attention_share_fewest", tokens.attention[0])
run.record("attention_share_most", tokens.attention[-1])
pd.DataFrame({"tokens": tokens.values, "share of attention": tokens.attention}).style.format({"share of attention": "{:.0%}"}).hide(axis="index")

# %% tags=["hide-input"]
run.say("""Time grows with exponents {time_exponent_batch:.2f} in the batch, {time_exponent_depth:.2f} in depth, {time_exponent_width:.2f} in width and {time_exponent_tokens:.2f} in tokens; memory with {memory_exponent_batch:.2f}, {memory_exponent_depth:.2f}, {memory_exponent_width:.2f} and {memory_exponent_tokens:.2f}. Attention takes {attention_share_fewest:.0%} of a step at {fewest_tokens} tokens and **{attention_share_most:.0%}** at {most_tokens}. The kernel that computes it matters in proportion.""")

# %% [markdown]
# Fused attention against plain products, the same network once more with more tokens, in the same precision and not compiled:

# %%
model, batch_size, size = speed.long
long = run_ladder(model, batch_size, device, input_size=size, alone=False, parity=False, compile=False, baseline=fast, rungs={},
                  variants={"plain attention": VARIANTS["plain attention"]}, repeats=speed.repeats)
fused, plain = rungs(long, "cumulative")[fast.precision], rungs(long, "variant")["plain attention"]
run.record("tokens_of_ladder", replaced[0]["tokens"])
run.record("tokens_of_long", long["tokens"])
run.record("fused_attention_gain_ladder", variants["plain attention"]["seconds"] / plain_step["seconds"])
run.record("fused_attention_gain_long", plain["seconds"] / fused["seconds"])
run.record("fused_attention_memory_long", fused["peak_bytes"] / plain["peak_bytes"])

# %% tags=["hide-input"]
run.say("""Against plain products, both in {variants_precision}, fused attention runs the step at {fused_attention_gain_ladder:.2f} times the speed at {tokens_of_ladder} tokens and at {fused_attention_gain_long:.2f} times at {tokens_of_long}, where it needs {fused_attention_memory_long:.0%} of the memory.""")

# %% [markdown]
# ## Two ranks
#
# XL/2 did not fit the post's one H100 at batch 256, so it ran on two: 246.9 ms a step alone, 284 to 287 ms together. The post takes utilization near 100% on both as proof that the parallelism was efficient; but a GPU that waits for a message also counts as utilized. Time tells. Below two processes train together over gloo, or over NCCL where there are two GPUs, and the parts are separated: a rank alone, both without messages, both with, and the messages with nothing else to do.
#
# > **Predict first.** Two cores, two ranks, one thread each. Where is time lost: in the messages, or before any is sent?

# %%
from dit_repro.speed import measure_scaling

many_gpus = torch.cuda.device_count() > 1
model, images, size = speed.scaling_gpus if many_gpus else speed.scaling
scaling = measure_scaling(model, images, size, repeats=speed.repeats)
run.record("ddp_model", model)
run.record("ddp_alone_ms", 1e3 * scaling.alone)
run.record("ddp_compute_ms", 1e3 * scaling.compute)
run.record("ddp_together_ms", 1e3 * scaling.together)
run.record("ddp_all_reduce_ms", 1e3 * scaling.all_reduce)
run.record("ddp_megabytes", scaling.bytes / 1e6)
run.record("ddp_efficiency", scaling.efficiency)
run.record("ddp_contention", scaling.contention)
run.record("ddp_hidden", scaling.hidden)
run.record("post_ddp_efficiency", 246.9 / 285.5)
run.record("post_ddp_lost_ms", 285.5 - 246.9)

# %% tags=["hide-input"]
run.say("""A rank of {ddp_model} alone takes {ddp_alone_ms:.0f} ms, both without messages {ddp_compute_ms:.0f} ms, both with messages **{ddp_together_ms:.0f} ms**: an efficiency of {ddp_efficiency:.0%}. (The post's own two times, of another network on other links, give {post_ddp_efficiency:.0%}.) Summing the {ddp_megabytes:.1f} MB of gradients takes {ddp_all_reduce_ms:.1f} ms by itself, of which {ddp_hidden:.0%} runs behind the backward pass. Neighbors that compute as well cost {ddp_contention:.0%} of a step before any message is sent.""")

# %% [markdown]
# From bytes to more GPUs it is arithmetic. A ring moves 2(n − 1)/n of the gradients through each link; behind the backward pass, two thirds of a step, it can hide. The bytes of the network above were counted where DDP hands them over; they are four for each parameter, and so are XL/2's. The links are their makers' numbers, one direction, and reached only in part. The batch grows with the GPUs here: 128 images on each.

# %%
from dit_repro.speed import INFINIBAND, NVLINK, all_reduce_seconds, scaled_step

with torch.device("meta"):
    xl, counted = create_model("DiT-XL/2"), create_model(model, input_size=size)
trained = sum(p.numel() for p in counted.parameters() if p.requires_grad)
run.record("bytes_a_parameter", scaling.bytes / trained)
gradients = run["bytes_a_parameter"] * sum(p.numel() for p in xl.parameters() if p.requires_grad)
rows = []
for gpus, link in ((2, NVLINK), (8, NVLINK), (64, INFINIBAND)):
    hidden, exposed = scaled_step(0.2469, gradients, gpus, link)
    rows.append({"GPUs": gpus, "slowest link": link.name, "sum, ms": 1e3 * all_reduce_seconds(gradients, gpus, link),
                 "efficiency, hidden": 0.2469 / hidden, "efficiency, not hidden": 0.2469 / exposed})
estimate = pd.DataFrame(rows)
for row in rows:
    run.record(f"all_reduce_ms_{row['GPUs']}_gpus", row["sum, ms"])
    run.record(f"efficiency_{row['GPUs']}_gpus", row["efficiency, not hidden"])
run.record("post_lost_over_sum", run["post_ddp_lost_ms"] / run["all_reduce_ms_2_gpus"])
estimate.style.format({"sum, ms": "{:.1f}", "efficiency, hidden": "{:.1%}", "efficiency, not hidden": "{:.1%}"}).hide(axis="index")

# %% tags=["hide-input"]
run.say("""Over NVLink the sum of XL/2's gradients takes {all_reduce_ms_2_gpus:.0f} ms for two GPUs. The post's pair lost {post_ddp_lost_ms:.0f} ms, {post_lost_over_sum:.0f} times that sum, with or without overlap. So either its GPUs were not linked that way, or something else was in the loop; the post does not say. On 64 GPUs, where machines talk over InfiniBand, the sum takes {all_reduce_ms_64_gpus:.0f} ms, which still fits behind a backward pass: not hiding it would leave {efficiency_64_gpus:.0%}.""")

# %% [markdown]
# ## Hours and money
#
# For 400,000 steps of 256 images. The price is a parameter of this chapter, not a fact. The post's times are measured by the post; the rows at 35% of the stated peak are what `dit-repro plan` assumes.

# %%
from dit_repro.speed import plan_run
from dit_repro.training import TrainConfig

paper_run = TrainConfig(latents="", model="DiT-B/2", precision="bf16")
rows = [("B/2, float32, the post", 1, POST_MS["fp32"]), ("B/2, all rungs, the post", 1, POST_MS["compile"]), ("XL/2, two GPUs, the post", 2, 285.5)]
for model, gpus in (("DiT-B/2", 1), ("DiT-XL/2", 8)):
    plan = plan_run(replace(paper_run, model=model), gpus=gpus)
    rows.append((f"{model}, planned at {plan.utilization:.0%}", gpus, 1e3 * plan.step_seconds))
cost = pd.DataFrame(rows, columns=["run", "GPUs", "ms a step"])
cost["hours"] = 400_000 * cost["ms a step"] / 3.6e6
cost[f"dollars at {price:g} an hour"] = cost.hours * cost.GPUs * price
run.record("price_per_gpu_hour", price)
run.record("dollars_b2_fp32", cost.iloc[0, -1])
run.record("dollars_b2_compiled", cost.iloc[1, -1])
cost.style.format({"ms a step": "{:.1f}", "hours": "{:.1f}", cost.columns[-1]: "{:,.0f}"}).hide(axis="index")

# %% tags=["hide-input"]
run.say("""At {price_per_gpu_hour:g} dollars an hour the post's four changes turn a run of {dollars_b2_fp32:,.0f} dollars into one of **{dollars_b2_compiled:,.0f}**.""")

# %% [markdown]
# ## On a GPU

# %%
b2 = [result for result in ladders if (result["model"], result["batch_size"]) == ("DiT-B/2", 256)]
if DEVICE == "cuda" and b2:
    ms = {name: 1e3 * rung["seconds"] for name, rung in rungs(b2[0], "cumulative").items()}
    run.record("step_ms_fp32", ms["fp32"])
    run.record("step_ms_compiled", ms["compile"])
    run.record("speedup_tf32", ms["fp32"] / ms["TF32"])
    run.record("speedup_bf16", ms["TF32"] / ms["bf16 autocast"])
    run.record("speedup_fused_adamw", ms["bf16 autocast"] / ms["fused AdamW"])
    run.record("speedup_compile", ms["fused AdamW"] / ms["compile"])
    run.record("speedup_total", ms["fp32"] / ms["compile"])
    run.say("On this GPU the post's four changes give {speedup_total:.2f}x, from {step_ms_fp32:.1f} to {step_ms_compiled:.1f} ms.")
else:
    run.say("**Not run on a GPU.** The cells above are the ones that would run there; the post's times in this chapter are the post's.")

# %% [markdown]
# <details><summary>Answers to the predictions</summary>
#
# A third. On a CPU without TF32 that rung does not exist, and which of the others does nothing or harm the table says; bf16 needs units for it in the processor and kernels that use them, and one kernel of the step without them can cost more than all products gain. Time over width has an exponent near two once products dominate, and less for small widths. Two ranks on two cores of one machine share caches and memory before they send anything.
# </details>
#
# **Exercise.** From the shares above, work out the most that the compiler can gain, and compare it with what its step gained over the one that is not compiled. `dit-repro bench ladder --compile` measures the same for another model, batch and number of tokens.
#
# <details><summary>Answer</summary>
#
# The products stay as they are. If the compiler made all else free, the gain would be one over their share; GELU keeps its arithmetic, so it is less.
# </details>

# %% [markdown]
# ## Claims of this chapter

# %%
run.claims()

# %% [markdown]
# ## What could not be shown at this scale
#
# On a CPU there is no TF32, no CUDA graph, no fp8 and no choice of attention kernels, so the post's ladder itself was not climbed here. The GPU ladder is one command, `dit-repro bench gpu-check OUT.json`, at most six minutes on one GPU; it judges the total, the time of B/2 and the memory of XL/2 with and without checkpointing. Two ranks over gloo show what adds up to a step, not how fast NVLink is.
