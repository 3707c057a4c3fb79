"""Wrong answers to exercises of `grpo_edu.checks` that are right on many inputs; each must lose points on every seed.

`python tests/try_checks.py` tries them next to the mistakes that the exercises know by name.
"""

from __future__ import annotations

import math
import re

import torch

from grpo_edu.losses import per_token_kl

# ---- the values are right, the gradient is missing ----


def logps_by_loop(logits, input_ids, prompt_length, temperature):
    rows = []
    for row_logits, ids in zip(logits.double() / temperature, input_ids.tolist(), strict=True):
        row = []
        for place in range(prompt_length, len(ids)):
            scores = row_logits[place - 1]
            row.append((scores[ids[place]] - scores.exp().sum().log()).item())
        rows.append(row)
    return torch.tensor(rows)


def clip_without_graph(per_token_logps, old_per_token_logps, advantages, epsilon_low, epsilon_high):
    with torch.no_grad():
        ratio = (per_token_logps - old_per_token_logps).exp()
        gain = advantages[:, None]
        return -torch.min(ratio * gain, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * gain)


def k3_by_list(per_token_logps, ref_per_token_logps):
    pairs = zip(per_token_logps.flatten().tolist(), ref_per_token_logps.flatten().tolist(), strict=True)
    return torch.tensor([math.exp(b - a) - (b - a) - 1 for a, b in pairs]).view_as(per_token_logps)


def k3_by_numpy(per_token_logps, ref_per_token_logps):
    return per_token_kl(torch.from_numpy(per_token_logps.numpy()), ref_per_token_logps)


def k3_of_a_detached_ratio(per_token_logps, ref_per_token_logps):
    apart = ref_per_token_logps - per_token_logps
    return apart.exp().detach() - apart - 1


def aggregate_by_list(per_token_loss, mask, loss_type, max_completion_length, update_rows, update_tokens):
    rows = [row[counted == 1].tolist() for row, counted in zip(per_token_loss, mask, strict=True)]
    tokens = sum(rows, [])
    if loss_type == "grpo":
        return sum(sum(row) / len(row) for row in rows) / update_rows
    return sum(tokens) / (update_tokens if loss_type == "dapo" else update_rows * max_completion_length)


def sequence_detached(per_token_logps, old_per_token_logps, completion_mask):
    change = ((per_token_logps - old_per_token_logps) * completion_mask).sum(dim=1) / completion_mask.sum(dim=1)
    return change.detach().exp()


def chunks_by_item(states, chosen, logits_of, vocab_size, size):
    rows = []
    for state, token in zip(states, chosen.tolist(), strict=True):
        logits = torch.cat([logits_of(state[None], one, one + 1)[0] for one in range(vocab_size)])
        rows.append((logits[token] - logits.logsumexp(dim=0)).item())
    return torch.tensor(rows)


# ---- right except on telling inputs ----


def logps_by_exponentials(logits, input_ids, prompt_length, temperature):
    scores = (logits / temperature).exp()
    chances = scores / scores.sum(dim=-1, keepdim=True)
    return chances[:, prompt_length - 1 : -1].log().gather(2, input_ids[:, prompt_length:, None]).squeeze(2)


def settings_anywhere(lines):
    settings = [line for line in lines if "os.environ" in line]
    return ["import os", *settings, *[line for line in lines if line not in (*settings, "import os")]]


def kl_repaired_where_nan(per_token_logps, ref_per_token_logps, completion_mask):
    kl = per_token_kl(per_token_logps, ref_per_token_logps)
    return (kl.masked_fill(kl.isnan(), 0.0) * completion_mask).sum() / completion_mask.sum()


def ratio_times_mask(per_token_logps, old_per_token_logps, loss_mask):
    return bool(((per_token_logps - old_per_token_logps).abs() * loss_mask).max() < 1e-3)


def counts_without_slack(percent, trials, decimals):
    return [count for count in range(trials + 1) if abs(100 * count / trials - percent) <= 0.5 * 10**-decimals]


def rows_rounded_up(weight, bits):
    scale = weight.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
    scale = torch.where(scale == 0, 1.0, scale)
    return (weight / scale + 0.5).floor().to(torch.int8), scale


