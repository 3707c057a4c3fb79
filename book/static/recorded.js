/* Dashboards of the course in pages without Python, on stored or computed numbers: the reward lab, the quantization of a
   real weight matrix, what was forgotten in a curriculum, and a recorded training run. Drawing and controls are those of
   explorers.js, which is loaded before; tests/test_book_explorers.py compares the numbers with the package's. */
"use strict";

// ---- numbers ----

/* Which ways to cheat a weighted sum of rewards pays at least as well as honest work; as grpo_edu.studies.exploits.
   rows: { paid, honest }, a number for each reward. */
function unpunished(rows, weights) {
  const sum = values => values.reduce((total, value, place) => total + weights[place] * value, 0);
  return rows.map(row => ({ paid: sum(row.paid), honest: sum(row.honest) }))
    .map(found => ({ ...found, pays: found.honest - found.paid <= 1e-6 }));
}

/* The nearest whole number; halves go to the even one, as torch.round does. */
function roundHalfEven(value) {
  const down = Math.floor(value), rest = value - down;
  return rest < 0.5 || (rest === 0.5 && down % 2 === 0) ? down : down + 1;
}

/* Numbers rounded to a grid, as grpo_edu.quantization.numbers.quantize and dequantize in float32.
   values: of a matrix, row by row; size: how many neighbors share a scale. Returns the rounded values and the bytes. */
function quantizeMatrix(values, { bits, affine, size }) {
  const f = Math.fround, after = new Float32Array(values.length);
  for (let start = 0; start < values.length; start += size) {
    const part = values.subarray(start, start + size);
    const low = part.reduce((least, value) => Math.min(least, value), affine ? 0 : Infinity);
    const high = part.reduce((most, value) => Math.max(most, value), affine ? 0 : -Infinity);
    const top = affine ? 2 ** bits - 1 : 2 ** (bits - 1) - 1, bottom = affine ? 0 : -top;
    const scale = (affine ? f(f(high / top) - f(low / top)) : f(Math.max(-low, high) / top)) || 1;
    const zero = affine ? roundHalfEven(f(-low / scale)) : 0;
    part.forEach((value, place) => {
      const q = Math.min(Math.max(roundHalfEven(f(value / scale)) + zero, bottom), top);
      after[start + place] = f(f(q - zero) * scale);
    });
  }
  return { after, bytes: (values.length * bits) / 8 + (4 * values.length * (1 + Number(affine))) / size };
}

/* ‖x − x̂‖ / ‖x‖, as grpo_edu.quantization.numbers.relative_error. */
function relativeError(values, after) {
  const squares = values.reduce((sums, value, place) => [sums[0] + (value - after[place]) ** 2, sums[1] + value ** 2], [0, 0]);
  return Math.sqrt(squares[0] / squares[1]);
}

/* Shares of problems solved after each stage, the mean over an arm's runs; as ForgettingDashboard.matrix. */
function meanMatrix(runs) {
  return runs[0].solved.map((row, stage) => row.map((_, task) =>
    runs.reduce((sum, run) => sum + run.solved[stage][task] / run.num_problems[task], 0) / runs.length));
}

/* Mean loss since the best stage, over all tasks but the last; as grpo_edu.continual.forgetting.forgetting. */
function forgotten(matrix) {
  const last = matrix.length - 1;
  const lost = matrix[0].slice(0, -1).map((_, task) =>
    Math.max(...matrix.slice(task + 1, last).map(row => row[task])) - matrix[last][task]);
  return lost.reduce((sum, value) => sum + value, 0) / lost.length;
}

// ---- drawing ----

/* A bound for an axis, not below a value, that four equal parts divide into short numbers. */
function roundTop(value) {
  const unit = 4 * 10 ** (Math.floor(Math.log10(value)) - 1);
  return Math.ceil(value / unit) * unit;
}

function dataTable(title, names, rows) {
  const cells = (kind, values) => values.map(value => element(kind, kind === "th" ? { scope: "col" } : {}, value));
  const made = element("table", {}, element("caption", {}, title), element("thead", {}, element("tr", {}, ...cells("th", names))),
    element("tbody", {}, ...rows.map(row => element("tr", {}, ...cells("td", row)))));
  return element("div", { class: "scrolls", role: "region", tabindex: "0", "aria-label": title }, made);
}

