// A plot: its axes, its cursor, and the steps that all plots show. grpo/report/page.py joins this file, charts.js,
// completions.js and page.js into the page's one script.
"use strict";
const logarithmic = new Set();  // titles of the charts with a logarithmic axis
const plots = new Map();  // by key
let zoom = null;  // [first, last] step that all charts show; null shows all
const redraw = () => plots.forEach((plot) => plot.draw());

// Axes. `share` is a value's height in the plot, from 0 to 1.
function nice(x) {  // 1, 2 or 5 times a power of ten, x or more
  const power = 10 ** Math.floor(Math.log10(x));
  return power * [1, 2, 5, 10].find((n) => n * power >= x * 0.999);
}
function multiples(low, high, tick) {
  const first = Math.ceil(low / tick - 1e-9);
  return [...Array(Math.max(0, Math.min(40, Math.floor(high / tick + 1e-9) - first + 1))).keys()].map((i) => (first + i) * tick);
}
function linearAxis(low, high) {
  if (low >= 0 && low < 0.15 * high) low = 0;
  if (high - low <= 1e-9 * Math.abs(high)) {
    const room = Math.abs(high) * 0.1 || 1;
    if (low !== 0) low -= room;
    high += room;
  }
  const tick = nice((high - low) / 4);
  low = Math.floor(low / tick + 1e-9) * tick;
  high = Math.ceil(high / tick - 1e-9) * tick;
  return { ticks: multiples(low, high, tick), share: (value) => (value - low) / (high - low) };
}
function logAxis(low, high) {  // of positive values
  low /= 1.1;
  high *= 1.1;
  const decades = Math.log10(high / low), first = Math.floor(Math.log10(low)), within = (tick) => tick >= low && tick <= high;
  let ticks = multiples(first, first + decades + 1, 1).flatMap((power) => (decades > 2 ? [1] : [1, 2, 5]).map((n) => n * 10 ** power));
  if (decades < 0.7) ticks = linearAxis(low, high).ticks;
  ticks = ticks.filter(within);
  const every = Math.ceil(ticks.length / 7);
  return { ticks: ticks.filter((_, i) => i % every === 0), share: (value) => Math.log10(value / low) / decades };
}
function stepTicks(first, last, most) {
  return last > first ? multiples(first, last, Math.max(1, nice((last - first) / most))) : [first];
}

