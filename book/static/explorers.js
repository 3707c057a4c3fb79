/* Dashboards of the course in plain JavaScript, for pages without Python: AdvantageExplorer, ObjectiveExplorer, and
   recordings of AskTheModel. formulas.js and chances.js are loaded before: the mathematics, which tests/test_book.py
   compares, and the panel of the most probable answers. */
"use strict";

// ---- drawing ----

function element(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "rect", "line", "path", "circle", "text", "tspan"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const BLUE = "#0072B2", RED = "#D55E00", GREEN = "#009E73";
const WIDTH = 320, HEIGHT = 210, LEFT = 44, RIGHT = 308, TOP = 28, BOTTOM = 172;

/* One panel with axes; returns it with functions that place x and y. */
function panel(title, xlabel, xs, ys) {
  const x = value => LEFT + ((value - xs[0]) / (xs[1] - xs[0])) * (RIGHT - LEFT);
  const y = value => BOTTOM - ((Math.min(Math.max(value, ys[0]), ys[1]) - ys[0]) / (ys[1] - ys[0])) * (BOTTOM - TOP);
  const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
  svg.append(element("text", { x: 8, y: 16, class: "title" }, title));
  for (let tick = 0; tick <= 4; tick++) {
    const value = ys[0] + (tick / 4) * (ys[1] - ys[0]);
    svg.append(element("line", { x1: LEFT, x2: RIGHT, y1: y(value), y2: y(value), class: "grid" }));
    svg.append(element("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, short(value)));
  }
  if (ys[0] < 0) svg.append(element("line", { x1: LEFT, x2: RIGHT, y1: y(0), y2: y(0), class: "axis" }));
  svg.append(element("text", { x: (LEFT + RIGHT) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, xlabel));
  return { svg, x, y };
}

/* Two decimals; of a smaller number two digits. */
function short(value) {
  const size = Math.abs(value), small = size > 1e-9 && size < 0.01;
  return String(small ? Number(value.toPrecision(2)) : Math.round(value * 100) / 100).replaceAll("-", "−");
}

function bars(title, values, range) {
  const { svg, x, y } = panel(title, "completion", [-0.5, values.length - 0.5], range);
  svg.setAttribute("aria-label", `${title}: ${values.map(short).join(", ")}`);
  const width = (0.6 * (RIGHT - LEFT)) / values.length;
  values.forEach((value, row) => {
    const [top, bottom] = [y(Math.max(value, 0)), y(Math.min(value, 0))];
    const color = value < 0 ? RED : BLUE;
    svg.append(element("rect", { x: x(row) - width / 2, y: top, width, height: bottom - top, fill: color, opacity: 0.5 }));
    svg.append(element("circle", { cx: x(row), cy: y(value), r: 4, fill: color }));
    svg.append(element("text", { x: x(row), y: BOTTOM + 16, "text-anchor": "middle" }, String(row + 1)));
  });
  return svg;
}

function curve(place, f, [start, end], color, dashes = "") {
  const points = Array.from({ length: 201 }, (_, k) => start + (k / 200) * (end - start));
  const path = points.map((point, k) => `${k ? "L" : "M"}${place.x(point).toFixed(1)},${place.y(f(point)).toFixed(1)}`);
  place.svg.append(element("path", { d: path.join(""), stroke: color, "stroke-width": 2, fill: "none", "stroke-dasharray": dashes }));
}

function xTicks(place, values) {
  for (const value of values) {
    const words = short(value), x = Math.min(place.x(value), WIDTH - 3.8 * words.length); // inside of the picture
    place.svg.append(element("text", { x, y: BOTTOM + 16, "text-anchor": "middle" }, words));
  }
}

function dot(place, x, y) {
  place.svg.append(element("circle", { cx: place.x(x), cy: place.y(y), r: 6, fill: GREEN, stroke: "white" }));
  place.svg.setAttribute("aria-label", `${place.svg.querySelector(".title").textContent}: ${short(y)} at ${short(x)}`);
}

// ---- controls ----

let controls = 0;

function labelled(label, input, output) {
  input.id = `course-control-${++controls}`;
  return element("div", { class: "control" }, element("label", { for: input.id }, label), input, ...(output ? [output] : []));
}

function slider(label, value, min, max, step) {
  const input = element("input", { type: "range", min, max, step, value });
  const output = element("output", { "aria-live": "off" }); // screen readers say a slider's value anyway
  const control = { node: labelled(label, input, output), input };
  Object.defineProperty(control, "value", { get: () => Number(input.value) });
  control.refresh = () => { output.textContent = short(control.value); };
  return control;
}

function choice(label, names) {
  const input = element("select", {}, ...names.map(name => element("option", {}, name)));
  return { node: labelled(label, input), input, get value() { return input.value; }, refresh() {} };
}

/* Controls on top, then pictures and a text that screen readers announce; `draw` returns [pictures, text]. */
function explorer(place, title, parts, extra, draw) {
  const pictures = element("div", { class: "pictures" });
  const words = element("p", { role: "status" });
  const update = () => {
    parts.forEach(part => part.refresh());
    const [drawn, text] = draw();
    pictures.replaceChildren(...drawn);
    words.textContent = text;
  };
  parts.forEach(part => part.input.addEventListener("input", update));
  const box = element("div", { class: "controls" }, ...parts.map(part => part.node));
  place.replaceChildren(element("p", { class: "name" }, title), box, ...extra, words, pictures);
  update();
  return update;
}

function advantages(place) {
  const size = slider("G, completions per group", 8, 2, 16, 1);
  const chance = slider("success rate p", 0.25, 0, 1, 0.01);
  const scaling = choice("scale_rewards", ["group", "none", "mean"]);
  const buttons = element("div", { class: "rewards", role: "group", "aria-label": "Reward of each completion" });
  let rewards = [];
  const fill = () => {
    const right = Math.round(chance.value * size.value);
    rewards = Array.from({ length: size.value }, (_, row) => Number(row < right));
    buttons.replaceChildren(...rewards.map((_, row) => {
      const button = element("button", { type: "button" });
      button.addEventListener("click", () => { rewards[row] = 1 - rewards[row]; update(); });
      return button;
    }));
  };
  size.input.addEventListener("input", fill);
  chance.input.addEventListener("input", fill);
  fill();
  const hint = element("p", {}, "Click on a completion to change its reward:");
  const update = explorer(place, "Advantages of one group", [size, chance, scaling], [hint, buttons], () => {
    rewards.forEach((reward, row) => {
      const button = buttons.children[row];
      button.textContent = `${row + 1}: ${reward ? "right" : "wrong"}`;
      button.setAttribute("aria-pressed", String(Boolean(reward)));
    });
    const found = groupAdvantages(rewards, scaling.value);
    const largest = Math.ceil(Math.max(1, ...found.map(Math.abs)));
    const ties = panel("How often a group ties", "success rate p", [0, 1], [0, 1]);
    curve(ties, p => tieProbability(p, rewards.length), [0, 1], BLUE);
    xTicks(ties, [0, 0.5, 1]);
    dot(ties, chance.value, tieProbability(chance.value, rewards.length));
    const tied = new Set(rewards).size === 1;
    const first = tied ? "All rewards are equal: this group has no gradient." : "This group has a gradient.";
    const share = tieProbability(chance.value, size.value).toFixed(3);
    const text = `${first} Advantages: ${found.map(value => value.toFixed(2)).join(", ").replaceAll("-", "−")}. ` +
      `Of groups with p = ${chance.value.toFixed(2)}, p^G + (1 − p)^G = ${share} tie.`;
    return [[bars("Rewards", rewards, [0, 1]), bars("Advantages", found, [-largest, largest]), ties.svg], text];
  });
}

function objective(place) {
  const ratio = slider("ratio ρ = π / π_old", 1, 0.05, 2, 0.05);
  const advantage = slider("advantage A", 1, -2, 2, 0.1);
  const low = slider("ε", 0.2, 0, 0.9, 0.01);
  const high = slider("ε high", 0.2, 0, 5, 0.01);
  const beta = slider("β, weight of the KL term", 0, 0, 1, 0.01);
  const reference = slider("π / π_ref", 1, 0.05, 3, 0.05);
  const loss = choice("loss_type", Object.keys(LOSSES));
  const parts = [ratio, advantage, low, high, beta, reference, loss];
  explorer(place, "The objective of one token", parts, [], () => {
    const clip = { low: low.value, high: high.value, loss: loss.value };
    const found = tokenObjective({
      ...clip, ratio: ratio.value, advantage: advantage.value, beta: beta.value, reference: reference.value,
    });
    const drawn = [["objective", "Objective of the token"], ["push", "Push on its log-probability"]].map(([key, title]) => {
      const place = panel(title, "ratio ρ (line: A = +1, dashes: A = −1)", [0, 2], [-2, 2]);
      curve(place, x => tokenObjective({ ...clip, ratio: x, advantage: 1 })[key], [0.01, 2], BLUE);
      curve(place, x => tokenObjective({ ...clip, ratio: x, advantage: -1 })[key], [0.01, 2], RED, "6 3");
      xTicks(place, [0, 0.5, 1, 1.5, 2]);
      dot(place, ratio.value, found[key]);
      return place.svg;
    });
    const numbers = Object.fromEntries(
      Object.entries(found).map(([key, value]) => [key, (value + 0).toFixed(3).replace("-", "−")]));
    const halted = Math.abs(found.push) < 1e-12 ? " This token is not pushed at all." : "";
    return [drawn, `Objective ${numbers.objective}, push ${numbers.push} (the green dot). KL of this token: ` +
      `k1 = ${numbers.k1}, k2 = ${numbers.k2}, k3 = ${numbers.k3} nats.${halted}`];
  });
}

const { percent, chancesTable } = courseChances;

/* One answer: its text, and below it what is known of it in this scene. */
function answerRow(row, facts) {
  const text = element("div", { class: "answer" }, row.text);
  return element("li", row.reward ? { class: "right" } : {}, text, element("div", {}, facts.join(" · ")));
}

/* The recorded answers in four scenes, one for each button. */
function ask(place) {
  const { question, before, after, series } = JSON.parse(place.dataset.recording);
  const [[, right], [steps, now]] = [series[0], series[series.length - 1]];
  const size = before.length;
  const chance = row => `probability ${percent(row.chance)}`;
  const scored = row => [`extracted: ${row.answer ?? "none"}`, `reward ${row.reward}`,
    `advantage ${row.advantage < 0 ? "−" : "+"}${Math.abs(row.advantage).toFixed(2)}`];
  const best = before.find(row => row.reward);
  const scenes = {
    "1 Ask": [before, row => [chance(row)],
      `A small model answers the question ${size} times. It draws each token at random, so the answers differ. Below each ` +
      "answer is the probability that the model writes exactly this."],
    "2 Score": [before, scored,
      "A program extracts what follows the mark #### and compares it with the right answer: reward 1 or 0. " +
      `${right} of ${size} answers are right. The advantage compares each reward with the others of the group. ` +
      "Training makes answers with a positive advantage more likely, and the others less likely."],
    "3 Train": [before, row => [`probability ${percent(row.chance)} → ${percent(row.then)}`],
      `The model has been trained for ${steps} steps, on other questions. The first answers once more: the probability ` +
      `of the right one was ${percent(best.chance)} and is ${percent(best.then)} now.`],
    "4 Ask again": [after, row => [...scored(row), chance(row)],
      `The trained model answers the same question again: ${now} of ${size} answers are right, before it was ${right}.`],
  };
  // The panel: gray until the answers are scored; from the third step on, the probabilities after training.
  const panelOf = step => {
    const rows = new Map(before.map(row => [row.text, {
      text: row.text, right: step < 2 ? null : Boolean(row.reward), now: step < 3 ? row.chance : row.then,
      before: step < 3 ? null : row.chance,
    }]));
    const names = ["answer", "probability", step < 3 ? "" : "line: before training"];
    return chancesTable("What the model says, most probable first", names, [...rows.values()]);
  };
  const words = element("p", { role: "status" }), panel = element("div");
  const answers = element("ol", { class: "answers" });
  const buttons = element("div", { class: "rewards", role: "group", "aria-label": "Steps of the recording" });
  const show = chosen => {
    const [rows, facts, text] = scenes[chosen];
    words.textContent = text;
    panel.replaceChildren(panelOf(Number(chosen[0])));
    answers.replaceChildren(...rows.map(row => answerRow(row, facts(row))));
    answers.classList.toggle("unscored", chosen.startsWith("1"));
    for (const button of buttons.children) button.setAttribute("aria-pressed", String(button.textContent === chosen));
  };
  for (const name of Object.keys(scenes)) {
    const button = element("button", { type: "button" }, name);
    button.addEventListener("click", () => show(name));
    buttons.append(button);
  }
  place.replaceChildren(element("p", { class: "name" }, "Ask the model (a recording)"), element("p", {}, question), buttons,
    words, panel, answers);
  show("1 Ask");
}

/* Recorded answers of a larger model to a few questions, before and after it was trained. */
function looks(place) {
  const { asked } = JSON.parse(place.dataset.recording);
  const question = choice("Question", asked.map(one => one.question));
  const words = element("p", { role: "status" }), answers = element("ol", { class: "answers" });
  const buttons = element("div", { class: "rewards", role: "group", "aria-label": "When it answers" });
  let at = 0;
  // A long answer as a whole is improbable, so this is the probability of a token, the geometric mean over the answer.
  const perToken = (chance, row) => percent(chance ** (1 / row.tokens));
  const show = () => {
    const chosen = asked[question.input.selectedIndex].looks, first = chosen[0].rows, look = chosen[at];
    buttons.replaceChildren(...chosen.map((one, number) => {
      const button = element("button", { type: "button", "aria-pressed": String(number === at) },
        one.steps ? `after ${one.steps} steps` : "before training");
      button.addEventListener("click", () => { at = number; show(); buttons.children[number].focus(); });
      return button;
    }));
    const right = look.rows.filter(row => row.reward).length;
    words.textContent = `${right} of ${look.rows.length} answers are as asked.` + (at ? "" :
      " The probabilities say how likely the model makes a token of this answer, before training → after it.");
    answers.replaceChildren(...look.rows.map((row, number) => answerRow(row, [row.answer, `reward ${row.reward}`,
      `probability per token ${perToken(row.chance, row)}` +
        (at ? "" : ` → ${perToken(chosen[chosen.length - 1].chances[number], first[number])}`)])));
  };
  question.input.addEventListener("change", show);
  place.replaceChildren(element("p", { class: "name" }, "Ask SmolLM2 (a recording)"),
    element("div", { class: "controls" }, question.node), buttons, words, answers);
  show();
}

window.courseExplorers = { groupAdvantages, tieProbability, tokenObjective };
const KINDS = { advantages, objective, ask, looks };
for (const place of document.querySelectorAll("[data-explorer]")) KINDS[place.dataset.explorer](place);
