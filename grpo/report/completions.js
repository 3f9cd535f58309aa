// The completions: a step's, one held-out problem's over the steps, or all that a search finds; of one run, or of two
// side by side.
const WORDS = new Map([["train", "training"], ["eval", "evaluation"]]);
const HEADS = new Set(["problem", "sample"]);  // numbers that tell a held-out answer, and say nothing about it
const PROBLEM = "problem";  // in the place of a phase: one held-out problem over the steps
const MOST_FOUND = 30;  // articles of a search, until more are asked for
const ORDERS = [
  ["", "as recorded", () => 0],
  ["high", "highest reward first", (a, b) => reward(b) - reward(a)],
  ["low", "lowest reward first", (a, b) => reward(a) - reward(b)],
  ["long", "longest first", (a, b) => size(b) - size(a)],
  ["short", "shortest first", (a, b) => size(a) - size(b)],
];
const VERDICTS = [
  ["", "all", "", () => true],
  ["wrong", "wrong", "correct", ({ facts }) => facts.correct === false],
  ["right", "right", "correct", ({ facts }) => facts.correct === true],
  ["cut", "cut off", "finished", ({ facts }) => facts.finished === false],
];
const reward = ({ facts }) => facts.reward ?? (facts.correct === true ? 1 : 0);
const size = ({ facts, text }) => facts.tokens ?? text.length;
let places = [];  // the slider's choices: steps, or the keys of problems
let most = MOST_FOUND;
let drawn = "";  // the articles that are shown, as JSON

// The record. A problem is told by its number in the held-out split, and by its answer, should the split differ.
const phaseOf = () => ($("phase").value === PROBLEM ? "eval" : $("phase").value);
const keyOf = ({ prompt, answer, pictures, completions }) => JSON.stringify([completions[0].facts.problem ?? [prompt, pictures], answer]);
const nameOf = (group) => {
  const { problem } = group.completions[0].facts;
  return known(problem) ? `problem ${problem}` : "";
};
const blocksOf = (run, phase) => (data.completions[run] ?? []).filter((block) => block.phase === phase);
const groupAt = (run, phase, step, key) => blocksOf(run, phase).find((block) => block.step === step)?.groups.find((group) => keyOf(group) === key);
const columns = () => ($("beside").value === "" ? [+$("run").value] : [+$("run").value, +$("beside").value]);

// The search.
function needle() {
  const words = $("words").value.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&");
  return words ? new RegExp(words, "iu") : null;
}
function condition() {  // of a completion and its group; null where all are wanted
  const words = needle(), [low, high] = ["low", "high"].map((id) => $(id).value), verdict = $("verdict").value;
  if (!words && !verdict && low === "" && high === "" && !$("order").value) return null;
  const judge = VERDICTS.find(([value]) => value === verdict)[3];
  return (completion, { prompt, answer }) => judge(completion)
    && (low === "" || completion.facts.reward >= +low) && (high === "" || completion.facts.reward <= +high)
    && (!words || [completion.text, prompt, answer, ...(completion.segments ?? []).map(({ text }) => text)].some((text) => words.test(text)));
}

