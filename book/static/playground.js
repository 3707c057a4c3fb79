/* The playground: a small policy that trains under GRPO in the page, in plain JavaScript and without Python.
   It uses the mathematics of formulas.js, the panel of chances.js and the drawing of explorers.js. tests/test_playground.py compares its updates with the package. */
"use strict";

// ---- the tasks: what the policy may say, what it prefers before training, and what is rewarded ----

/* A policy is a table of logits: row 0 for the first token, row 1 + v for the token after token v. */
const TASKS = {
  "one word": {
    question: "What is the capital of France?",
    words: ["Paris", "Lyon", "London", "Rome", "Llanfairpwllgwyngyll", "Oslo"],
    length: 1,
    logits: [[0, 0.6, 0.3, 0.3, -0.5, 0]],
    right: said => said[0] === "Paris",
    rewards: {
      "right answer: 1, else 0": said => Number(said[0] === "Paris"),
      "hackable: letters of the answer / 10": said => said.join("").length / 10,
    },
  },
  "up to three tokens": {
    question: "What is 2 + 3?",
    words: ["2+3=", "5", "6", "please", "end"], // the last word ends a completion
    length: 3,
    logits: [[0, 0.5, 0.5, 0, -1], [-2, 3, 0, -2, -2], [-1, -1, -1, 0, 2], [-1, -1, -1, 0, 2], [0, 0.5, 0.5, 0.5, -1]],
    right: said => said.filter(word => word === "5" || word === "6").pop() === "5",
    rewards: {
      "right answer: 1, else 0": said => Number(TASKS["up to three tokens"].right(said)),
      "hackable: ½ if right, 1 for each “please”": said =>
        TASKS["up to three tokens"].right(said) / 2 + said.filter(word => word === "please").length,
    },
  },
};

// ---- the algorithm ----

/* Numbers between 0 and 1 that depend on the seed only (mulberry32). */
function randomNumbers(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };
}

function softmax(logits) {
  const largest = Math.max(...logits);
  const powers = logits.map(value => Math.exp(value - largest));
  const sum = powers.reduce((one, other) => one + other, 0);
  return powers.map(value => value / sum);
}

/* The row of the table from which each token of a completion is drawn. */
const rowsOf = completion => completion.map((_, place) => (place ? 1 + completion[place - 1] : 0));
const ends = (task, completion) => completion.length === task.length || completion[completion.length - 1] === task.words.length - 1;
const wordsOf = (task, completion) =>
  completion.map(token => task.words[token]).filter(word => task.length === 1 || word !== "end");

/* log π of each token of a completion. */
function tokenLogps(table, completion) {
  return rowsOf(completion).map((row, place) => Math.log(softmax(table[row])[completion[place]]));
}

function sampleCompletion(table, task, random) {
  const completion = [];
  while (!completion.length || !ends(task, completion)) {
    const chances = softmax(table[completion.length ? 1 + completion[completion.length - 1] : 0]);
    let left = random(), token = 0;
    while (token < chances.length - 1 && left >= chances[token]) left -= chances[token++];
    completion.push(token);
  }
  return completion;
}

/* The table after the updates of one group, by plain gradient descent on the loss of grpo_edu.losses.grpo_loss, and what
   they did: for each token its last ratio, and its push (weight times the derivative by its log-probability), summed over the updates. */
function updatePolicy(table, reference, group, rewards, settings) {
  const advantages = groupAdvantages(rewards, settings.scaling);
  const old = group.map(completion => tokenLogps(table, completion));
  const before = group.map(completion => tokenLogps(reference, completion));
  const all = group.reduce((sum, completion) => sum + completion.length, 0);
  const pushes = group.map(completion => completion.map(() => 0));
  let now = table, ratios = [];
  for (let update = 0; update < settings.updates; update++) {
    const step = now.map(row => row.map(() => 0));
    ratios = [];
    group.forEach((completion, number) => {
      const logps = tokenLogps(now, completion), rows = rowsOf(completion);
      const weight = LOSSES[settings.loss].weight({ own: completion.length, rows: group.length, all, longest: settings.length });
      ratios.push(logps.map((logp, place) => Math.exp(logp - old[number][place])));
      completion.forEach((token, place) => {
        const { push } = tokenObjective({
          ratio: ratios[number][place], advantage: advantages[number], low: settings.low, high: settings.high,
          beta: settings.beta, reference: Math.exp(logps[place] - before[number][place]), loss: settings.loss,
        });
        pushes[number][place] += weight * push;
        softmax(now[rows[place]]).forEach((chance, word) => {
          step[rows[place]][word] += weight * push * (Number(word === token) - chance);
        });
      });
    });
    now = now.map((row, number) => row.map((value, word) => value + settings.rate * step[number][word]));
  }
  return { table: now, advantages, ratios, pushes };
}

/* Every completion that the policy can write, with its probability. */
function allCompletions(table, task, begun = [], chance = 1) {
  if (begun.length && ends(task, begun)) return [[begun, chance]];
  const chances = softmax(table[begun.length ? 1 + begun[begun.length - 1] : 0]);
  return chances.flatMap((next, token) => allCompletions(table, task, [...begun, token], chance * next));
}

