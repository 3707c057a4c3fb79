"""What notebook 01 says and what must hold for its numbers on every computer."""

# scoring and the update are thin slices of a step
assert set(seconds) == {"sample", "score", "forward", "backward", "update"}
assert seconds["score"] + seconds["update"] < 0.25 * sum(seconds.values())

# 4 + 4 + 8 bytes per weight
assert held["gradients"] == held["weights"] == 4 * model.num_parameters()
assert held["optimizer"] == 2 * held["weights"]


# the small products gain nothing from a second thread worth speaking of; what another program did to one of the two
# measurements is gone when both are made again
def gain_of_a_second_thread():
    seconds_of = {}
    for count in (1, 2):
        torch.set_num_threads(count)
        seconds_of[count] = best_seconds(tasks["small products"], repeats=20)
    torch.set_num_threads(threads_before)
    return seconds_of[1] / seconds_of[2]


assert one / two < 1.5 or min(gain_of_a_second_thread() for _ in range(10)) < 1.5
before, after = in_a_new_process(late).partition("≈")[2].split(" and ")
assert before.strip() == after.strip()

# bf16 loses an update of a ten-thousandth
assert (torch.tensor(0.5, dtype=torch.bfloat16) + 1e-4).item() == 0.5
assert set(speed) == {"256 rows", "1 row"} and all(set(row) == {"fp32", "bf16", "int8"} for row in speed.values())
