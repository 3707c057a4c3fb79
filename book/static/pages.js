/* What Jupyter Book's pages leave out: names for the arrows of the contents, plain cells for the empty corners of
   tables, scrolling by keyboard, and words in place of LaTeX in the results of a search. */
"use strict";

for (const arrow of document.querySelectorAll(".bd-sidebar-primary summary")) {
  const page = arrow.closest("li")?.querySelector("a")?.textContent.trim();
  if (page) arrow.setAttribute("aria-label", `Pages under ${page}`);
}

for (const corner of document.querySelectorAll(".bd-article th")) { // the empty corner of a table heads nothing
  if (!corner.textContent.trim()) corner.replaceWith(Object.assign(document.createElement("td"), { className: corner.className }));
}

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