/* What is true of the policy now, over all that it can write: no sampling is needed for it. */
function measure(table, reference, task, reward) {
  const found = { reward: 0, right: 0, kl: 0 };
  const rows = allCompletions(table, task);
  for (const [completion, chance] of rows) {
    const said = wordsOf(task, completion);
    found.reward += chance * reward(said);
    found.right += chance * Number(task.right(said));
    const logps = tokenLogps(table, completion), before = tokenLogps(reference, completion);
    found.kl += chance * logps.reduce((sum, logp, place) => sum + logp - before[place], 0);
  }
  return { ...found, rows };
}

// ---- the page ----

const MINUS = value => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`;

function playground(place) {
  const task = choice("task", Object.keys(TASKS));
  const reward = choice("reward", Object.keys(TASKS["one word"].rewards));
  const size = slider("G, completions per group", 8, 2, 16, 1);
  const rate = slider("learning rate", 0.5, 0.05, 3, 0.05);
  const loss = choice("loss_type", Object.keys(LOSSES));
  const scaling = choice("scale_rewards", ["group", "none"]);
  const updates = slider("updates per group", 2, 1, 8, 1);
  const low = slider("ε", 0.2, 0, 0.9, 0.01);
  const high = slider("ε high", 0.2, 0, 5, 0.01);
  const beta = slider("β, weight of the KL term", 0, 0, 1, 0.01);
  const seed = slider("seed", 0, 0, 99, 1);
  const often = [task, reward, size, rate], seldom = [loss, scaling, updates, low, high, beta, seed];
  let state, timer = 0;

  const restart = () => {
    pause();
    const chosen = TASKS[task.value], base = chosen.logits;
    state = { table: base, base, random: randomNumbers(seed.value), group: [], curves: [], step: 0 };
    record();
    draw(`The policy is as it was before training. Press Play, or One step.`);
  };
  const paying = () => TASKS[task.value].rewards[reward.value];
  const record = () => {
    state.now = measure(state.table, state.base, TASKS[task.value], paying());
    state.curves.push(state.now);
  };
  const step = () => {
    const chosen = TASKS[task.value];
    state.group = Array.from({ length: size.value }, () => sampleCompletion(state.table, chosen, state.random));
    state.rewards = state.group.map(completion => paying()(wordsOf(chosen, completion)));
    const settings = {
      loss: loss.value, scaling: scaling.value, updates: updates.value, low: low.value, high: high.value,
      beta: beta.value, rate: rate.value, length: chosen.length,
    };
    Object.assign(state, updatePolicy(state.table, state.base, state.group, state.rewards, settings));
    state.step++;
    record();
  };
  const told = () => {
    const { step: number, now, rewards, curves } = state;
    const tie = new Set(rewards).size === 1 ? " All rewards of this group are equal, so it taught nothing." : "";
    const hacked = now.reward > curves[0].reward + 0.1 && now.right < curves[0].right - 0.05
      ? " The reward rises while right answers become rarer: the policy found what pays, which is not what we wanted." : "";
    return `After ${number} ${number === 1 ? "step" : "steps"} the mean reward is ${now.reward.toFixed(2)}, and ` +
      `${percent(now.right)} of the answers are right (before training ${percent(curves[0].right)}).${tie}${hacked}`;
  };
  const pause = () => {
    clearTimeout(timer);
    timer = 0;
    play.textContent = "Play";
    words.ariaLive = "polite"; // a screen reader hears the result when the training pauses, and not each step
  };
  const go = () => {
    step();
    const learned = Math.max(...state.now.rows.map(([, chance]) => chance)) > 0.99;
    timer = learned || state.step >= 500 ? 0 : setTimeout(go, 250);
    if (!timer) pause();
    draw(told());
  };
  const button = (label, act, kind = "") => {
    const made = element("button", { type: "button", class: kind }, label);
    made.addEventListener("click", act);
    return made;
  };
  const play = button("Play", () => {
    if (timer) {
      pause();
      draw(told());
    } else {
      play.textContent = "Pause";
      words.ariaLive = "off";
      go();
    }
  }, "first");
  const once = button("One step", () => { pause(); step(); draw(told()); });
  const again = button("Start over", restart);

  const words = element("p", { role: "status" });
  const pictures = element("div", { class: "pictures" });
  const draw = text => {
    words.textContent = text;
    [...often, ...seldom].forEach(part => part.refresh());
    question.textContent = `Question: ${TASKS[task.value].question}`;
    const drawn = [chancesTable(), curvePanel(), groupTable()];
    // the tables stay, because what is scrolled by keyboard must keep the focus while the policy trains
    if (!pictures.children.length) pictures.append(...drawn);
    else drawn.forEach((made, at) => (made.tagName === "DIV" ? pictures.children[at].replaceChildren(...made.children) : pictures.children[at].replaceWith(made)));
  };

  const shown = completion => {
    const chosen = TASKS[task.value], said = wordsOf(chosen, completion);
    return said.length ? said.join(" ") : "(nothing)";
  };
  /* The group of the last step. A token is colored by its push: blue to more, orange to less; a dashed one is not pushed. */
  const groupTable = () => {
    const chosen = TASKS[task.value];
    const largest = Math.max(1e-9, ...(state.pushes ?? []).flat().map(Math.abs));
    const rows = state.group.map((completion, number) => {
      const tokens = completion.map((token, spot) => {
        const push = state.pushes[number][spot], share = Math.round((70 * Math.abs(push)) / largest);
        const color = push < 0 ? RED : BLUE;
        const title = `ratio ${state.ratios[number][spot].toFixed(2)}, push ${push.toFixed(3).replace("-", "−")}`;
        return element("span", {
          class: Math.abs(push) < 1e-12 ? "token still" : "token", title,
          style: `background:color-mix(in srgb, ${color} ${share}%, transparent)`,
        }, `${push > 1e-12 ? "▲" : push < -1e-12 ? "▼" : ""}${chosen.words[token]}`);
      });
      return element("tr", {}, element("td", {}, ...tokens.flatMap(token => [token, " "])), element("td", {}, String(+state.rewards[number].toFixed(2))),
        element("td", {}, MINUS(state.advantages[number])));
    });
    return table("The group of this step", ["completion", "reward", "advantage"], rows,
      state.group.length ? "▲ made more probable, ▼ less probable; dashed: not pushed." : "No group was sampled yet.");
  };
  /* The most probable completions, now and before training. */
  const chancesTable = () => {
    const before = new Map(state.curves[0].rows.map(([completion, chance]) => [completion.join(), chance]));
    const rows = state.now.rows.map(([completion, chance]) => ({
      text: shown(completion), right: TASKS[task.value].right(wordsOf(TASKS[task.value], completion)),
      now: chance, before: before.get(completion.join()),
    }));
    return courseChances.chancesTable("What the policy says, most probable first", ["completion", "now", "line: before"], rows);
  };
  const table = (title, names, rows, empty) => {
    const head = element("tr", {}, ...names.map(name => element("th", { scope: "col" }, name)));
    const made = element("table", {}, element("caption", {}, title), element("thead", {}, head),
      element("tbody", {}, ...rows));
    return element("div", { class: "scrolls", role: "region", tabindex: "0", "aria-label": title }, made,
      ...(empty ? [element("p", {}, empty)] : []));
  };
  const curvePanel = () => {
    const { curves } = state;
    const last = Math.max(20, curves.length - 1), top = Math.max(1, ...curves.map(one => one.reward), ...curves.map(one => one.kl));
    const made = panel(`Over ${curves.length - 1} ${curves.length === 2 ? "step" : "steps"}`, "step", [0, last], [0, Math.ceil(top)]);
    xTicks(made, [0, last / 2, last].map(Math.round));
    [["reward", GREEN, "reward", ""], ["right", BLUE, "right", "6 3"], ["kl", RED, "KL", "2 3"]]
      .forEach(([key, color, name, dashes], row) => {
        const points = curves.map((one, at) => `${at ? "L" : "M"}${made.x(at).toFixed(1)},${made.y(one[key]).toFixed(1)}`);
        const style = { stroke: color, "stroke-width": 2, fill: "none", "stroke-dasharray": dashes };
        made.svg.append(element("path", { ...style, d: points.join("") }));
        const x = 120 + 66 * row;
        made.svg.append(element("line", { ...style, x1: x, x2: x + 18, y1: 12, y2: 12 }));
        made.svg.append(element("text", { x: x + 20, y: 16, class: "small" }, name));
      });
    const { reward, right, kl } = curves[curves.length - 1];
    made.svg.setAttribute("aria-label", `Reward ${short(reward)}, right ${short(right)}, KL ${short(kl)} after ${curves.length - 1} ${curves.length === 2 ? "step" : "steps"}`);
    return made.svg;
  };

  task.input.addEventListener("input", () => {
    reward.input.replaceChildren(...Object.keys(TASKS[task.value].rewards).map(name => element("option", {}, name)));
    restart();
  });
  for (const part of [reward, seed]) part.input.addEventListener("input", restart);
  for (const part of [size, rate, ...seldom]) part.input.addEventListener("input", () => part.refresh());
  const question = element("p", { class: "question" });
  const more = element("details", {}, element("summary", {}, "Loss, clipping, KL, seed"),
    element("div", { class: "controls" }, ...seldom.map(part => part.node)));
  const buttons = element("div", { class: "rewards", role: "group", "aria-label": "Training" }, play, once, again);
  place.classList.add("playground");
  place.replaceChildren(element("p", { class: "name" }, "A policy that learns in this page"), question,
    element("div", { class: "controls" }, ...often.map(part => part.node)), more, buttons, words, pictures);
  restart();
}

window.coursePlayground = { TASKS, randomNumbers, sampleCompletion, tokenLogps, updatePolicy, measure, wordsOf };
for (const place of document.querySelectorAll("[data-playground]")) playground(place);
