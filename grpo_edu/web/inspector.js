/* The token inspector: the answers of one group, each token marked by how strongly the next update pushes it up or down,
   and the numbers of the token that is chosen. It draws a token record (grpo_edu.runs.tokens) with the mathematics of
   formulas.js, which is loaded before, in every element with the attribute data-tokens. */
"use strict";

(() => {
  const SCALINGS = {
    group: "÷ std of group", batch: "÷ std of batch", none: "not divided", mean: "÷ mean (MaxRL)", rloo: "leave-one-out",
  };
  const HARDLY = 1e-4; // nats: a smaller change of a log-probability counts as none
  let made = 0;

  function node(name, attributes = {}, ...children) {
    const found = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
    found.append(...children);
    return found;
  }

  /* A number with a true minus sign; small ones keep three digits. */
  function number(value, digits = 3) {
    if (!Number.isFinite(value)) return "–";
    const size = Math.abs(value);
    const text = size && size < 10 ** -digits ? size.toExponential(1).replace("e-", "e−") : size.toFixed(digits);
    return `${value < 0 ? "−" : ""}${text}`;
  }
  const signed = (value, digits) => (value > 0 ? "+" : "") + number(value, digits);
  const share = value => (value > 0 && value < 5e-5 ? "< 0.01%" : value < 1 && value > 0.99995 ? "> 99.99%" : `${+(100 * value).toFixed(value < 0.1 ? 2 : 1)}%`);
  const visible = text => text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");

  /* "π_{ref}" with a real subscript. */
  function formula(text) {
    const parts = text.split(/_\{([^}]*)\}/);
    return node("span", {}, ...parts.map((part, place) => (place % 2 ? node("sub", {}, part) : part)));
  }

  function control(label, input, output) {
    input.id = `grpo-inspector-${++made}`;
    return node("div", { class: "control" }, node("label", { for: input.id }, label), ...(output ? [output] : []), input);
  }

  function list(label, options, chosen) {
    const input = node("select", {}, ...Object.entries(options).map(([value, text]) => node("option", { value }, text)));
    input.value = String(chosen);
    return { node: control(label, input), input, get value() { return input.value; }, set value(to) { input.value = to; }, say() {} };
  }

  function slider(label, chosen, max, step) {
    const input = node("input", { type: "range", min: 0, max: Math.max(max, chosen), step: "any", value: chosen });
    const output = node("output", { "aria-live": "off" }); // screen readers say a slider's value anyway
    input.addEventListener("keydown", event => { // "any" keeps the run's own value; the arrow keys move by one step
      const sign = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
      if (!sign) return;
      event.preventDefault();
      input.value = Math.round((Number(input.value) + sign * step) / step) * step;
      input.dispatchEvent(new Event("input", { bubbles: true }));
    });
    return {
      node: control(label, input, output), input, get value() { return Number(input.value); },
      set value(to) { input.value = to; }, say() { output.textContent = number(Number(input.value)); },
    };
  }

  /* How the weight of a token is made, in words and numbers. */
  function weightWords(loss, record, own) {
    const rows = record.rewards.length, longest = record.max_completion_length;
    return LOSSES[loss].weightWords({ own, rows, all: record.num_tokens, longest });
  }

  /* The push of a token as a formula, and the same with its numbers. */
  function pushFormula(settings, term) {
    const { loss, high, beta } = settings, { ratio, advantage, clipped, importance } = term;
    const rho = number(ratio), gain = number(advantage, 3).replace(/^−.*/, "($&)");
    let [letters, numbers] = LOSSES[loss].pushWords({ rho, gain, high, clipped, number });
    if (importance !== 1) [letters, numbers] = [`u · (${letters})`, `${number(importance)} · (${numbers})`];
    const held = term.held / (beta || 1);
    if (beta) {
      letters += " − β · (1 − π_{ref} / π)";
      numbers += ` − ${number(beta)} · (1 − ${number(1 - held)})`;
    }
    return [`push = w · [ ${letters}\u00a0]`, `= ${number(term.weight, 5)} · [ ${numbers}\u00a0] = ${signed(term.push, 5)}`];
  }

  function clipWords(settings, term) {
    const { loss, low, high } = settings;
    return LOSSES[loss].clipWords({ clipped: term.clipped, low, high, number });
  }

  function inspect(place) {
    const record = JSON.parse(place.dataset.tokens), run = record.settings;
    const hasReference = record.groups[0].completions[0].ref !== undefined;
    const updates = record.groups[0].completions[0].logps.length - 1;
    const scalings = run.scaling === "recorded" ? { recorded: "as in the run", ...SCALINGS } : { ...SCALINGS };
    if (record.rewards.some(reward => reward < 0)) delete scalings.mean;
    const groups = Object.fromEntries(record.groups.map((one, index) => {
      const mean = one.completions.reduce((sum, each) => sum + (each.reward ?? 0), 0) / one.completions.length;
      const tie = one.completions.every(each => each.reward === one.completions[0].reward);
      return [index, `${one.index + 1}: ${tie ? "all" : "mean"} ${number(mean, 2)}`];
    }));
    const parts = {
      group: list("group", groups, Math.max(0, record.groups.findIndex(one => new Set(one.completions.map(each => each.reward)).size > 1))),
      update: list("update", Object.fromEntries(Array.from({ length: updates }, (_, k) => [k, `${k + 1} of ${updates}`])), 0),
      shown: list("marks show", { push: "the push", change: "what it did" }, "push"),
      loss: list("loss", Object.fromEntries(Object.keys(LOSSES).map(loss => [loss, loss])), run.loss),
      scaling: list("advantage", scalings, run.scaling),
      level: list("ratio", { token: "per token", sequence: "per answer" }, run.level),
      low: slider("ε", run.low, 1, 0.01), high: slider("ε high", run.high, LOSSES[run.loss].capsWeight ? 5 : 1, 0.01),
      beta: slider("β (KL)", run.beta, 1, 0.01),
    };
    if (!hasReference) parts.beta.input.disabled = true;
    const chosen = { row: 0, place: 0 };

    const back = node("button", { type: "button", class: "back" }, "As in the run");
    const summary = node("p", { class: "summary", role: "status" });
    const prompt = node("p", { class: "prompt", tabindex: 0, role: "region", "aria-label": "Prompt" });
    const answers = node("ol", { class: "sampled" });
    const panel = node("div", { class: "panel", role: "region", tabindex: 0, "aria-label": "The chosen token" });
    const guide = node("p", { class: "guide" },
      "At the first update every ratio is 1, so each token is pushed as its answer's advantage and its weight say. " +
      "Choose a later update: tokens whose ratio has left the range are clipped. " +
      "Then let the marks show what it did: all tokens share the weights, so some move against their push.");
    const shownParts = Object.entries(parts).filter(([name]) => name !== "update" || updates > 1).map(([, part]) => part.node);
    place.replaceChildren(
      node("div", { class: "controls" }, ...shownParts, back), ...(updates > 1 ? [guide] : []), summary,
      node("p", { class: "legend" }, "▲ pushed up, ▼ pushed down: the thicker the line, the more. Dashed: clipped, or not pushed. ✓ highest reward of the group."),
      node("div", { class: "columns" }, node("div", { class: "left" }, prompt, answers), panel));
    place.classList.add("grpo-inspector");
    place.dataset.lmSuppressShortcuts = "true"; // in JupyterLab the arrow keys belong to the tokens

    const settingsNow = () => ({
      loss: parts.loss.value, scaling: parts.scaling.value, level: parts.level.value, low: parts.low.value,
      high: parts.high.value, beta: hasReference ? parts.beta.value : 0, update: Number(parts.update.value),
    });
    const asInRun = settings => Object.keys(run).every(key => settings[key] === run[key]);

    let buttons = [];
    const build = () => {
      const group = record.groups[parts.group.value];
      prompt.textContent = group.prompt.trim();
      buttons = group.completions.map((one, row) => one.tokens.map((text, at) => {
        const button = node("button", { type: "button" }, node("i", { "aria-hidden": "true" }), visible(text));
        button.addEventListener("click", () => choose(row, at));
        return button;
      }));
      const best = Math.max(...group.completions.map(one => one.reward ?? -Infinity));
      const tie = group.completions.every(one => one.reward === group.completions[0].reward);
      answers.replaceChildren(...group.completions.map((one, row) => {
        const facts = node("span", { class: "facts" });
        return node("li", {}, node("span", { class: "tick" }, tie ? "" : one.reward === best ? "✓" : "✗"), facts,
          node("span", { class: "tokens" }, ...buttons[row]));
      }));
      prompt.scrollTop = prompt.scrollHeight;
      let most = -1; // begin with the token that this update changed most
      group.completions.forEach((one, row) => one.tokens.forEach((_, at) => {
        const size = Math.abs(one.logps[updates][at] - one.logps[0][at]);
        if (size > most) [most, chosen.row, chosen.place] = [size, row, at];
      }));
    };

    /* Scroll the answers, and not the page, to the one with the chosen token. The last ones cannot be on top: then the list
       begins with an earlier one that is not cut, if the chosen one can still be seen. */
    const find = () => {
      const tops = [...answers.children].map(one => one.offsetTop), { offsetTop, offsetHeight } = answers.children[chosen.row];
      const most = answers.scrollHeight - answers.clientHeight;
      const first = tops[tops.findLastIndex((top, row) => row <= chosen.row && top <= most)] ?? 0;
      answers.scrollTop = first + answers.clientHeight < offsetTop + offsetHeight ? offsetTop : first;
    };

    const choose = (row, at) => {
      [chosen.row, chosen.place] = [row, at];
      buttons[row][at].focus({ preventScroll: true });
      draw();
    };

    const draw = () => {
      Object.values(parts).forEach(part => part.say());
      const settings = settingsNow(), group = record.groups[parts.group.value];
      const terms = groupTerms(record, group, settings);
      const change = (row, at) => group.completions[row].logps[settings.update + 1][at] - group.completions[row].logps[settings.update][at];
      const values = terms.map((row, r) => row.map((term, at) => (parts.shown.value === "push" ? term.push : change(r, at))));
      const largest = Math.max(1e-12, ...values.flat().map(Math.abs));
      let pushed = 0, followed = 0, against = 0, clipped = 0;
      values.forEach((row, r) => {
        const one = group.completions[r], facts = answers.children[r].children[1];
        facts.textContent = `reward ${one.reward === null ? "–" : number(one.reward, 2)}, A = ${signed(terms[r][0]?.advantage ?? 0, 2)}`;
        row.forEach((value, at) => {
          const button = buttons[r][at], term = terms[r][at], here = r === chosen.row && at === chosen.place;
          const sign = Math.abs(value) < 1e-9 ? 0 : Math.sign(value);
          if (Math.abs(term.push) > 1e-12) {
            pushed++;
            if (Math.abs(change(r, at)) >= HARDLY) term.push * change(r, at) > 0 ? followed++ : against++;
          }
          clipped += Number(term.clipped);
          button.className = `token ${["down", "still", "up"][sign + 1]}${here ? " chosen" : ""}${term.clipped ? " clipped" : ""}`;
          button.style.setProperty("--strength", (Math.abs(value) / largest).toFixed(3));
          button.firstChild.textContent = ["▼", "", "▲"][sign + 1];
          button.tabIndex = here ? 0 : -1;
          button.setAttribute("aria-pressed", String(here));
          button.setAttribute("aria-label", `${visible(one.tokens[at])}, ${["down", "not pushed", "up"][sign + 1]} ${sign ? number(Math.abs(value), 5) : ""}${term.clipped ? ", clipped" : ""}, answer ${r + 1}`);
        });
      });
      const otherwise = asInRun(settings) ? "" : " The marks follow your settings; the update itself was made with those of the run.";
      const what = parts.shown.value === "push" ? `The strongest push on a token is ${number(largest, 5)}.` : `The largest change of a log-probability is ${number(largest)}.`;
      const left = record.left_out.length ? ` The run also used ${record.left_out.join(", ")}, which these marks leave out.` : "";
      const words = pushed
        ? `${pushed} tokens of this group are pushed${clipped ? `, and ${clipped} ${clipped === 1 ? "is" : "are"} ${LOSSES[settings.loss].capsWeight ? "capped" : "clipped"}` : ""}. In the update ${followed} of the pushed tokens moved in the direction of their push, ${against} against it, and ${pushed - followed - against} hardly moved. ${what}`
        : "No token of this group is pushed: all advantages are 0, and there is no KL term.";
      const said = words + otherwise + left; // the same words are not announced once more
      if (summary.textContent !== said) summary.textContent = said;
      drawPanel(settings, group, terms);
    };

    const drawPanel = (settings, group, terms) => {
      const { row, place: at } = chosen, one = group.completions[row], term = terms[row][at];
      if (!term) { panel.replaceChildren("This answer is empty."); return; }
      const now = one.logps[settings.update][at], after = one.logps[settings.update + 1][at];
      const policies = [["that sampled", one.sampling[at]], ["before this update", now], ["after this update", after]];
      if (one.ref) policies.splice(2, 0, ["reference", one.ref[at]]);
      const rows = policies.map(([name, logp]) => node("tr", {}, node("th", { scope: "row" }, name),
        node("td", {}, number(logp)), node("td", {}, share(Math.exp(logp)))));
      const own = (one.counts ?? one.tokens.map(() => 1)).reduce((sum, count) => sum + count, 0);
      const facts = [
        ["ratio ρ", number(term.ratio)], ["clipped", clipWords(settings, term)], ["KL (k3)", one.ref ? `${number(term.kl)} nats` : "no reference was kept"],
        ["weight w", `${number(term.weight, 5)} = ${term.weight ? weightWords(settings.loss, record, own) : "0: this token does not count"}`],
        ["loss of the token", number(term.loss)],
      ];
      const [letters, numbers] = pushFormula(settings, term);
      const way = term.push > 1e-12 ? "▲ up" : term.push < -1e-12 ? "▼ down" : "not at all";
      const moved = after - now, agrees = term.push * moved > 0;
      const verdict = `${asInRun(settings) ? "The update pushed it" : "Your settings would push it"} ${way}. Its log-probability then ` +
        `${Math.abs(moved) < HARDLY ? "hardly changed" : `${moved > 0 ? "rose" : "fell"} by ${number(Math.abs(moved))}`}` +
        `${Math.abs(term.push) > 1e-12 && Math.abs(moved) >= HARDLY && !agrees ? ", against its own push: all tokens share the weights, so the pushes on other tokens move it too" : ""}.`;
      const kinds = (one.alternatives?.[at] ?? []).map(([text, before, then]) => node("tr", {},
        node("th", { scope: "row" }, `${visible(text)}${text === one.tokens[at] ? " ←" : ""}`), node("td", {}, share(before)), node("td", {}, share(then)),
        node("td", { class: "bar", "aria-hidden": "true" }, node("i", { style: `width:${(100 * before).toFixed(1)}%` }), node("b", { style: `width:${(100 * then).toFixed(1)}%` }))));
      const table = (caption, heads, body) => node("table", {}, node("caption", {}, caption),
        node("thead", {}, node("tr", {}, ...heads.map(head => node("th", { scope: "col" }, head)))), node("tbody", {}, ...body));
      panel.replaceChildren(
        node("p", { class: "name" }, `“${visible(one.tokens[at])}”, token ${at + 1} of ${one.tokens.length} in answer ${row + 1}`),
        node("p", { class: "formula" }, formula(letters), node("br"), formula(numbers)),
        node("p", { class: "verdict" }, verdict),
        node("dl", {}, ...facts.flatMap(([name, text]) => [node("dt", {}, name), node("dd", {}, text)])),
        table("Log-probability under each policy", ["policy", "log π", "π"], rows),
        ...(kinds.length ? [table(updates > 1 ? `Alternatives, before the first and after the last update` : "Alternatives, before and after the update", ["token", "before", "after", "gray: before"], kinds)] : []));
    };

    answers.addEventListener("keydown", event => {
      const { row, place: at } = chosen;
      const to = {
        ArrowRight: () => (at + 1 < buttons[row].length ? [row, at + 1] : row + 1 < buttons.length ? [row + 1, 0] : null),
        ArrowLeft: () => (at ? [row, at - 1] : row ? [row - 1, buttons[row - 1].length - 1] : null),
        ArrowDown: () => (row + 1 < buttons.length ? [row + 1, Math.min(at, buttons[row + 1].length - 1)] : null),
        ArrowUp: () => (row ? [row - 1, Math.min(at, buttons[row - 1].length - 1)] : null),
        Home: () => [row, 0], End: () => [row, buttons[row].length - 1],
      }[event.key]?.();
      if (!to || to[1] < 0) return;
      event.preventDefault();
      choose(...to);
      buttons[to[0]][to[1]].scrollIntoView({ block: "nearest", inline: "nearest" });
    });
    for (const [name, part] of Object.entries(parts)) {
      part.input.addEventListener("input", () => {
        if (name === "group") build();
        if (name === "loss" && LOSSES[part.value].capsWeight && parts.high.value < 1) { parts.high.input.max = 5; parts.high.value = 5; }
        draw();
        if (name === "group") find();
      });
    }
    back.addEventListener("click", () => {
      for (const [key, value] of Object.entries(run)) parts[key].value = value;
      draw();
    });
    build();
    draw();
    find();
  }

  for (const place of document.querySelectorAll("[data-tokens]:not(.grpo-inspector)")) inspect(place);
})();