// Articles: plain objects {title, prompts, pictures, answer, rows}. Rows have a name and the completions of each column.
function beside(group, step, phase, first = group?.completions) {
  const others = columns().slice(1).map((run) => groupAt(run, phase, step, keyOf(group))?.completions ?? []);
  return [first, ...others];
}
function promptsOf(groups) { return [...new Set(groups.filter(Boolean).map(({ prompt }) => prompt))]; }
function articlesOfStep(block) {
  return block.groups.map((group) => ({
    title: nameOf(group), key: block.phase === "eval" && keyOf(group), pictures: group.pictures, answer: group.answer,
    prompts: promptsOf([group, ...columns().slice(1).map((run) => groupAt(run, block.phase, block.step, keyOf(group)))]),
    rows: [{ name: "", columns: beside(group, block.step, block.phase) }],
  }));
}
function articlesOfProblem(key) {
  const steps = [...new Set(columns().flatMap((run) => blocksOf(run, "eval").map(({ step }) => step)))].sort((a, b) => a - b);
  const rows = steps.map((step) => ({ step, groups: columns().map((run) => groupAt(run, "eval", step, key)) }));
  const groups = rows.flatMap((row) => row.groups).filter(Boolean);
  return [{
    title: nameOf(groups[0]), prompts: promptsOf(groups), pictures: groups[0].pictures, answer: groups[0].answer,
    rows: rows.map((row) => ({
      name: `step ${row.step.toLocaleString("en")}`, columns: row.groups.map((group) => group?.completions ?? []) })),
  }];
}
function articlesFound(wanted) {  // neighbours of one group that are found are in one article
  const found = blocksOf($("run").value, phaseOf()).flatMap(({ step, phase, groups }) => groups.flatMap((group) =>
    group.completions.filter((completion) => wanted(completion, group)).map((completion) => ({ step, phase, group, completion }))));
  const order = ORDERS.find(([value]) => value === $("order").value)[2], articles = [];
  found.sort((a, b) => order(a.completion, b.completion));
  let last = null;
  for (const { step, phase, group, completion } of found) {
    if (group === last) articles.at(-1).rows[0].columns[0].push(completion);
    else articles.push({
      title: [nameOf(group), `step ${step.toLocaleString("en")}`].filter(Boolean).join(", "), key: phase === "eval" && keyOf(group),
      prompts: promptsOf([group]), pictures: group.pictures, answer: group.answer, rows: [{ name: "", columns: beside(group, step, phase, [completion]) }],
    });
    last = group;
  }
  return [articles, found.length];
}

