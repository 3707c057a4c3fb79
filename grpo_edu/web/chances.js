/* The panel "what the model says, most probable first": one row for each different answer, with its probability as a
   number and a bar, and a line where it was before training. The playground calls chancesTable; elsewhere every element
   with data-chances is filled, and in a dashboard the bars move on from where they were. */
"use strict";

(() => {
  const BLUE = "#0072B2", RED = "#D55E00", GRAY = "#8a8a8a"; // right, wrong, not scored
  const MAX_ROWS = 8;
  const before = new WeakMap(); // dashboard → the widths of its last bars, by answer

  function node(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  function percent(share) {
    return share < 1e-4 ? "under 0.01%" : `${Number((100 * share).toPrecision(2))}%`;
  }

  /* rows: { text, right, now, before }; right is null before the answer is scored, and before is null before training.
     rest: all other answers together, { now, before }, or null. */
  function chancesTable(title, names, rows, rest = null) {
    const shown = [...rows].sort((one, other) => other.now - one.now).slice(0, MAX_ROWS);
    if (rest) shown.push({ text: "all other answers together", right: null, ...rest });
    const lines = shown.map(({ text, right, now, before }) => {
      const color = right === null ? GRAY : right ? BLUE : RED, sign = right === null ? "" : right ? "✓ " : "✗ ";
      const bar = [node("i", { style: `width:${(100 * now).toFixed(1)}%;background:${color}` })];
      if (before !== null) bar.push(node("b", { style: `left:${(100 * before).toFixed(1)}%` }));
      const words = before === null ? [] : [node("span", { class: "visually-hidden" }, percent(before))];
      return node("tr", {}, node("td", { title: text }, sign + text), node("td", {}, percent(now)),
        node("td", { class: "bar" }, node("div", {}, ...bar), ...words));
    });
    const head = node("tr", {}, ...names.map(name => name ? node("th", { scope: "col" }, name) : node("td", {})));
    const table = node("table", {}, node("caption", {}, title), node("thead", {}, head), node("tbody", {}, ...lines));
    return node("div", { class: "grpo-chances", role: "region", tabindex: "0", "aria-label": title }, table);
  }

  function fill(place) {
    const { title, names, rows, rest } = JSON.parse(place.dataset.chances);
    const box = place.closest(".grpo-edu-dashboard") ?? place, last = before.get(box) ?? {}, widths = {};
    const made = chancesTable(title, names, rows, rest);
    for (const row of made.querySelectorAll("tbody tr")) {
      const bar = row.querySelector("i"), text = row.cells[0].title;
      widths[text] = bar.style.width;
      if (!(text in last)) continue;
      bar.style.width = last[text];
      requestAnimationFrame(() => requestAnimationFrame(() => { bar.style.width = widths[text]; }));
    }
    before.set(box, widths);
    place.removeAttribute("data-chances");
    place.replaceChildren(made);
  }

  window.courseChances = { chancesTable, percent, fill: window.courseChances?.fill ?? fill };
  for (const place of document.querySelectorAll("[data-chances]")) window.courseChances.fill(place);
})();
