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

/* What is wider than its place can be reached with the Tab key, and is then scrolled by the arrow keys. */
function reachable() {
  for (const box of document.querySelectorAll(".bd-article table, .bd-article .math, .bd-article .output, .bd-article pre, .bd-article p:has(> img)")) {
    if (box.scrollWidth > box.clientWidth + 1) box.tabIndex = 0;
    else if (box.getAttribute("tabindex") === "0") box.removeAttribute("tabindex");
  }
}
window.addEventListener("load", reachable);
window.addEventListener("resize", reachable);

if (typeof Search !== "undefined") {
  const plain = Search.htmlToText;
  Search.htmlToText = (page, anchor) => plain(page.replace(/\\\([\s\S]+?\\\)|\\\[[\s\S]+?\\\]/g, "…"), anchor);
}