// Texts become text nodes. Characters that cannot be seen, or turn the text around them, are shown by their numbers.
const UNSEEN = "(?![\\t\\n\\u200c\\u200d])[\\p{Cc}\\p{Cf}\\p{Cs}\\p{Zl}\\p{Zp}]";  // two of these join and part letters
function textNode(tag, text) {
  const made = node(tag), words = needle();
  let end = 0;
  for (const match of text.matchAll(new RegExp(`(${UNSEEN})|(</?(?:think|answer)>)${words ? `|${words.source}` : ""}`, "giu"))) {
    made.append(text.slice(end, match.index), match[1]
      ? node("i", "", `U+${match[1].codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`)
      : node(match[2] ? "span" : "mark", match[2] ? "tag" : "", match[0]));
    end = match.index + match[0].length;
  }
  made.append(text.slice(end));
  made.dir = "auto";
  if (text.length > 1200) made.tabIndex = 0;
  return made;
}
function segmentNode({ role, text }) {
  const drawn = role.startsWith("assistant");
  return node("div", `segment ${drawn ? "drawn" : "answered"}`,
    node("p", "role", drawn ? "model" : `${role}, not trained on`), textNode("pre", text));
}
function treeNode(tree) {  // an agent's episode: which turn goes on after which, and when the policy was at work
  const end = Math.max(...tree.map((turn) => turn.answered_at));
  const rows = tree.map(({ turn, after, begins, prompt_tokens, tokens, seen, asked_at, answered_at }) => {
    const bar = node("div", "bar");
    bar.style.marginLeft = `${(100 * asked_at) / end}%`;
    bar.style.width = `${(100 * (answered_at - asked_at)) / end}%`;
    const drawn = seen ? short(tokens) : `${short(tokens)}, not trained on: its client was gone`;
    return [`turn ${turn}`, begins ? begins.replaceAll("_", " ") : `after turn ${after}`, short(prompt_tokens), drawn, [bar],
      `${short(asked_at)} to ${short(answered_at)}\u00a0s`];
  });
  const table = node("table", "tree"), made = node("details", "", node("summary", "soft", `turns of the episode: ${tree.length}`), table);
  fillTable(table, "", ["", "begins", "tokens before", "drawn", "", "asked and answered"], rows);
  return made;
}
function completionNode({ text, facts, segments, tree }) {
  const verdict = facts.advantage ?? (facts.correct === undefined ? 0 : facts.correct ? 1 : -1);
  const format = (name, value) => typeof value === "boolean" ? (value ? "yes" : "no") : typeof value === "string" ? value
    : (name === "advantage" && value > 0 ? "+" : "") + short(value);
  return node("div", `completion ${verdict > 0 ? "good" : verdict < 0 ? "bad" : ""}`,
    node("p", "facts", ...Object.entries(facts).filter(([name, value]) => !(HEADS.has(name) && known(value))).map(([name, value]) =>
      node("span", "", `${name} `, node("b", "", format(name, value))))),
    ...(segments?.map(segmentNode) ?? [textNode("pre", text)]), ...(tree?.length ? [treeNode(tree)] : []));
}
function pictureNode(name) {
  const src = columns().map((run) => data.pictures[run]?.[name]).find(Boolean);
  return src ? Object.assign(node("img"), { src, alt: name, title: name }) : node("span", "soft", `${name} is not in this page`);
}
function articleNode({ title, key, prompts, pictures = [], answer, rows }) {
  const follow = node("button", "", "over the steps");
  follow.hidden = !key || $("phase").querySelector(`[value=${PROBLEM}]`) === null;
  follow.addEventListener("click", () => followProblem(key));
  const head = title || !follow.hidden ? [node("div", "head", node("h3", "", title), follow)] : [];
  return node("article", "group card", ...head,
    node("dl", "", ...prompts.flatMap((prompt) => [node("dt", "", "prompt"), node("dd", "", textNode("pre", prompt))]),
      ...(pictures.length ? [node("dt", "", pictures.length > 1 ? "pictures" : "picture"), node("dd", "pictures", ...pictures.map(pictureNode))] : []),
      ...(answer ? [node("dt", "", "answer"), node("dd", "", textNode("pre", answer))] : [])),
    ...rows.flatMap((row) => [...(row.name ? [node("h3", "at", row.name)] : []),
      node("div", "columns", ...row.columns.map((completions, i) => node("div", "",
        ...(row.columns.length > 1 ? [node("p", "soft", ...[runCell(columns()[i])].flat())] : []),
        ...(completions.length ? completions.map(completionNode) : [node("p", "soft", "nothing recorded")]))))]));
}

