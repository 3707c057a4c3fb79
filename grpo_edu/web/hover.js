/* Values on hover: a picture with data-values, from grpo_edu.figures.hover, says what its curves show under the pointer.
   `box` is the dashboard that holds such pictures; they are replaced while a run is drawn. */
const part = name => {
  const found = document.querySelector(`.grpo-edu-${name}`) ?? document.createElement("div");
  found.className = `grpo-edu-${name}`;
  found.setAttribute("aria-hidden", "true");
  found.style.cssText = "position:fixed;z-index:999;pointer-events:none;display:none;" + (name === "guide"
    ? "width:1px;background:#222" : "white-space:pre;background:#222;color:#fff;padding:4px 8px;border-radius:4px;font:12px sans-serif");
  if (!found.parentNode) document.body.append(found);
  return found;
};
const tip = part("tip"), guide = part("guide"), known = new WeakMap();
const hide = () => { tip.style.display = guide.style.display = "none"; };
const short = value => String(Number(value.toPrecision(4))).replace("-", "−");
const nearest = (values, x) => values.reduce((best, value, i) => Math.abs(value - x) < Math.abs(values[best] - x) ? i : best, 0);
box.addEventListener("pointerleave", hide);
box.addEventListener("pointermove", event => {
  const image = event.target.closest?.("img[data-values]");
  if (!image) return hide();
  if (!known.has(image)) known.set(image, JSON.parse(image.dataset.values));
  const frame = image.getBoundingClientRect();
  const across = (event.clientX - frame.left) / frame.width, down = (event.clientY - frame.top) / frame.height;
  const panel = known.get(image).find(({ at: [left, top, width, height] }) =>
    across > left - 0.01 && across < left + width + 0.01 && down > top && down < top + height);
  if (!panel) return hide();
  const [left, top, width, height] = panel.at;
  const [low, high] = panel.x.map(x => panel.log ? Math.log10(x) : x);
  const scale = x => panel.log ? Math.log10(x) : x;
  const aim = low + (high - low) * (across - left) / width;
  const all = panel.lines.flatMap(([, xs]) => xs);
  const x = all[nearest(all.map(scale), aim)];
  const said = panel.lines.flatMap(([name, xs, ys]) => xs.includes(x) ? [`${name} ${short(ys[xs.indexOf(x)])}`] : []);
  tip.textContent = [`${panel.along} ${short(x)}`, ...said].join("\n");
  const place = frame.left + frame.width * (left + width * (scale(x) - low) / (high - low));
  Object.assign(guide.style, { display: "block", left: `${place}px`, top: `${frame.top + frame.height * top}px`,
    height: `${frame.height * height}px` });
  tip.style.display = "block";
  const room = window.innerWidth - tip.offsetWidth - 8;
  Object.assign(tip.style, { left: `${Math.max(4, Math.min(place + 10, room))}px`, top: `${event.clientY + 14}px` });
});