/* Curves of one panel up to a step. What the pointer is next to is marked, with its values. */
function curves(title, xs, ys, lines, at) {
  const place = panel(title, "step", xs, ys);
  xTicks(place, [xs[0], (xs[0] + xs[1]) / 2, xs[1]].map(Math.round));
  lines.forEach(({ name, color, dashes = "", points }, row) => {
    const shown = points.filter(([step]) => step <= at);
    const d = shown.map(([x, y], k) => `${k ? "L" : "M"}${place.x(x).toFixed(1)},${place.y(y).toFixed(1)}`).join("");
    place.svg.append(element("path", { d, stroke: color, "stroke-width": 2, fill: "none", "stroke-dasharray": dashes }));
    if (lines.length > 1) {
      const mark = element("tspan", { style: `fill:${color}` }, "● "); // letters in these colors are hard to read
      place.svg.append(element("text", { x: RIGHT, y: 11 + 12 * row, "text-anchor": "end", style: "font-size:12px" }, mark, name));
    }
    if (shown.length) dot(place, ...shown[shown.length - 1]);
  });
  const ends = lines.map(({ name, points }) => [name, points.findLast(([step]) => step <= at)]).filter(([, end]) => end);
  place.svg.setAttribute("aria-label", `${title}: ${ends.map(([name, end]) => `${name} ${short(end[1])}`).join(", ")}`);
  const mark = element("line", { y1: TOP, y2: BOTTOM, class: "axis", visibility: "hidden" });
  const word = element("text", { x: LEFT + 4, y: BOTTOM - 5, class: "value", visibility: "hidden" });
  place.svg.append(mark, word);
  place.svg.addEventListener("pointermove", event => {
    const box = place.svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH;
    const steps = lines.flatMap(line => line.points.map(([step]) => step)).filter(step => step <= at);
    if (!steps.length) return;
    const step = steps.reduce((best, one) => (Math.abs(place.x(one) - x) < Math.abs(place.x(best) - x) ? one : best));
    const found = lines.map(line => [line.name, line.points.find(([one]) => one === step)]).filter(([, point]) => point);
    word.textContent = `step ${step}: ${found.map(([name, point]) => `${name} ${short(point[1])}`).join(", ")}`;
    for (const [key, value] of [["x1", place.x(step)], ["x2", place.x(step)], ["visibility", "visible"]]) mark.setAttribute(key, value);
    word.setAttribute("visibility", "visible");
  });
  place.svg.addEventListener("pointerleave", () => [mark, word].forEach(one => one.setAttribute("visibility", "hidden")));
  return place.svg;
}

/* A button that moves a slider to its end, one step at a time, and stops there or when it is pressed again. */
function player(control, pause) {
  const button = element("button", { type: "button", class: "first" }, "Play");
  let timer = 0;
  const hear = (live, words = button.closest(".course-explorer").querySelector("[role=status]")) => {
    words.ariaLive = live; // a screen reader hears the result when the run pauses, and not each step
    words.textContent += "";
  };
  const stop = () => { clearInterval(timer); timer = 0; button.textContent = "Play"; hear("polite"); };
  const go = () => {
    const step = Number(control.input.step), next = control.value + step;
    if (next > Number(control.input.max)) return stop();
    control.input.value = next;
    control.input.dispatchEvent(new Event("input"));
  };
  button.addEventListener("click", () => {
    if (timer) return stop();
    if (control.value >= Number(control.input.max)) control.input.value = control.input.min;
    button.textContent = "Pause";
    hear("off");
    timer = setInterval(go, pause);
    go();
  });
  return button;
}

// ---- the dashboards ----

function rewardLab(place) {
  const { rewards, rows } = JSON.parse(place.dataset.recording);
  const completion = choice("completion", ["the honest solution", ...rows.map(row => row.name)]);
  const weights = rewards.map((name, number) => slider(`weight of ${name}`, Number(number === 0), -1, 2, 0.1));
  const [honest] = rows;
  const text = element("p", { class: "answer" });
  explorer(place, "Reward lab (stored values)", [completion, ...weights], [text], () => {
    const factors = weights.map(weight => weight.value), found = unpunished(rows, factors);
    const number = rows.findIndex(row => row.name === completion.value);
    const row = rows[number] ?? { ...honest, paid: honest.honest, text: honest.solution };
    text.replaceChildren(element("b", {}, row.question), ` ${row.text || "(nothing)"}`);
    const parts = row.paid.map((value, at) => value * factors[at]);
    const total = parts.reduce((sum, value) => sum + value, 0);
    const holes = found.filter(one => one.pays).length;
    const paid = dataTable("What each reward adds", ["reward", "pays", "× weight"],
      rewards.map((name, at) => [name, short(row.paid[at]), short(parts[at])]));
    const table = dataTable("Ways to cheat", ["way", "earns", "honest", "cheating pays"], rows.map((one, at) =>
      [one.name, short(found[at].paid), short(found[at].honest), found[at].pays ? "✗ yes" : "✓ no"]));
    return [[paid, table], `The weighted sum of this completion is ${short(total)}. Of ${rows.length} ways to cheat, ${holes} ` +
      "pay at least as much as honest work on the same problem."];
  });
}