// A plot: axes, a cursor that pointer and arrow keys move, and dragging over it to zoom. `content` has `title` and four
// functions: range() returns the limits of both axes or null, canBeLog() whether all values are positive,
// draw(area, scale) adds the curves, and read(cursor, area, scale) the numbers at a step.
function makePlot(content) {
  const at = node("span"), key = node("ul", "key"), area = svg("svg", { class: "plot", role: "slider", tabindex: 0 });
  const log = node("button", "log", "log"), heading = node("h3");
  const card = node("div", "card", node("div", "head", heading, node("div", "", at, " ", log)), area, key);
  let cursor = null, scale = null, from = null;  // `from`: the step at which dragging began

  function draw() {
    const { width, height } = area.getBoundingClientRect();
    heading.textContent = content.title;
    if (!width) return;
    const range = content.range(), isLog = content.canBeLog() && logarithmic.has(content.title);
    area.replaceChildren();
    area.setAttribute("viewBox", `0 0 ${width} ${height}`);
    card.classList.toggle("empty", !range);
    log.hidden = !range || !content.canBeLog();
    log.setAttribute("aria-pressed", isLog);
    log.setAttribute("aria-label", `logarithmic axis of ${content.title}`);
    if (!range) return key.replaceChildren();
    const { first, last } = range, { ticks, share } = (isLog ? logAxis : linearAxis)(range.low, range.high);
    const texts = ticks.map((y) => short(+y.toPrecision(6)));
    const left = Math.max(34, 12 + 6.4 * Math.max(...texts.map((text) => text.length))), right = width - 8;
    const top = 6, bottom = height - 20, steps = Math.max(last - first, 1);
    scale = {
      first, last, bottom,
      x: (step) => left + (right - left) * (step - first) / steps,
      y: (value) => bottom - (bottom - top) * share(value),
      step: (x) => first + steps * (x - left) / (right - left),
    };
    ticks.forEach((value, i) => {
      const y = scale.y(value).toFixed(1);
      area.append(svg("line", { class: "rule", x1: left, x2: right, y1: y, y2: y }),
        svg("text", { x: left - 6, y: +y + 4, "text-anchor": "end" }, texts[i]));
    });
    area.append(svg("text", { x: 0, y: height - 4 }, "step"));
    for (const step of stepTicks(first, last, Math.max(2, Math.floor(width / 70)))) {
      const x = scale.x(step), anchor = x < left + 16 ? "start" : x > right - 16 ? "end" : "middle";
      area.append(svg("text", { x, y: height - 4, "text-anchor": anchor }, step.toLocaleString("en")));
    }
    // Curves end at the plot's sides, with room for half a dot.
    const box = { x: left - 5, y: 0, width: right - left + 10, height: bottom + 5 };
    const inner = svg("svg", { ...box, viewBox: Object.values(box).join(" ") });
    area.append(inner);
    content.draw(inner, scale);
    if (cursor !== null) inner.append(svg("line", {
      class: "cursor", x1: scale.x(cursor), x2: scale.x(cursor), y1: top, y2: bottom }));
    if (from !== null && cursor !== null) {
      const [begin, end] = [from, cursor].map(scale.x).sort((a, b) => a - b);
      inner.append(svg("rect", { class: "chosen", x: begin, y: top, width: end - begin, height: bottom - top }));
    }
    const { step, items } = content.read(cursor, inner, scale);
    at.textContent = cursor === null ? "" : `step ${step.toLocaleString("en")}`;
    key.replaceChildren(...items.map((entries) => node("li", "", ...entries.flatMap(({ mark, name, value }) =>
      [node("span", name ? "" : "bare", mark, name ? `${name} ` : "", node("b", "", value)), " "]))));
    const words = items.flat().map(({ name, run, value }) => `${run || name} ${value}`.trim()).join(", ");
    area.setAttribute("aria-label", `${content.title}, over steps ${first} to ${last}`);
    for (const [name, value] of [["min", first], ["max", last], ["now", step], ["text", `step ${step}: ${words}`]])
      area.setAttribute(`aria-value${name}`, value);
  }
  function move(step) {
    cursor = step === null || !scale ? null : Math.min(Math.max(Math.round(step), scale.first), scale.last);
    draw();
  }
  const pointed = (event) => scale.step(event.clientX - area.getBoundingClientRect().left);
  area.addEventListener("pointermove", (event) => { if (scale) move(pointed(event)); });
  area.addEventListener("pointerdown", (event) => {
    if (!scale || event.button !== 0 || event.pointerType === "touch") return;  // a finger reads, and scrolls the page
    area.setPointerCapture(event.pointerId);
    move(pointed(event));
    from = cursor;
  });
  area.addEventListener("pointerup", () => {
    const ends = [from, cursor].sort((a, b) => a - b);
    const isDrag = from !== null && cursor !== null && from !== cursor;
    from = null;
    if (isDrag) setZoom(...ends);
  });
  area.addEventListener("dblclick", () => setZoom());
  area.addEventListener("pointerleave", () => { from = null; move(null); });
  area.addEventListener("blur", () => move(null));
  area.addEventListener("keydown", (event) => {
    if (!scale) return;
    const now = cursor ?? scale.last, far = Math.max(1, Math.round((scale.last - scale.first) / 10));
    const target = {
      ArrowLeft: now - 1, ArrowDown: now - 1, ArrowRight: now + 1, ArrowUp: now + 1,
      PageDown: now - far, PageUp: now + far, Home: scale.first, End: scale.last, Escape: null,
    }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    move(target);
  });
  log.addEventListener("click", () => {
    if (!logarithmic.delete(content.title)) logarithmic.add(content.title);
    draw();
  });
  new ResizeObserver(draw).observe(area);
  return { card, draw, show(next) { content = next; draw(); } };
}
function cardOf(key, content) {  // the same one after new numbers have come, with its cursor and focus
  if (plots.has(key)) plots.get(key).show(content);
  else plots.set(key, makePlot(content));
  return plots.get(key).card;
}
function setZoom(...steps) {  // without steps all are shown
  zoom = steps.length ? steps : null;
  $("zoom-first").value = zoom ? zoom[0] : "";
  $("zoom-last").value = zoom ? zoom[1] : "";
  $("zoom-all").hidden = !zoom;
  redraw();
}
