// The contents of the plots: the curves of metrics, by section, and the time by phase.
const DASHES = ["", "7 3", "1.5 3", "7 3 1.5 3"];
const hidden = new Set();  // places of the runs that are switched off

function nearest(steps, step) {  // place in an ascending list
  const after = steps.findIndex((other) => other >= step);
  if (after < 1) return after < 0 ? steps.length - 1 : 0;
  return step - steps[after - 1] <= steps[after] - step ? after - 1 : after;
}

function curves(chart) {
  const metrics = Object.keys(chart.curves), grouped = several && metrics.length > 1;
  const lines = metrics.flatMap((metric, i) => chart.curves[metric].map((line) => ({
    ...line, metric,
    colour: runColour(several ? line.run : i),
    dash: DASHES[(several ? i : Math.floor(i / data.colours.length)) % DASHES.length],
    strong: line.smooth.length ? line.smooth : line.values,
  })));
  const shown = () => lines.filter((line) => !hidden.has(line.run));
  const lowest = (line) => Math.min(...line.values.map((value, i) => value - (line.errors[i] || 0)));
  const isPositive = lines.every((line) => lowest(line) > 0);
  function cut(line) {  // to the zoom, and a point on either side of it, to which the line leads
    if (!zoom) return line;
    const inside = (step) => step >= zoom[0] && step <= zoom[1];
    const kept = line.steps.map((step, i) => inside(step) || inside(line.steps[i + 1]) || inside(line.steps[i - 1])
      || (step < zoom[0] && line.steps[i + 1] > zoom[1]) || (step > zoom[1] && line.steps[i - 1] < zoom[0]));
    const parts = ["steps", "values", "errors", "smooth", "strong"];
    return { ...line, ...Object.fromEntries(parts.map((name) => [name, line[name].filter((_, i) => kept[i])])) };
  }
  const visible = () => shown().map(cut).filter(({ steps }) => steps.length);
  return {
    title: chart.title,
    canBeLog: () => isPositive,
    range() {
      const range = { first: Infinity, last: -Infinity, low: Infinity, high: -Infinity };
      for (const { steps, values, errors } of visible()) {
        range.first = Math.min(range.first, steps[0]);
        range.last = Math.max(range.last, steps.at(-1));
        values.forEach((value, i) => {
          range.low = Math.min(range.low, value - (errors[i] || 0));
          range.high = Math.max(range.high, value + (errors[i] || 0));
        });
      }
      if (zoom) [range.first, range.last] = zoom;
      return range.low <= range.high ? range : null;
    },
    draw(area, { x, y }) {
      const path = (steps, values) => "M" + steps.map((step, i) => `${x(step).toFixed(1)},${y(values[i]).toFixed(1)}`).join("L");
      for (const { steps, values, smooth, colour } of visible()) if (smooth.length)
        area.append(svg("path", { d: path(steps, values), stroke: colour, opacity: 0.32 }));
      for (const { steps, values, errors, smooth, strong, colour, dash } of visible()) {
        errors.forEach((error, i) => area.append(svg("path", { stroke: colour,
          d: `M${x(steps[i])},${y(values[i] - error)}V${y(values[i] + error)}m-3,0h6M${x(steps[i]) - 3},${y(values[i] - error)}h6` })));
        area.append(svg("path", { d: path(steps, strong), stroke: colour, "stroke-width": 1.75, "stroke-dasharray": dash }));
        if (steps.length < 25 && !smooth.length) steps.forEach((step, i) =>
          area.append(svg("circle", { class: "dot", cx: x(step), cy: y(values[i]), r: 3.5, fill: colour })));
      }
    },
    read(cursor, area, { last, x, y }) {
      const place = ({ steps }) => nearest(steps, cursor ?? last), cuts = visible();
      const away = (line) => Math.abs(line.steps[place(line)] - cursor);
      const closest = cuts.reduce((a, b) => (away(b) < away(a) ? b : a));
      const entry = (line) => {
        const { steps, strong, errors, colour, dash, run, metric } = line, i = place(line);
        if (cursor !== null) area.append(svg("circle", { class: "dot", cx: x(steps[i]), cy: y(strong[i]), r: 4, fill: colour }));
        const value = short(strong[i]) + (errors[i] ? ` ± ${short(+errors[i].toPrecision(2))}` : "");
        if (grouped) return { mark: swatch(colour), name: "", run: data.runs[run].name, value };
        return { mark: swatch(colour, dash), name: several ? data.runs[run].name : metric, value };
      };
      const items = grouped
        ? metrics.map((metric, i) => [{ mark: swatch("var(--soft)", DASHES[i % DASHES.length]), name: metric, value: "" },
          ...cuts.filter((line) => line.metric === metric).map(entry)])
        : cuts.map((line) => [entry(line)]);
      return { step: cursor === null ? last : closest.steps[place(closest)], items };
    },
  };
}

