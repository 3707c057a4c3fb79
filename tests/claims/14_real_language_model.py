# the model is the one that the text describes, and a step with it takes much longer than with tiny
assert model.num_parameters() == 134_515_008 and len(tokenizer) == 49_152
assert ratio > 3

# word problems give hardly any signal, worked solutions are unusual text, instructions give a signal
assert rewards.mean() < 0.05 and tied >= 6
assert unusual["worked solutions"] > unusual["its own samples"]
assert 0.03 < obeyed.mean() < 0.6
signal = (obeyed.sum(dim=1) > 0) & (obeyed.sum(dim=1) < 4)
assert signal.sum() >= 2, "some groups have a signal"

# of the same samples, the strictest reward pays for fewer and gives fewer groups a signal
tried = [torch.tensor(reward(samples, truth)).view(-1, 4) for reward in rewards_tried]
assert tried[0].mean() >= tried[1].mean() > tried[2].mean()
assert (tried[0].std(dim=1) > 0).sum() > (tried[2].std(dim=1) > 0).sum()
assert open_loopholes == [16, 14, 0]

# eight steps raise the reward, and the held-out share that obeys; the topic and the form of the answers are lost
paid = [step["reward"] for step in history]
assert sum(paid[-3:]) / 3 - sum(paid[:2]) / 2 > 0.15
assert grpo_edu.mcnemar(held_before["obeys"], held_after["obeys"]).p_value < 0.001
assert sum(held_after["obeys"]) > sum(held_before["obeys"]) + 15
assert sum(held_after["on topic"]) < sum(held_before["on topic"]) - 5
assert len(set(after.completions)) < len(set(before.completions))
