// The page: what all its parts use, the head with the runs and their settings, and the page's beginning and renewal.
const $ = (id) => document.getElementById(id);
let data = JSON.parse($("data").textContent);  // what grpo/report/page.py has read
const several = data.runs.length > 1;
const known = (x) => typeof x === "number" && Number.isFinite(x);

// Numbers. A no-break space stands between number and unit.
function short(x) {
  if (!known(x)) return "–";
  const size = Math.abs(x);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e12) return x.toExponential(2).replace(/\.?0+e/, "e");
  if (size >= 1e5) {
    const [name, unit] = [["G", 1e9], ["M", 1e6], ["k", 1e3]].find(([, unit]) => size >= unit);
    return `${+(x / unit).toPrecision(3)}\u00a0${name}`;
  }
  if (Number.isInteger(x)) return x.toLocaleString("en");
  return size >= 1000 ? Math.round(x).toLocaleString("en") : String(+x.toPrecision(size >= 1 ? 4 : 3));
}
const percent = (x) => (known(x) ? `${(100 * x).toFixed(1)}\u00a0%` : "–");
function duration(seconds) {
  const s = Math.round(seconds), m = Math.floor(s / 60), h = Math.floor(m / 60);
  if (m < 1) return `${short(+seconds.toPrecision(3))}\u00a0s`;
  return h < 1 ? `${m}\u00a0min ${s % 60}\u00a0s` : `${h.toLocaleString("en")}\u00a0h ${m % 60}\u00a0min`;
}

// Nodes. Texts become text nodes, never HTML.
function node(tag, name, ...children) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  made.append(...children);
  return made;
}
function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
function swatch(colour, dash) {
  const mark = dash === undefined ? svg("rect", { width: 12, height: 12, x: 1, y: 1, rx: 3 })
    : svg("path", { d: "M0 7H14", "stroke-width": 2.5, "stroke-dasharray": dash });
  mark.style[dash === undefined ? "fill" : "stroke"] = colour;  // which may be a var()
  return svg("svg", { class: "swatch", viewBox: "0 0 14 14", "aria-hidden": "true" }, mark);
}
function fillTable(table, caption, head, rows) {  // a cell is a text or a list of nodes; the first of a row names it
  const cell = (tag, scope) => (value) => {
    const made = node(tag, "", ...[value].flat());
    if (scope) made.scope = scope;
    return made;
  };
  table.replaceChildren(
    ...(caption ? [node("caption", "", caption)] : []),
    node("thead", "", node("tr", "", ...head.map(cell("th", "col")))),
    node("tbody", "", ...rows.map(([first, ...rest]) =>
      node("tr", "", cell("th", "row")(first), ...rest.map(cell("td"))))));
}
function arrange(parent, children) {  // moves only children in another place: the rest keeps its focus
  children.forEach((child, i) => { if (parent.children[i] !== child) parent.insertBefore(child, parent.children[i] ?? null); });
  while (parent.children.length > children.length) parent.lastElementChild.remove();
}
const runColour = (i) => data.colours[i % data.colours.length];
const runCell = (i) => (several ? [swatch(runColour(i)), data.runs[i].name] : data.runs[i].name);

function showHead() {
  const { runs } = data, title = several ? `${runs.length} runs` : runs[0].name;
  $("title").textContent = title;
  document.title = `${title} · GRPO report`;
  $("about").textContent = `${data.version ? "Live: read at" : "Made"} ${data.made}. ` + (data.window > 1
    ? `Strong lines are centred moving averages over ${data.window} steps, faint ones the values themselves.`
    : "Nothing is smoothed.");
  const pair = (values, text) => [...new Set(values.map(text))].join(" → ") || "–";
  const heldOut = (run) => run.accuracy.length  // without a verdict a run has rewards alone
    ? pair(run.accuracy, ([value, error]) => percent(value) + (known(error) ? ` ± ${(100 * error).toFixed(1)}` : ""))
    : pair(run.eval_reward, ([value, error]) => `reward ${short(value)}` + (known(error) ? ` ± ${short(error)}` : ""));
  const judged = runs.some((run) => run.accuracy.length) ? "held-out accuracy" : "held-out";
  fillTable($("summary"), "", ["run", "steps", "reward", judged, "tokens", "time in steps"], runs.map((run, i) => [
    runCell(i), short(run.steps) + (known(run.max_steps) ? ` of ${short(run.max_steps)}` : ""), pair(run.reward, short),
    heldOut(run), short(run.tokens), duration(run.seconds),
  ]));
  $("zoom-last").placeholder = Math.max(0, ...runs.map((run) => run.steps));
  const notes = runs.flatMap((run) => run.notes.map((note) => (several ? `${run.name}: ${note}` : note)));
  $("notes").hidden = !notes.length;
  $("notes").replaceChildren(...notes.map((note) => node("li", "", note)));
  const settings = Object.entries(data.settings), head = ["setting", ...runs.map((_, i) => runCell(i))];
  const fill = (table, rows) =>
    fillTable(table, "", head, rows.map(([name, values]) => [name, ...values.map((value) => value ?? "–")]));
  const different = settings.filter(([, values]) => new Set(values).size > 1);
  $("settings").hidden = !different.length;
  fill($("settings").querySelector("table"), different);
  const starts = data.starts.flatMap((ofRun, i) => ofRun.map((start) => [i, start]));
  $("machine").hidden = !settings.length && !starts.length;
  const facts = [...new Set(starts.flatMap(([, start]) => Object.keys(start)))];
  $("starts").parentNode.hidden = !starts.length;
  fillTable($("starts"), "", ["start", ...starts.map(([i]) => runCell(i))],
    facts.map((fact) => [fact, ...starts.map(([, start]) => start[fact] ?? "–")]));
  fill($("all"), settings);
}
function showLegend() {
  if (several) data.runs.forEach((run, i) => {
    const box = node("input");
    Object.assign(box, { type: "checkbox", checked: true });
    box.addEventListener("change", () => {
      if (!hidden.delete(i)) hidden.add(i);
      redraw();
    });
    $("legend").append(node("label", "", box, swatch(runColour(i)), run.name));
  });
  const fields = [$("zoom-first"), $("zoom-last")];
  for (const field of fields) field.addEventListener("change", () => {
    const [first, last] = fields.map(({ value, placeholder }) => Number(value || placeholder));
    if (fields.every(({ value }) => value === "")) setZoom();
    else if (first < last) setZoom(first, last);  // else the other is still to come
  });
  $("zoom-all").addEventListener("click", () => setZoom());
}
function show() {
  showHead();
  showCharts();
  showTime();
  showCompletions();
  const parts = [...document.querySelectorAll("section:not([hidden])")];
  const links = parts.map((section) => [section.querySelector("h2").textContent, `#${section.id}`]);
  if ($("nav").children.length !== links.length) $("nav").replaceChildren(...links.map(([text, href]) =>
    Object.assign(node("a", "", text), { href })));
}

// A page that is served live asks its server for newer numbers as long as somebody looks.
const WAIT = 2000;  // milliseconds
async function renew() {
  if (!document.hidden) {
    const answer = await fetch(`data?seen=${data.version}`).catch(() => null);
    const newer = answer?.status === 200 && await answer.json().catch(() => null);
    if (newer) {
      data = newer;
      show();
    }
    $("lost").textContent = answer?.ok ? data.lost ?? "" : `The server has ended: these are the numbers of ${data.made}.`;
  }
  setTimeout(renew, WAIT);
}

showLegend();
listenToCompletions();
show();
if (data.version) setTimeout(renew, WAIT);
