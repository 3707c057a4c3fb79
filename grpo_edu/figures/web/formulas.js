/* The course's formulas in plain JavaScript, for pages without Python: the token inspector, and the explorers and the
   playground of the web book. Each agrees with the package's function that it names; tests compare them. */
"use strict";

/* Rewards minus the mean of their group, divided as scaling says: "group", "batch", "none" or "mean" as in
   grpo_edu.advantages.group_advantages, and "rloo" as in rloo_advantages. batch: the rewards of all groups.
   A reward of null applies to no completion; its advantage is 0. */
function groupAdvantages(rewards, scaling, batch = rewards) {
  const given = rewards.filter(reward => reward !== null);
  if (given.every(reward => reward === given[0])) return rewards.map(() => 0);
  const mean = given.reduce((sum, reward) => sum + reward, 0) / given.length;
  const divisors = {
    group: () => sampleDeviation(given) + 1e-4,
    batch: () => sampleDeviation(batch.filter(reward => reward !== null)) + 1e-4,
    mean: () => mean + 1e-4,
    none: () => 1,
    rloo: () => (given.length - 1) / given.length,
  };
  const divisor = divisors[scaling]();
  return rewards.map(reward => (reward === null ? 0 : (reward - mean) / divisor));
}

function sampleDeviation(values) {
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  return Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (values.length - 1));
}

/* The share of groups whose completions are all right or all wrong; as grpo_edu.advantages.tie_probability. */
function tieProbability(p, size) {
  return p ** size + (1 - p) ** size;
}

/* Objective of one token and its push on log π, as the gradients of grpo_edu.losses.per_token_policy_loss.
   ratio is π / π_old with π_old = 1; reference is π / π_ref; high is ε_high (for cispo the largest ratio itself). */
function tokenObjective({ ratio, advantage, low, high, beta = 0, reference = 1, loss = "grpo" }) {
  const logp = Math.log(ratio);
  let objective, push;
  if (loss === "reinforce" || loss === "cispo" || loss === "vespo") {
    const [power, decay] = advantage > 0 ? [2, 3] : [3, 2];
    const weights = { reinforce: 1, cispo: Math.min(ratio, high), vespo: ratio ** power * Math.exp(decay * (1 - ratio)) };
    objective = weights[loss] * advantage * logp;
    push = weights[loss] * advantage;
  } else if (loss === "sapo") {
    const temperature = advantage > 0 ? 1 : 1.05;
    const sigmoid = 1 / (1 + Math.exp(-temperature * (ratio - 1)));
    objective = (sigmoid * 4 / temperature) * advantage;
    push = 4 * sigmoid * (1 - sigmoid) * ratio * advantage;
  } else {
    const clipped = Math.min(Math.max(ratio, 1 - low), 1 + high);
    objective = Math.min(ratio * advantage, clipped * advantage);
    push = clipped === ratio || ratio * advantage < clipped * advantage ? ratio * advantage : 0;
  }
  const k1 = Math.log(reference);
  const k3 = Math.exp(-k1) + k1 - 1;
  return { objective: objective - beta * k3, push: push - beta * (1 - Math.exp(-k1)), k1, k2: k1 ** 2 / 2, k3 };
}

/* The weight of a token in the loss of its batch; as grpo_edu.losses.token_weights.
   own: tokens of its completion; rows: completions of the batch; all: tokens of the batch; longest: the length limit. */
function tokenWeight(loss, { own, rows, all, longest }) {
  if (["bnpo", "dapo", "cispo", "vespo"].includes(loss)) return 1 / Math.max(1, all);
  if (loss === "dr_grpo") return 1 / (rows * longest);
  if (loss === "luspo" || loss === "reinforce") return 1 / rows;
  return 1 / (rows * Math.max(1, own));
}

/* What the next update does to each token of a group of a token record (grpo_edu.runs.tokens), under the settings
   { loss, scaling, low, high, beta, level, update }. A row for each completion, and in it for each token its numbers;
   `push` is the derivative of minus the loss of the batch by the token's log-probability, so "up" is positive. */
function groupTerms(record, group, settings) {
  const { loss, scaling, low, high, beta, level, update } = settings;
  const rewards = group.completions.map(one => one.reward);
  const advantages = scaling === "recorded"
    ? group.completions.map(one => one.advantage) : groupAdvantages(rewards, scaling, record.rewards);
  return group.completions.map((one, row) => {
    const logps = one.logps[update], old = one.logps[0];
    const counts = one.counts ?? logps.map(() => 1), importance = one.importance ?? logps.map(() => 1);
    const own = counts.reduce((sum, count) => sum + count, 0);
    const sizes = { own, rows: record.rewards.length, all: record.num_tokens, longest: record.max_completion_length };
    const changes = logps.map((logp, place) => (counts[place] ? logp - old[place] : 0));
    const whole = loss === "vespo" ? vespoRatio(changes, counts, one.importance)
      : level === "sequence" ? Math.exp(changes.reduce((sum, change) => sum + change, 0) / Math.max(1, own)) : null;
    const direct = ["reinforce", "cispo", "vespo"].includes(loss); // their objective is a number times log π itself
    const mean = importance.reduce((sum, value, place) => sum + counts[place] * value, 0) / Math.max(1, own);
    return logps.map((logp, place) => {
      const ratio = whole ?? Math.exp(changes[place]), advantage = advantages[row];
      const policy = tokenObjective({ ratio, advantage, low, high, loss });
      const factor = loss === "vespo" ? 1 : importance[place];
      const corrected = whole !== null && !direct ? mean : factor; // each token moves the one ratio of all tokens
      const distance = one.ref ? logp - one.ref[place] : 0;
      const kl = Math.exp(-distance) + distance - 1, held = beta * (1 - Math.exp(-distance));
      const weight = counts[place] ? tokenWeight(loss, sizes) : 0;
      const objective = factor * (direct ? policy.push * logp : policy.objective) - beta * kl;
      const pull = corrected * policy.push;
      const clipped = loss === "cispo" ? ratio > high : policy.push === 0 && advantage !== 0;
      return { ratio, advantage, weight, kl, clipped, pull, held, importance: corrected, loss: -objective, push: weight * (pull - held) };
    });
  });
}

/* VESPO's w: the product of a completion's ratios and importance weights, bounded as in grpo_edu.losses. */
function vespoRatio(changes, counts, importance) {
  const bound = (value, low, high) => Math.min(Math.max(value, low), high), least = Math.log(1e-8);
  let total = changes.reduce((sum, change) => sum + bound(change, -20, 20), 0);
  if (importance) total += importance.reduce((sum, one, place) => sum + (counts[place] ? bound(Math.log(one), least, 20) : 0), 0);
  return Math.exp(bound(total, least, 20));
}
