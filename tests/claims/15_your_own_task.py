"""What notebook 15 says and what must hold for its numbers on every computer."""

# the start: sometimes right, and the model could do it before any training
assert 0.3 < base.accuracy < 0.55 and greedy.accuracy > 0.85 and 0.1 < without_mark(base) < 0.25

# the reward pays for attempts that are not right, better than for honest work
assert honest < 0.8 and sum(reward >= honest for reward in others[1:]) == 5

# no question of the training file is held out, however many are written
rest = write_file("rest.jsonl", 300, larger_question, seed=2)
more = write_file("more.jsonl", 300, larger_question, seed=1, taken=rest)
assert len(rest) == len(more) == 300 and not {*rest} & {*more}

# the first run: the reward rises, the accuracy falls, and the mark is what is missing
means = [step["reward"] for step in hacked.history]
assert sum(means[-5:]) > sum(means[:5]) + 0.5
assert hacked.after.accuracy < 0.6 * base.accuracy and without_mark(hacked.after) > 0.5
assert compare(base, hacked.after).p_value < 1e-4

# the second run: reward and accuracy rise, and the answers have the mark
assert [name for name, reward in paid.items() if reward > 0] == list(paid)[:2]
assert sound.after.accuracy > 1.7 * base.accuracy and without_mark(sound.after) < 0.1
assert compare(base, sound.after).p_value < 1e-6
means = [step["reward"] for step in sound.history]
assert sum(means[-5:]) > sum(means[:5]) + 1

# the exported folder is the same model
differ = [one != other for one, other in zip(again.completions, sound.after.completions, strict=True)]
assert sum(differ) <= 3, "the weights lie elsewhere in memory, so a few last digits may be others"