def mean_of_equal_parts(mean_gradient, rows, size):
    parts = rows.tensor_split(math.ceil(len(rows) / size))  # nearly equal parts, which are then weighed alike
    return sum(mean_gradient(part) for part in parts) / len(parts)


def rest_counts_once(mean_gradient, rows, size):
    parts = rows.split(size)
    total = sum(mean_gradient(part) * (size if len(part) == size else 1) for part in parts)
    return total / len(rows)


def equal_chunks(states, chosen, logits_of, vocab_size, size):
    width = vocab_size // math.ceil(vocab_size / size)
    logits = [logits_of(states, first, first + width) for first in range(0, vocab_size - width + 1, width)]
    return torch.cat(logits, dim=1).log_softmax(dim=1).gather(1, chosen.clamp(max=vocab_size - 2)[:, None])[:, 0]


def _least_with(*scores):
    def squares_a_mean(fishers):
        values = [fisher(torch.tensor(scores)[:, None]).item() for fisher in fishers]
        return values.index(min(values))

    return squares_a_mean


# ---- further wrong answers, from the texts of the exercises ----


def _reads(read):
    """The step of the game with another way to read a number, None where it is illegal."""

    def number_step(text, secret, guesses_left):
        guess = read(text)
        if guess is None or not 1 <= guess <= 99:
            return "illegal", -0.2, guesses_left == 1
        if guess == secret:
            return "right", 1.0, True
        return "higher" if secret > guess else "lower", 0.0, guesses_left == 1

    return number_step


def _by(convert):
    def read(text):
        try:
            return convert(text)
        except ValueError:
            return None

    return read


def _match(pattern):
    return lambda text: int(found[0]) if (found := re.search(pattern, text)) else None


def _leaked(key):
    return lambda train, heldout: [one for one in heldout if key(one) in {*map(key, train)}]


def leaked_by_substring(train, heldout):
    known = [" ".join(one.lower().split()) for one in train]
    return [one for one in heldout if any(" ".join(one.lower().split()) in other for other in known)]


def _worked(is_right, signs=lambda work: work.count("=")):
    def worked_reward(completions, answer, sums, **kwargs):
        paid = []
        for text, right, count in zip(completions, answer, sums, strict=True):
            work, mark, given = text.rpartition("####")
            paid.append(float(bool(mark) and is_right(given, right) and signs(work) >= count))
        return paid

    return worked_reward


def _is_close(given, right):
    try:
        return float(given) == float(right)
    except ValueError:
        return given.strip() == right


def _right_sums(work):
    pairs = [step.split("=") for step in re.findall(r"[-+*\d]+=-?\d+", work)]
    return sum(eval(left) == int(right) for left, right in pairs)


def _signal(has_signal):
    def signal_by_kind(kinds, rewards, num_generations):
        found = {}
        for place, kind in enumerate(kinds):
            group = rewards[place * num_generations : (place + 1) * num_generations]
            found.setdefault(kind, []).append(has_signal(group))
        return {kind: sum(own) / len(own) for kind, own in found.items()}

    return signal_by_kind


def _on_topic(words_of, different=4):
    def short_and_on_topic(completions, topic, most):
        words = [words_of(text) for text in completions]
        return [float(len(one) <= most and topic in one and len({*one}) >= different) for one in words]

    return short_and_on_topic


def _counts(words_of, different_of, topic_in=None):
    """Words, different words and the topic, each counted in a way of its own."""

    def short_and_on_topic(completions, topic, most):
        rewards = []
        for text in completions:
            words = words_of(text)
            is_there = topic in (topic_in or words_of)(text)
            rewards.append(float(len(words) <= most and is_there and len({*different_of(text)}) >= 4))
        return rewards

    return short_and_on_topic


def _words(text):
    return [word.strip(".,!?").lower() for word in text.split()]


def advantages_of_full_rows(turn_rewards, num_generations):
    to_go = turn_rewards.nan_to_num(0.0).flip(1).cumsum(1).flip(1)
    groups = to_go.view(-1, num_generations, to_go.shape[1])
    played = ~turn_rewards.isnan().view(groups.shape)
    mean = (groups * played).sum(1, keepdim=True) / played.sum(1, keepdim=True)
    return ((groups - mean) * played).view(turn_rewards.shape)  # NaN in a turn that no game had


