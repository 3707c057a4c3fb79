cases = json.loads(Path("../benchmarks/results/memory.json").read_text())["cases"]
assert all(abs(row["estimate"] / row["peak"] - 1) < 0.15 for row in cases if row["model"] == "494M")
assert 25 < peak_gb(policy_of("1.5B"), batch) < 35
assert peak_gb(policy_of("1.5B", "bfloat16", 16), checkpointed) < 5, "LoRA brings 1.5 billion weights to a laptop"
assert 2.5 < over < 3, "a real step takes almost three times the floor"
assert own.k > 3 * bare.k, "the same questions in another form"
assert largest_difference(alone, before) > 1e-3, "the step changes the model"
assert max(apart) < 1e-6, "two processes make the step of one"
assert sum(len(inspect.getsource(part).splitlines()) for part in (sample_groups, data_parallel_step)) <= 40

two_cores, gpu = (run_cost("494M", one_pass, machine) for machine in machines)
assert round(two_cores["hours"]) == 168 and gpu["hours"] < 2
assert round(two_cores["kWh"] / gpu["kWh"]) == 6 and round(two_cores["USD"] / gpu["USD"], -1) == 20
assert max(free_at) < in_waves and max(free_at) >= sum(lengths) / 8
assert sweeps["rate"]["difference"]["low"] > 0 > sweeps["loss"]["difference"]["low"]

(run,) = (run for run in study["runs"] if run["arm"] == "accuracy")
assert all(
    round(100 * run["change"][f"greedy/{name}"]["difference"]) == 8 for name in ("strict", "lenient", "readable")
)
net = {name: row["only_after"] - row["only_before"] for name, row in run["change"].items()}
assert net["greedy/strict"] == 24 and net["greedy/strict where both are readable"] == 21
(form,) = (run for run in study["runs"] if run["arm"] == "form")
assert (
    round(100 * form["change"]["greedy/strict"]["difference"]) == -11 and form["counts"]["greedy/readable"]["k"] == 300
)
equations = [study["equations of the untrained model"], form["equations"]]
assert [round(100 * row["false"] / row["equations"]) for row in equations] == [14, 39]
longer = study["untrained"]["0 examples, 512 tokens"]["greedy/strict"]
assert round(1000 * longer["accuracy"]) == 253
asked_alike = study["longer"]["accuracy, 0 examples, 512 tokens"]
assert round(1000 * asked_alike["counts"]["greedy/strict"]["accuracy"]) == 287
assert round(1000 * asked_alike["change"]["greedy/strict"]["difference"]) == 33
assert min(curves["paid for form"][step]["reward"] for step in range(4, 60)) > 0.95
assert [round(10 * sum(part)) for part in (trained["reward"][:10], trained["reward"][-10:])] == [16, 27]
assert round(100 * trained["truncated"][9]) == 56 and max(trained["truncated"][:9]) < 0.5
assert untrained["greedy/strict"][:10].count("1") == 0 and trained["greedy/strict"][:10].count("1") == 1
assert round(sum(took) / 3600 * machines["2 cores"]["usd"], 2) == 0.70
