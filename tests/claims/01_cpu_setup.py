"""What notebook 01 says and what must hold for its numbers on every computer."""

# scoring and the update are thin slices of a step
assert set(seconds) == {"sample", "score", "forward", "backward", "update"}
assert seconds["score"] + seconds["update"] < 0.25 * sum(seconds.values())
assert imports > startup["model"]

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

# every setting of section 4 was measured; how far the speed falls depends on the computer
assert set(measured) == set(settings) and all(share > 0 for share in measured.values())

assert total.item() == 256
assert (torch.tensor(0.5, dtype=torch.bfloat16) - 1e-4).item() == 0.5
assert whole.tolist() == [50, -127, 3, 26]