function quantization(place) {
  const { name, shape, weights } = JSON.parse(place.dataset.recording);
  const bytes = Uint8Array.from(atob(weights), letter => letter.charCodeAt(0));
  const values = new Float32Array(bytes.buffer), sizes = { "per tensor": values.length, "per row": shape[1], "per group of 32": 32 };
  const bits = slider("bits", 8, 2, 8, 1), grid = choice("grid", ["symmetric", "affine"]), scale = choice("scale", Object.keys(sizes));
  explorer(place, `Quantization of ${name}, ${shape.join(" × ")}`, [bits, grid, scale], [], () => {
    const settings = { bits: bits.value, affine: grid.value === "affine", size: sizes[scale.value] };
    const { after, bytes: stored } = quantizeMatrix(values, settings);
    const most = Math.max(...values.map(Math.abs));
    const draw = [["Weights (area), on the grid (line)", [values, after], most],
      ["Error: value after − before", [values.map((value, at) => after[at] - value)], null]];
    const pictures = draw.map(([title, series, range]) => {
      const reach = range ?? Math.max(1e-9, ...series[0].map(Math.abs));
      const counts = series.map(one => histogram(one, reach));
      const made = panel(title, "value", [-reach, reach], [0, roundTop(Math.max(...counts.flat()))]);
      xTicks(made, [-reach, 0, reach]);
      counts.forEach((heights, row) => {
        const width = (2 * reach) / heights.length;
        const d = heights.map((height, at) => `${at ? "L" : "M"}${made.x(-reach + at * width).toFixed(1)},${made.y(height).toFixed(1)}H${made.x(-reach + (at + 1) * width).toFixed(1)}`);
        const color = range === null ? GREEN : [BLUE, RED][row], area = row === 0 && range !== null;
        const closed = area ? `L${made.x(reach)},${made.y(0)}H${made.x(-reach)}Z` : "";
        made.svg.append(element("path", { d: d.join("") + closed, stroke: color, fill: area ? color : "none", "fill-opacity": 0.35, "stroke-width": area ? 0 : 1.5 }));
      });
      return made.svg;
    });
    const error = (100 * relativeError(values, after)).toFixed(2), before = 4 * values.length;
    return [pictures, `Relative error ${error}%. ${before.toLocaleString("en")} → ${Math.round(stored).toLocaleString("en")} bytes, ` +
      `${(before / stored).toFixed(1)} times smaller.`];
  });
}

function histogram(values, reach, bins = 60) {
  const counts = new Array(bins).fill(0);
  for (const value of values) counts[Math.min(bins - 1, Math.max(0, Math.floor(((value + reach) / (2 * reach)) * bins)))]++;
  return counts;
}

function forgettingBoard(place) {
  const { runs } = JSON.parse(place.dataset.recording);
  const names = [...new Set(runs.map(run => run.curriculum))];
  const curriculum = choice("curriculum", names), arm = choice("protection and its strength", []);
  const arms = () => [...new Set(runs.filter(run => run.curriculum === curriculum.value).map(run => run.arm))];
  const fill = () => arm.input.replaceChildren(...arms().reverse().map(name => element("option", {}, name)));
  curriculum.input.addEventListener("input", fill);
  fill();
  arm.input.value = "ewc 1000";
  explorer(place, "Forgetting (stored runs)", [curriculum, arm], [], () => {
    const chosen = [...new Set(["none", arm.value])];
    const found = chosen.map(name => meanMatrix(runs.filter(run => run.curriculum === curriculum.value && run.arm === name)));
    const { tasks } = runs.find(run => run.curriculum === curriculum.value);
    const seeds = runs.filter(run => run.curriculum === curriculum.value && run.arm === arm.value).length;
    const tables = found.map((matrix, number) => dataTable(`${chosen[number] === "none" ? "Without protection" : chosen[number]}: solved (%)`,
      ["after stage", ...tasks], matrix.map((row, stage) => [stage ? tasks[stage - 1] ?? `${stage}` : "start",
        ...row.map((share, task) => shade(share, task === stage - 1))])));
    const lost = chosen.map((name, number) => `${name} ${short(100 * forgotten(found[number]))} points`).join("; ");
    return [tables, `Forgotten, mean over ${seeds} seeds: ${lost}. Framed: the task of each stage.`];
  });
}