// The controls. They hold what was chosen; new numbers fill them again and leave that as it is.
function fillSelect(select, options) {  // [value, text] each
  const before = select.value;
  if (select.options.length !== options.length || options.some(([value], i) => select.options[i].value !== value))
    select.replaceChildren(...options.map(([value, text]) => Object.assign(node("option", "", text), { value })));
  select.value = options.some(([value]) => value === before) ? before : options[0]?.[0];
}
function fillControls() {
  const run = $("run").value, phases = [...new Set((data.completions[run] ?? []).map(({ phase }) => phase))].sort().reverse();
  const evaluations = blocksOf(run, "eval");
  fillSelect($("beside"), [["", "–"], ...data.runs.map(({ name }, i) => [String(i), name]).filter(([i]) => i !== run)]);
  fillSelect($("phase"), [...phases.map((name) => [name, WORDS.get(name) ?? name]),
    ...(evaluations.length ? [[PROBLEM, "one held-out problem"]] : [])]);
  const all = blocksOf(run, phaseOf()).flatMap(({ groups }) => groups.flatMap(({ completions }) => completions));
  const has = (fact) => all.some(({ facts }) => facts[fact] !== undefined);
  fillSelect($("verdict"), VERDICTS.filter(([, , fact]) => !fact || has(fact)));
  $("verdict").parentNode.hidden = $("verdict").options.length < 2;
  fillSelect($("order"), ORDERS.filter(([value]) => has("reward") || !["high", "low"].includes(value)));
  for (const id of ["low", "high"]) {
    if (!has("reward")) $(id).value = "";
    $(id).parentNode.hidden = !has("reward");
  }
  const before = places[$("place").value];
  places = $("phase").value === PROBLEM
    ? [...new Set(evaluations.flatMap(({ groups }) => groups.map(keyOf)))]
    : blocksOf(run, phaseOf()).map(({ step }) => step);
  $("place").max = Math.max(0, places.length - 1);
  if (typeof before === "number" && typeof places[0] === "number") $("place").value = nearest(places, before);
  else $("place").value = places.includes(before) ? places.indexOf(before) : typeof places[0] === "number" ? places.length - 1 : 0;
}
const numberOf = (place) => {  // the number in the field beside the slider
  const [problem] = typeof place === "string" ? JSON.parse(place) : [place];
  return known(problem) ? problem : places.indexOf(place) + 1;
};
function showPlace(place) {
  $("place").value = Math.min(Math.max(place, 0), places.length - 1);
  showArticles();
}
function followProblem(key) {
  for (const id of ["words", "verdict", "low", "high", "order"]) $(id).value = "";
  $("phase").value = PROBLEM;
  fillControls();
  showPlace(places.indexOf(key));
  $("completions").scrollIntoView();
}
function showArticles() {
  const wanted = condition(), place = places[$("place").value], index = +$("place").value, what = typeof place === "string" ? PROBLEM : "step";
  $("back").disabled = index <= 0 || !!wanted;
  $("forward").disabled = index >= places.length - 1 || !!wanted;
  $("step").disabled = $("place").disabled = place === undefined || !!wanted;
  $("step").value = place === undefined ? "" : numberOf(place);
  $("step").previousSibling.textContent = `${what} `;
  $("place").setAttribute("aria-label", what);
  $("place").setAttribute("aria-valuetext", place === undefined ? "none" : `${what} ${numberOf(place)}`);
  let articles = [], words = "This run has no completions here.";
  if (wanted) {
    const [found, count] = articlesFound(wanted);
    articles = found;
    words = `${count.toLocaleString("en")} found in ${blocksOf($("run").value, phaseOf()).length.toLocaleString("en")} steps`;
  } else if (what === PROBLEM) {
    articles = articlesOfProblem(place);
    words = `${index + 1} of ${places.length}`;
  } else if (place !== undefined) {
    const block = blocksOf($("run").value, phaseOf())[index];
    articles = articlesOfStep(block);
    words = `${index + 1} of ${places.length}` + (block.left_out ? `, ${block.left_out} more completions of this step left out` : "");
  }
  $("which").textContent = words;
  $("more").hidden = articles.length <= most;
  const shown = articles.slice(0, most), next = JSON.stringify([shown, $("words").value]);
  if (next !== drawn) $("groups").replaceChildren(...shown.map(articleNode));  // else a reader's selection stays
  drawn = next;
}
function listenToCompletions() {
  const again = () => { most = MOST_FOUND; fillControls(); showArticles(); };
  for (const id of ["run", "beside", "phase", "verdict", "order"]) $(id).addEventListener("change", again);
  for (const id of ["words", "low", "high"]) $(id).addEventListener("input", again);
  $("place").addEventListener("input", showArticles);
  $("back").addEventListener("click", () => showPlace(+$("place").value - 1));
  $("forward").addEventListener("click", () => showPlace(+$("place").value + 1));
  $("step").addEventListener("change", () => showPlace(nearest(places.map(numberOf), +$("step").value)));
  $("more").addEventListener("click", () => { most += MOST_FOUND; showArticles(); });
}
function showCompletions() {
  const first = data.completions.findIndex((blocks) => blocks.length);
  $("completions").hidden = first < 0;
  if (first < 0) return;
  if (!$("run").options.length) {
    fillSelect($("run"), data.runs.map(({ name }, i) => [String(i), name]));
    $("run").value = first;
  }
  for (const id of ["run", "beside"]) $(id).parentNode.hidden = !several;
  fillControls();
  showArticles();
}
