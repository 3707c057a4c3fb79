"""Right answers to the exercises of `grpo_edu.checks.diagnosis_lab`, written in other ways than the reference."""

from __future__ import annotations

import torch

from grpo_edu.advantages import group_advantages
from grpo_edu.checks.diagnosis_lab import MENDED, READ, broken_settings, right_diagnoses


def trouble_by_tensor(curves):
    reward, tied, clipped = (torch.tensor(list(curves[sign])) for sign in READ)
    answers = {
        "unpaid": reward[:4].mean() < 0.1,
        "tied": tied[:2].mean() > 0.499,
        "broken down": 2 * reward[-4:].mean() < reward[:4].mean(),
        "clipped": (clipped > 0).any(),
        "not in the curves": True,
    }
    return next(name for name, yes in answers.items() if yes)


def trouble_by_sums(curves):
    reward, tied = curves["reward"], curves["frac_reward_zero_std"]
    first, last = sum(reward[:4]), sum(reward[len(reward) - 4 :])
    if first < 0.4:
        return "unpaid"
    if tied[0] + tied[1] >= 1:
        return "tied"
    if last < first / 2:
        return "broken down"
    if any(curves["clip_ratio/region_mean"]):
        return "clipped"
    return "not in the curves"


def trouble_backwards(curves):
    found = "not in the curves"
    if sum(curves["clip_ratio/region_mean"]) > 0:
        found = "clipped"
    start = sum(curves["reward"][:4]) / 4
    if sum(curves["reward"][-4:]) / 4 < start / 2:
        found = "broken down"
    if sum(curves["frac_reward_zero_std"][:2]) / 2 >= 0.5:
        found = "tied"
    return "unpaid" if start < 0.1 else found


def _diagnoses_of(student):
    return lambda: right_diagnoses(student)


def diagnoses_in_lists():
    """As they arrive from another process."""
    right = right_diagnoses("Øyvind 11")
    return {name: list(words) if name != "student" else words for name, words in right.items()}


def signs_by_loop(rewards, advantages, num_generations):
    for start in range(0, len(rewards), num_generations):
        group = rewards[start : start + num_generations].tolist()
        mean = sum(group) / len(group)
        for reward, advantage in zip(group, advantages[start : start + num_generations].tolist(), strict=True):
            want = 0 if len(set(group)) == 1 else (reward > mean) - (reward < mean)
            if (advantage > 0) - (advantage < 0) != want:
                return False
    return True


def signs_by_package(rewards, advantages, num_generations):
    own = group_advantages(rewards, num_generations)
    return bool((torch.sign(own) == torch.sign(advantages)).all())


def signs_by_product(rewards, advantages, num_generations):
    groups, pushes = rewards.view(-1, num_generations), advantages.view(-1, num_generations)
    tied = groups.amax(dim=1) == groups.amin(dim=1)
    apart = groups[~tied] - groups[~tied].mean(dim=1, keepdim=True)
    return bool((apart * pushes[~tied] > 0).all()) and not pushes[tied].any()


def mask_by_loop(completion_ids, loss_mask, eos_token_id):
    for ids, mask in zip(completion_ids.tolist(), loss_mask.tolist(), strict=True):
        length = ids.index(eos_token_id) + 1 if eos_token_id in ids else len(ids)
        if mask != [1] * length + [0] * (len(ids) - length):
            return False
    return True


def mask_by_cumsum(completion_ids, loss_mask, eos_token_id):
    ended = (completion_ids == eos_token_id).cumsum(dim=1).roll(1, dims=1)
    ended[:, 0] = 0
    return bool(((ended == 0) == loss_mask.bool()).all())


def mask_by_rules(completion_ids, loss_mask, eos_token_id):
    is_eos, mask = completion_ids == eos_token_id, loss_mask.bool()
    first = is_eos & (is_eos.cumsum(dim=1) == 1)
    behind = (is_eos.cumsum(dim=1) > 0) & ~first
    return bool(mask[~behind].all() and not mask[behind].any())


def ratio_by_logs(per_token_logps, old_per_token_logps, loss_mask):
    apart = (per_token_logps - old_per_token_logps).masked_fill(loss_mask == 0, 0.0)
    return bool(apart.abs().max() < 1e-3)


def ratio_by_loop(per_token_logps, old_per_token_logps, loss_mask):
    tokens = zip(*(one.flatten().tolist() for one in (per_token_logps, old_per_token_logps, loss_mask)), strict=True)
    return not any(counts and abs(logp - old) > 1e-3 for logp, old, counts in tokens)


def ratio_by_close(per_token_logps, old_per_token_logps, loss_mask):
    keep = loss_mask == 1
    return torch.allclose(per_token_logps[keep], old_per_token_logps[keep], rtol=0, atol=1e-3)


def mend_by_copy(settings):
    mended = dict(settings)
    if mended["num_generations"] <= 3:
        mended["num_generations"] = 8
    if mended["max_completion_length"] < 48:
        mended["max_completion_length"] = 96
    if mended["learning_rate"] > 0.001:
        mended["learning_rate"] = 0.0002
    mended["reward"], mended["replaced"] = "accuracy_reward", []
    return mended


def mend_by_comprehension(settings):
    ill = broken_settings(settings)
    return {name: MENDED[name] if name in ill else value for name, value in settings.items()}


def mend_by_steps(settings):
    for name in broken_settings(settings):
        settings = settings | {name: MENDED[name]}
    return dict(settings)


RIGHT_ANSWERS = {
    "name_trouble": (trouble_by_tensor, trouble_by_sums, trouble_backwards),
    "find_fault": (_diagnoses_of("Jane Miller"), _diagnoses_of("s2026"), diagnoses_in_lists),
    "signs_are_right": (signs_by_loop, signs_by_package, signs_by_product),
    "mask_is_right": (mask_by_loop, mask_by_cumsum, mask_by_rules),
    "ratio_is_one": (ratio_by_logs, ratio_by_loop, ratio_by_close),
    "mend": (mend_by_copy, mend_by_comprehension, mend_by_steps),
}
