/* What Jupyter Book's pages leave out: names for the arrows of the contents, a banner, plain cells for the empty corners of
   tables, names for the live figures, scrolling by keyboard, and words for LaTeX in the results of a search. */
"use strict";

// the theme binds the first button of each menu; those of its hidden header must not be the first
for (const button of document.querySelectorAll("#pst-header :is(.primary-toggle, .secondary-toggle)")) button.remove();

for (const arrow of document.querySelectorAll(".bd-sidebar-primary summary")) {
  const page = arrow.closest("li")?.querySelector("a")?.textContent.trim();
  if (page) arrow.setAttribute("aria-label", `Pages under ${page}`);
}

document.querySelector(".navbar-brand")?.parentElement.setAttribute("role", "banner");

for (const corner of document.querySelectorAll(".bd-article th")) { // the empty corner of a table heads nothing
  if (!corner.textContent.trim()) corner.replaceWith(Object.assign(document.createElement("td"), { className: corner.className }));
}

window.addEventListener("load", () => { // what is alive is found by those who go from heading to heading or by regions
  for (const box of document.querySelectorAll(".course-explorer")) {
    const name = box.querySelector(":scope > .name");
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", name?.textContent ?? "Token inspector");
    if (name) { name.setAttribute("role", "heading"); name.setAttribute("aria-level", "2"); }
  }
});

/* What a cell printed: a long line continues below its own beginning, and a table keeps its columns on a phone. */
for (const output of document.querySelectorAll(".bd-article .cell_output pre")) {
  const lines = output.textContent.replace(/\n$/, "").split("\n");
  output.classList.toggle("columns", lines.filter(line => /\S {2,}\S/.test(line)).length > 1);
  if ([...output.children].some(part => part.textContent)) continue; // parts of it are colored
  output.replaceChildren(...lines.map(text => {
    const line = Object.assign(document.createElement("span"), { className: "line", textContent: `${text}\n` });
    line.style.setProperty("--indent", `${/^ */.exec(text)[0].length + 2}ch`);
    return line;
  }));
}

/* What is wider than its place can be reached with the Tab key, and is then scrolled by the arrow keys. It fades out at
   the side where more of it follows. */
const WIDE = ":is(table, div.math, .output, pre, p:has(> img))", FORMULA = "mjx-container[display]";

function fade(box) {
  box.classList.toggle("wider", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
}

function reachable() {
  for (const box of document.querySelectorAll(`.bd-article ${WIDE}`)) {
    if (box.scrollWidth > box.clientWidth + 1) box.tabIndex = 0;
    else if (box.getAttribute("tabindex") === "0") box.removeAttribute("tabindex");
    fade(box);
  }
  document.querySelectorAll(FORMULA).forEach(fade); // MathJax has given these the keyboard
}
window.addEventListener("load", () => { reachable(); window.MathJax?.startup?.promise.then(reachable); });
window.addEventListener("resize", reachable);
document.addEventListener("toggle", reachable, true);
document.addEventListener("scroll", event => event.target.matches?.(`${WIDE}, ${FORMULA}`) && fade(event.target), true);

if (typeof Search !== "undefined") {
  const plain = Search.htmlToText;
  Search.htmlToText = (page, anchor) => plain(page.replace(/\\\([\s\S]+?\\\)|\\\[[\s\S]+?\\\]/g, "…"), anchor);
}