// The sections. Charts that say nothing, as no value in them ever changes, are rows of one table; the most important
// ones stay charts even then: a reward that never changes is news.
function isConstant({ overview, curves }) {
  const lines = Object.values(curves).flat();
  return !overview && lines.some(({ values }) => values.length > 1)
    && lines.every(({ values }) => values.every((value) => value === values[0]));
}
const sections = new Map();  // by title
function showCharts() {
  const constant = data.sections.flatMap(({ charts }) => charts.filter(isConstant));
  const changing = data.sections.map(({ title, charts }) => [title, charts.filter((chart) => !isConstant(chart))]);
  arrange($("sections"), changing.filter(([, charts]) => charts.length).map(([title, charts]) => {
    if (!sections.has(title)) {
      sections.set(title, node("section", "", node("h2", "", title), node("div", "grid")));
      sections.get(title).id = "of-" + title.toLowerCase().replace(/[^a-z]+/g, "-");
    }
    arrange(sections.get(title).lastChild, charts.map((chart) => cardOf(`${title}: ${chart.title}`, curves(chart))));
    return sections.get(title);
  }));
  const rows = constant.flatMap(({ title, curves }) => Object.entries(curves).map(([metric, lines]) => [
    metric === title ? metric : [`${title} `, node("span", "soft", metric)],
    ...data.runs.map((_, i) => short(lines.find(({ run }) => run === i)?.values[0])),
  ]));
  $("constant").hidden = !rows.length;
  $("constant").querySelector("summary").textContent = `Never changed: ${rows.length} more`;
  fillTable($("constant").querySelector("table"), "", ["", ...data.runs.map((_, i) => runCell(i))], rows);
}

const total = (numbers) => numbers.reduce((a, b) => a + b, 0), phaseNames = () => Object.keys(data.phases[0].totals);
const phaseColour = (name) => (name === data.other ? "var(--other)" : runColour(phaseNames().indexOf(name)));
const barHeights = ({ steps, seconds }) => steps.slice(1).map((_, i) => total(Object.values(seconds).map((heights) => heights[i])));
function stacked(run) {
  const { steps, seconds } = data.phases[run], bars = steps.length - 1;
  const high = Math.max(...data.phases.flatMap(barHeights));  // the same for all runs, so that they can be compared
  return {
    title: several ? data.runs[run].name : "seconds per step",
    canBeLog: () => false,
    range() {
      const [first, last] = zoom ?? [steps[0], steps.at(-1)];
      return !hidden.has(run) && bars > 0 ? { first, last, low: 0, high } : null;
    },
    draw(area, { x, y, bottom }) {
      const below = Array(bars).fill(0);
      for (const name of phaseNames()) {
        let d = "M0 0";
        for (let i = 0; i < bars; i++) {
          const left = x(steps[i]), right = x(steps[i + 1]), gap = right - left > 5 ? 1 : 0;
          const lower = Math.min(bottom, y(below[i])), upper = y(below[i] += seconds[name][i]);
          if (lower - upper > 0.01) d += `M${left.toFixed(2)} ${lower.toFixed(2)}H${(right - gap).toFixed(2)}V${upper.toFixed(2)}H${left.toFixed(2)}Z`;
        }
        const bar = svg("path", { d });
        bar.style.fill = phaseColour(name);
        area.append(bar);
      }
    },
    read(cursor, area, { last }) {
      const bar = Math.max(0, steps.findLastIndex((step, i) => i < bars && step <= (cursor ?? last)));
      const items = phaseNames().map((name) => [{ mark: swatch(phaseColour(name)), name, value: `${short(seconds[name][bar])}\u00a0s` }]);
      return { step: steps[bar], items: items.reverse() };
    },
  };
}
function showTime() {
  const totals = data.phases.map((phases) => total(Object.values(phases.totals)));
  $("time").hidden = !total(totals);
  if (!total(totals)) return;
  arrange($("time").children[1], data.runs.map((_, i) => cardOf(`time ${i}`, stacked(i))));
  fillTable($("time").querySelector("table"),
    "Seconds within steps; evaluation and saving are not in them. A bar is the mean of the steps that it spans.",
    ["phase", ...data.runs.map((_, i) => runCell(i))],
    [...phaseNames().map((name) => [[swatch(phaseColour(name)), name], ...data.phases.map((phases, i) =>
      `${percent(totals[i] ? phases.totals[name] / totals[i] : 0)} · ${duration(phases.totals[name])}`)]),
    ["all", ...totals.map(duration)]]);
}
