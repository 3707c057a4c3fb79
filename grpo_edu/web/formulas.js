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

/* Three formulas of a token. `token` returns its objective and the push on log π, as grpo_edu.losses.per_token_policy_loss
   and its gradient; high is ε_high (with capsWeight the largest ratio itself). The words are those of the token inspector. */
const CLIPPED = {
  movesRatio: true, // the derivative goes through the ratio
  token({ ratio, advantage, low, high }) {
    const bounded = Math.min(Math.max(ratio, 1 - low), 1 + high);
    const moves = bounded === ratio || ratio * advantage < bounded * advantage;
    const objective = Math.min(ratio * advantage, bounded * advantage);
    return { objective, push: moves ? ratio * advantage : 0, clipped: !moves && advantage !== 0 };
  },
  pushWords: ({ rho, gain, clipped }) => (clipped ? ["0 (clipped)", "0"] : ["ρ · A", `${rho} · ${gain}`]),
  clipWords({ clipped, low, high, number }) {
    const bounds = `${number(1 - low)} to ${number(1 + high)}`;
    return clipped ? `yes: ρ is outside of ${bounds}, on the side of its advantage` : `no (bounds ${bounds})`;
  },
};
const CAPPED = {
  movesRatio: false,
  capsWeight: true, // ε_high is the largest ratio itself
  token({ ratio, logp, advantage, high }) {
    const weight = Math.min(ratio, high);
    return { objective: weight * advantage * logp, push: weight * advantage, clipped: ratio > high };
  },
  pushWords: ({ rho, gain, high, number }) => ["min(ρ, ε_{high}) · A", `min(${rho}, ${number(high)}) · ${gain}`],
  clipWords: ({ clipped, high, number }) =>
    (clipped ? `capped at ${number(high)}, and still pushed` : `no, below ε high = ${number(high)}`),
};
const WITHOUT_RATIO = {
  movesRatio: false,
  token: ({ logp, advantage }) => ({ objective: advantage * logp, push: advantage, clipped: false }),
  pushWords: ({ gain }) => ["A", gain],
  clipWords: () => "this loss does not clip",
};

/* Four weights of a token in the loss of its batch, as grpo_edu.losses.token_weights.
   own: tokens of its completion; rows: completions of the batch; all: tokens of the batch; longest: the length limit. */
const BY_COMPLETION = {
  weight: ({ own, rows }) => 1 / (rows * Math.max(1, own)),
  weightWords: ({ own, rows }) => `1 / (${rows} answers of the batch · ${own} tokens of this one)`,
};
const BY_TOKENS = {
  weight: ({ all }) => 1 / Math.max(1, all),
  weightWords: ({ all }) => `1 / ${all} tokens of the batch`,
};
const BY_LIMIT = {
  weight: ({ rows, longest }) => 1 / (rows * longest),
  weightWords: ({ rows, longest }) => `1 / (${rows} answers · limit of ${longest} tokens)`,
};
const SUMMED = {
  weight: ({ rows }) => 1 / rows,
  weightWords: ({ rows }) => `1 / ${rows} answers of the batch`,
};

/* One entry for each loss of grpo_edu.losses.LOSSES: a formula and a weight. */
const LOSSES = {
  grpo: { ...CLIPPED, ...BY_COMPLETION },
  bnpo: { ...CLIPPED, ...BY_TOKENS },
  dr_grpo: { ...CLIPPED, ...BY_LIMIT },
  dapo: { ...CLIPPED, ...BY_TOKENS },
  cispo: { ...CAPPED, ...BY_TOKENS },
  reinforce: { ...WITHOUT_RATIO, ...SUMMED },
};

/* Objective of one token and its push on log π, with the KL term, and the three estimators of the KL.
   ratio is π / π_old with π_old = 1; reference is π / π_ref. */
function tokenObjective({ ratio, advantage, low, high, beta = 0, reference = 1, loss = "grpo" }) {
  const { objective, push } = LOSSES[loss].token({ ratio, logp: Math.log(ratio), advantage, low, high });
  const k1 = Math.log(reference);
  const k3 = Math.exp(-k1) + k1 - 1;
  return { objective: objective - beta * k3, push: push - beta * (1 - Math.exp(-k1)), k1, k2: k1 ** 2 / 2, k3 };
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
    const whole = level === "sequence" ? Math.exp(changes.reduce((sum, change) => sum + change, 0) / Math.max(1, own)) : null;
    const mean = importance.reduce((sum, value, place) => sum + counts[place] * value, 0) / Math.max(1, own);
    return logps.map((logp, place) => {
      const ratio = whole ?? Math.exp(changes[place]), advantage = advantages[row];
      const policy = LOSSES[loss].token({ ratio, logp, advantage, low, high });
      const corrected = whole !== null && LOSSES[loss].movesRatio ? mean : importance[place]; // each moves the ratio of all
      const distance = one.ref ? logp - one.ref[place] : 0;
      const kl = Math.exp(-distance) + distance - 1, held = beta * (1 - Math.exp(-distance));
      const weight = counts[place] ? LOSSES[loss].weight(sizes) : 0;
      const objective = importance[place] * policy.objective - beta * kl;
      const pull = corrected * policy.push;
      return { ratio, advantage, weight, kl, clipped: policy.clipped, pull, held, importance: corrected, loss: -objective, push: weight * (pull - held) };
    });
  });
}
