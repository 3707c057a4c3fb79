cases = json.loads(Path("../benchmarks/results/memory.json").read_text())["cases"]
assert all(abs(row["estimate"] / row["peak"] - 1) < 0.15 for row in cases if row["model"] == "494M")
assert 25 < peak_gb(policy_of("1.5B"), batch) < 35
assert peak_gb(policy_of("1.5B", "bfloat16", 16), checkpointed) < 5, "LoRA brings 1.5 billion weights to a laptop"
assert 2 < over < 4, "a real step takes about three times the floor"
assert own.k > 3 * bare.k, "the same questions in another form"
assert largest_difference(alone, before) > 1e-3, "the step changes the model"
assert max(apart) < 1e-6, "two processes make the step of one"
assert sum(len(inspect.getsource(part).splitlines()) for part in (sample_groups, data_parallel_step)) <= 40

two_cores, gpu = (run_cost("494M", one_pass, machine) for machine in machines)
assert round(two_cores["hours"]) == 76 and gpu["hours"] < 2
assert 0.2 < gpu["kWh"] / two_cores["kWh"] < 0.5 and 0.05 < gpu["USD"] / two_cores["USD"] < 0.2
assert max(free_at) < in_waves and max(free_at) >= sum(lengths) / 8
assert sweeps["rate"]["difference"]["low"] > 0 > sweeps["loss"]["difference"]["low"]