def turns_from_both_ends(turn_rewards, num_generations):
    rewards = turn_rewards.nan_to_num(0.0)
    to_go = (rewards.sum(1, keepdim=True) - rewards.cumsum(1) + rewards).masked_fill(turn_rewards.isnan(), math.nan)
    groups = to_go.view(-1, num_generations, to_go.shape[1])
    return (groups - groups.nanmean(1, keepdim=True)).nan_to_num(0.0).view(turn_rewards.shape).round(decimals=2)


def seconds_of_the_last(task, clock, repeats, loops):
    task()
    for _ in range(repeats):
        start = clock()
        for _ in range(loops):
            task()
        seconds = clock() - start
    return seconds / loops


def threads_within_a_twentieth(counts, seconds, usable_cores):
    allowed = [(count, time) for count, time in zip(counts, seconds, strict=True) if count <= usable_cores]
    fastest = min(time for _, time in allowed)
    return next(count for count, time in allowed if time - fastest <= 0.05)


def number_without_checking_commas(text):
    _, mark, rest = text.rpartition("####")
    found = re.fullmatch(r"-?\d{1,3}(,\d{3})*|-?\d+", rest.split("\n")[0].strip()) if mark else None
    return found[0].replace(",", "") if found else None


def gate_of_more_than_one(right, bonus, num_generations):
    paid = []
    for place, one in enumerate(right):
        first = place // num_generations * num_generations
        is_open = sum(right[first : first + num_generations]) >= max(1, num_generations // 2)
        paid.append(one * (1 + bonus[place] * is_open))
    return paid


def tie_of_equal_neighbors(rewards, num_generations):
    groups = rewards.view(-1, num_generations)
    return groups[:, 0] == groups[:, 1]


def sampled_until_enough_is_asked(rewards, num_generations, groups_needed):
    groups = rewards.view(-1, num_generations)
    kept = (groups != groups[:, :1]).any(1).nonzero().flatten()[:groups_needed]
    return kept, (int(kept[-1]) + 1 if len(kept) else 0) * num_generations


def sampled_with_a_tolerance(rewards, num_generations, groups_needed):  # a small difference counts as a tie
    groups = rewards.view(-1, num_generations)
    kept = (groups.std(dim=1) > 1e-4).nonzero().flatten()[:groups_needed]
    sampled = int(kept[-1]) + 1 if len(kept) == groups_needed else len(groups)
    return kept, sampled * num_generations


def worked_in_the_whole_text(completions, answer, sums, **kwargs):  # equals signs of the answer count as well
    rows = zip(completions, answer, sums, strict=True)
    return [float(text.rpartition("####")[2].strip() == right and text.count("=") >= n) for text, right, n in rows]


def masked_by_the_smallest(completion_ids, eos_token_ids):
    is_end = completion_ids >= min(eos_token_ids)
    return (is_end.long().cumsum(1) - is_end.long() == 0).long()


def verdict_by_mean_lengths(advantages, lengths):  # the size of an advantage has no weight in the verdict
    pairs = [*zip(advantages, lengths, strict=True)]
    good, bad = [n for a, n in pairs if a > 0], [n for a, n in pairs if a < 0]
    apart = sum(good) / len(good) - sum(bad) / len(bad)
    token = -sum(a * n for a, n in pairs) / sum(lengths)
    return -sum(advantages) / len(advantages), token, "good" if apart > 0 else "bad" if apart < 0 else "neither"


def verdict_by_sign_only(advantages, lengths):
    token = -sum(a * n for a, n in zip(advantages, lengths, strict=True)) / sum(lengths)
    return -sum(advantages) / len(advantages), token, "bad" if token > 0 else "good" if token < 0 else "neither"


def tied_by_the_mean(rewards, num_generations):
    means = rewards.view(-1, num_generations).mean(1).round()
    return (means == 1).float().mean().item(), (means == 0).float().mean().item()


def rates_of_the_first(tuning):
    return {method: sorted(rates.items(), key=lambda one: one[1])[-1][0] for method, rates in tuning.items()}


def margin_of_one_side(low, high, margin):
    if high <= margin and low >= 0 or low >= -margin and high <= 0:
        return "equal"
    return "better" if low > margin else "worse" if high < -margin else "unclear"


WRONG_ANSWERS = {
    "number_step": tuple(
        map(
            _reads,
            (
                _by(int),
                _by(lambda text: int(float(text))),
                lambda text: int(text) if text.strip().isdigit() else None,
                _match(r"\d+"),
                _match(r"^ *\d+ *$"),
                _by(lambda text: abs(int(text))),
                _by(lambda text: int(text.replace(" ", ""))),
                lambda text: int(text) if text.isdecimal() else None,
            ),
        )
    ),
    "leaked_questions": (
        _leaked(lambda text: re.findall(r"\d+", text)),
        _leaked(lambda text: text.lower().strip()[:12]),
        _leaked(lambda text: frozenset(text.lower().split())),
        _leaked(lambda text: "".join(text.lower().split())),
        _leaked(lambda text: " ".join(text.lower().replace("\n", " ").split(" "))),
        _leaked(lambda text: re.sub(" +", " ", text.lower().strip())),
        _leaked(lambda text: " ".join(re.findall(r"\w+", text.lower()))),
        leaked_by_substring,
    ),
    "worked_reward": (
        worked_in_the_whole_text,
        _worked(_is_close),
        _worked(lambda given, right: given == f" {right}"),
        _worked(lambda given, right: given.strip(" ") == right),
        _worked(lambda given, right: given.strip() == right, _right_sums),
        _worked(lambda given, right: given.strip().lower() == right.lower()),
        _worked(lambda given, right: given.strip().lstrip("+0") == right),
        _worked(lambda given, right: given.split()[:1] == [right]),
        _worked(lambda given, right: given.strip() == right, lambda work: len(re.findall(r"\d=\d", work))),
    ),
    "signal_by_kind": (
        _signal(lambda group: 0 < sum(group) / len(group) < 1),
        _signal(lambda group: len({*group}) == 2),
        _signal(lambda group: group[0] != group[-1]),
        _signal(lambda group: max(group) - min(group) > 1e-3),
    ),
    "short_and_on_topic": (
        _on_topic(lambda text: [word.strip(".,!?").lower() for word in text.split(" ")]),
        _on_topic(lambda text: [word.rstrip(".,!?").lower() for word in text.split()]),
        _on_topic(lambda text: re.findall(r"\w+", text.lower())),
        _on_topic(lambda text: [word.strip(".").lower() for word in text.replace(",", "").split()]),
        _counts(_words, lambda text: [word.strip(".,!?") for word in text.split()]),
        _counts(_words, lambda text: text.lower().split()),
        _counts(_words, str.split),
        _counts(_words, _words, lambda text: text.lower().split()),
        _counts(_words, _words, lambda text: [word.strip(".,!?") for word in text.split()]),
        _counts(lambda text: text.split(" "), _words, _words),
        _counts(_words, _words, lambda text: text.lower()),
    ),
    "turn_advantages": (advantages_of_full_rows, turns_from_both_ends),
    "best_seconds": (seconds_of_the_last,),
    "choose_threads": (threads_within_a_twentieth,),
    "extract_number": (number_without_checking_commas,),
    "gated_reward": (gate_of_more_than_one,),
    "degenerate_groups": (tie_of_equal_neighbors,),
    "dynamic_sampling": (sampled_until_enough_is_asked, sampled_with_a_tolerance),
    "completion_mask": (masked_by_the_smallest,),
    "first_loss": (verdict_by_sign_only, verdict_by_mean_lengths),
    "tied_groups": (tied_by_the_mean,),
    "best_rates": (rates_of_the_first,),
    "equality_verdict": (margin_of_one_side,),
    "completion_logps": (logps_by_loop, logps_by_exponentials),
    "clipped_loss": (clip_without_graph,),
    "k3": (k3_by_list, k3_by_numpy, k3_of_a_detached_ratio),
    "aggregate": (aggregate_by_list,),
    "sequence_ratio": (sequence_detached,),
    "logps_in_chunks": (chunks_by_item, equal_chunks),
    "mend_script": (settings_anywhere,),
    "batch_kl": (kl_repaired_where_nan,),
    "ratio_is_one": (ratio_times_mask,),
    "possible_counts": (counts_without_slack,),
    "quantize_rows": (rows_rounded_up,),
    "accumulated_gradient": (mean_of_equal_parts, rest_counts_once),
    "squares_a_mean": (_least_with(1.0, 2.0), _least_with(2.0, 2.0, -1.0), _least_with(3.0, 1.0, -0.5)),
}