/* A share in percent, over a ground that is darker for more. */
function shade(share, framed) {
  const style = `background:color-mix(in srgb, ${BLUE} ${Math.round(45 * share)}%, transparent)`;
  return element("span", { class: framed ? "share framed" : "share", style }, `${Math.round(100 * share)}`);
}

/* A recorded training run, step by step: its curves up to the step, and, where they were kept, answers at this step. */
function runBoard(place) {
  const { title = "A GRPO run", history, verdict, asked = [] } = JSON.parse(place.dataset.recording);
  const last = history[history.length - 1].step, step = slider("step", last, 0, last, 1);
  const points = key => history.filter(row => row[key] !== undefined).map(row => [row.step, row[key]]);
  const panels = [
    ["Reward", [["mean reward", "reward", BLUE], ["accuracy on 20 held-out problems", "heldout accuracy", RED], ["on topic (not rewarded)", "on topic", RED]], 1],
    ["Completion length", [["tokens per completion", "completions/mean_length", BLUE]]],
    ["Groups with equal rewards", [["share of tied groups", "frac_reward_zero_std", BLUE]], 1],
    ["Entropy", [["entropy", "entropy", BLUE]]],
  ].map(([name, series, top]) => [name, series.filter(([, key]) => points(key).length), top]);
  const buttons = element("div", { class: "rewards" }, player(step, asked.length ? 1500 : 200));
  const group = "a group of this step, which is trained on";
  const shown = choice("answers to", [...asked.map(one => one.question), group]);
  const answers = element("div", { class: "kept" });
  const parts = asked.length ? [step, shown] : [step];
  explorer(place, `${title} (a recording)`, parts, [buttons], () => {
    const at = step.value, row = history.find(one => one.step === at) ?? {};
    const drawn = panels.slice(0, asked.length ? 2 : panels.length).map(([title, series, top]) => {
      const lines = series.map(([name, key, color], number) => ({ name, color, dashes: number ? "6 3" : "", points: points(key) }));
      const most = top ?? roundTop(Math.max(...lines.flatMap(line => line.points.map(([, value]) => value))));
      return curves(title, [0, last], [0, most], lines, at);
    });
    const values = panels.flatMap(([, series]) => series).filter(([, key]) => row[key] !== undefined)
      .map(([name, key]) => `${name} ${short(row[key])}`).join(", ");
    const question = asked.find(one => one.question === shown.value);
    if (asked.length) answers.replaceChildren(...(question ? keptLook(question.looks, at) : keptGroup(row)));
    return [drawn, `Step ${at} of ${last}: ${values || "before training"}.${at === last ? ` ${verdict}` : ""}`];
  });
  if (asked.length) place.append(answers);
}

/* Answers to a held-out question after a step, next to the first ones with how probable a token of them has become. */
function keptLook(looks, at) {
  const [first] = looks, now = looks.find(look => look.steps === at) ?? first;
  const bar = share => element("i", { class: "chance", "aria-hidden": "true", style: `width:${(100 * share).toFixed(1)}%` });
  const before = first.rows.map((row, number) => {
    const item = answerRow(row, [row.answer, `reward ${row.reward}`,
      `probability per token ${percent(first.per_token[number])}${at ? ` → ${percent(now.per_token[number])}` : ""}`]);
    item.append(bar(now.per_token[number]));
    return item;
  });
  const list = (words, rows) => element("div", {}, element("p", { class: "lead" }, words), element("ol", { class: "answers" }, ...rows));
  return [list("Answers before training", before),
    ...(at ? [list(`Answers after step ${at}`, now.rows.map(row => answerRow(row, [row.answer, `reward ${row.reward}`])))] : [])];
}

/* The group that was kept of a step. */
function keptGroup(row) {
  if (!row.rows) return [element("p", {}, "No group has been sampled yet. Press Play, or move the slider to step 1.")];
  const signed = value => `advantage ${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`;
  return [element("div", {}, element("p", { class: "lead" }, row.question), element("ol", { class: "answers" },
    ...row.rows.map(one => answerRow(one, [one.answer, `reward ${one.reward}`, signed(one.advantage)]))))];
}

Object.assign(window.courseExplorers, { unpunished, quantizeMatrix, relativeError, meanMatrix, forgotten });
const RECORDED = { rewards: rewardLab, quantization, forgetting: forgettingBoard, run: runBoard };
for (const place of document.querySelectorAll("[data-recorded]")) RECORDED[place.dataset.recorded](place);
