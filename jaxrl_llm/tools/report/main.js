/** The JSON of a script that holds Base64 of gzip. */
async function unpack(node) {
  const letters = atob(node.textContent), bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  node.remove();
  return JSON.parse(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text());
}

function makeLegend(runs) {
  byId("legend").append(...runs.map((run, number) => {
    const chip = make("button", { type: "button", className: "chip", title: run.folder, "aria-pressed": "true" }, dot(number), run.name);
    chip.onclick = () => {
      if (!view.hidden.delete(number)) view.hidden.add(number);
      chip.setAttribute("aria-pressed", String(!view.hidden.has(number)));
      drawAll();
    };
    return chip;
  }));
}

const known = (run, metric) => (run.metrics[metric] || []).filter((value) => value !== null);
const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

/** The mean of the first tenth and of the last tenth of a metric, single values of an evaluation. */
function change(run, metric) {
  const values = known(run, metric);
  if (!values.length) return "-";
  const size = metric.startsWith("eval/") ? 1 : Math.max(1, Math.floor(values.length / 10));
  return `${show(mean(values.slice(0, size)))} → ${show(mean(values.slice(-size)))}`;
}

/** `30`, or `12 of 30` while a run goes on or where it was ended early. */
function progress(run) {
  const last = run.steps[run.steps.length - 1] ?? 0;
  return run.total > last ? `${show(last)} of ${show(run.total)}` : show(last);
}

function makeRuns({ runs, headlines }) {
  const online = headlines.some(([title]) => title === "Reward");
  const metrics = headlines.filter(([title]) => ["Held-out", "Length", online ? "Reward" : "Loss"].includes(title));
  const head = ["run", "algorithm", "model", "steps", "epochs", "time", "tokens", ...metrics.map(([, metric]) => metric)];
  const rows = runs.map((run, number) => make("tr", {},
    make("td", {}, make("span", { className: "chip", style: { padding: 0 } }, dot(number), make("b", { textContent: run.name }))),
    ...[run.algorithm ?? "-", run.model ?? "-", progress(run), show(known(run, "epoch").pop()), duration(run.times.length ? run.times[run.times.length - 1] - run.times[0] : 0),
      show(known(run, "num_tokens").pop()), ...metrics.map(([, metric]) => change(run, metric))].map((text, i) => make("td", { textContent: text, "data-label": head[i + 1] }))));
  byId("runs").firstChild.append(make("tr", {}, ...head.map((text) => make("th", { textContent: text }))), ...rows);
}

/** `3–5, 9`: the steps, in ranges of the run's own steps. */
function ranges(indices, steps) {
  const found = [];
  for (const i of indices) {
    const last = found[found.length - 1];
    if (last && last[1] === i - 1) last[1] = i; else found.push([i, i]);
  }
  return found.map(([from, to]) => ({ from, to, text: from === to ? `${steps[from]}` : `${steps[from]}–${steps[to]}` }));
}

function makeWarnings(runs) {
  const lines = [];
  runs.forEach((run, number) => {
    for (const metric of Object.keys(run.metrics)) {
      if (!metric.startsWith("warning/") && metric !== "nonfinite_gradient") continue;
      const fired = run.metrics[metric].flatMap((value, i) => (value > 0 ? [i] : []));
      if (!fired.length) continue;
      const spans = ranges(fired, run.steps), total = run.steps.length;
      const strip = make("div", { className: "strip" }, ...spans.map(({ from, to }) =>
        make("i", { style: { left: `${from / total * 100}%`, width: `${(to - from + 1) / total * 100}%` } })));
      const text = spans.slice(0, 8).map((span) => span.text).join(", ") + (spans.length > 8 ? ", …" : "");
      strip.title = `steps ${text}`;
      lines.push(make("div", { className: "warning" }, make("b", { textContent: metric.replace("warning/", "") }),
        make("span", { className: "chip", style: { padding: 0 } }, dot(number), run.name),
        make("div", {}, strip, make("span", { className: "quiet", textContent: `${fired.length} steps: ${text}` }))));
    }
  });
  byId("warnings").querySelector(".body").append(...(lines.length ? lines : [make("span", { className: "quiet", textContent: "None fired." })]));
}

function makePhases(runs) {
  const body = byId("phases").querySelector(".body");
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.metrics).filter((metric) => metric.startsWith("time/"))))];
  const hue = (name) => COLOURS[names.indexOf(name) % COLOURS.length];
  runs.forEach((run, number) => {
    const sums = names.map((name) => [name, known(run, name).reduce((a, b) => a + b, 0)]).filter(([, seconds]) => seconds > 0);
    const total = sums.reduce((all, [, seconds]) => all + seconds, 0);
    if (!total) return;
    body.append(
      make("div", { className: "keys", style: { margin: "0 0 4px" } }, make("span", {}, dot(number), run.name, ` · ${duration(total)}`)),
      make("div", { className: "phases" }, ...sums.map(([name, seconds]) => make("span", {
        title: `${name.slice(5)} ${duration(seconds)}`, style: { width: `${seconds / total * 100}%`, background: hue(name) } }))),
      make("div", { className: "keys" }, ...sums.map(([name, seconds]) => make("span", {},
        make("span", { className: "dot", style: { background: hue(name) } }), `${name.slice(5)} ${duration(seconds)} (${Math.round(seconds / total * 100)} %)`))));
  });
  byId("phases").hidden = !body.childElementCount;
}

function makeSettings({ runs, differences }) {
  const body = byId("settings").querySelector(".body");
  if (!differences.length) { body.append(make("span", { className: "quiet", textContent: "All as their defaults." })); return; }
  const head = make("tr", {}, ...["key", "default", ...runs.map((run) => run.name)].map((text) => make("th", { textContent: text })));
  const rows = differences.map(({ key, default: usual, values, differs }) => make("tr", {},
    make("td", { className: "key", textContent: key }), make("td", { className: "quiet", textContent: usual ?? "-", "data-label": "default" }),
    ...values.map((value, i) => make("td", { className: differs ? "other" : "", textContent: value ?? "-", "data-label": runs[i].name }))));
  body.append(make("p", { className: "quiet", textContent: runs.length > 1 ? "Where runs differ (marked), then what is not as its default." : "What is not as its default." }),
    make("table", {}, head, ...rows));
}

/** When, where and by which command each run was started; the newest start in full, the others by their time. */
function makeOrigin(runs) {
  const line = (name, value) => [make("dt", { textContent: name }), make("dd", { textContent: value ?? "-" })];
  byId("origin").querySelector(".body").append(...runs.map((run, number) => {
    const start = run.starts[run.starts.length - 1], last = run.times[run.times.length - 1];
    const lines = [...line("folder", run.folder), ...line("last record", last ? new Date(last * 1000).toLocaleString() : "-")];
    if (!start) lines.push(...line("start", "not recorded"));
    else {
      const others = run.starts.slice(0, -1).map((one) => `${one.time} (after step ${one.step})`);
      lines.push(...line("started", start.time + (start.step ? `, after step ${start.step}` : "")));
      if (others.length) lines.push(...line("before that", others.join("; ")));
      lines.push(...line("host", start.host), ...line("devices", start.devices), ...line("command", start.command),
        ...line("commit", start.commit), ...line("versions", Object.entries(start.versions ?? {}).map((pair) => pair.join(" ")).join(", ")));
    }
    return make("div", { className: "origin" }, make("span", { className: "chip", style: { padding: 0 } }, dot(number), make("b", { textContent: run.name })), make("dl", {}, ...lines));
  }));
}

/** The value of a metric that is the same wherever it was recorded, at least twice; null for any other. */
function constant(runs, metric) {
  const values = runs.flatMap((run) => known(run, metric));
  return values.length > 1 && values.every((value) => value === values[0]) ? values[0] : null;
}

function makeCharts({ runs, headlines, explained, groups }) {
  byId("headlines").append(...headlines.map(([title, metric]) => new Chart(runs, metric, title, explained[title]).figure));
  const all = [];
  byId("all").querySelector(".groups").append(...groups.map(({ title, explanation, metrics }) => {
    const still = metrics.filter((metric) => constant(runs, metric) !== null);
    const figures = metrics.filter((metric) => !still.includes(metric)).map((metric) => new Chart(runs, metric, "").figure);
    const words = still.map((metric) => make("span", { "data-metric": metric, textContent: `${metric} ${show(constant(runs, metric))}` }));
    all.push(...figures, ...words);
    return make("details", { open: true }, make("summary", {}, make("b", { textContent: title }), make("span", { className: "quiet", textContent: ` ${explanation}` })),
      make("div", { className: "grid" }, ...figures),
      words.length ? make("div", { className: "keys" }, make("span", { textContent: "The same wherever it was recorded:" }), ...words) : null);
  }));
  byId("metric").oninput = soon(() => all.forEach((node) => { node.hidden = !node.dataset.metric.includes(byId("metric").value.trim()); }));
}

/** Loads the page again every few seconds while runs go on, but not while somebody reads a completion or has a filter. */
function reload({ written, reload: seconds }) {
  byId("written").textContent = `Written ${written}${seconds ? `; it follows the runs every ${seconds} s` : ""}.`;
  const busy = () => !byId("detail").hidden || [...document.querySelectorAll("input[type=search], #head input")].some((input) => input.value);
  if (seconds) setInterval(() => { if (!busy()) location.reload(); }, seconds * 1000);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  drawAll();
}

function makeControls(content) {
  const smoothing = byId("smoothing"), write = () => { byId("smoothing-value").textContent = (+smoothing.value).toFixed(2); };
  smoothing.value = view.smoothing = content.smoothing;
  write();
  smoothing.oninput = () => { view.smoothing = +smoothing.value; write(); drawAll(); };
  byId("axis").onchange = () => { view.axis = byId("axis").value; drawAll(); };
  byId("log").onchange = () => { view.log = byId("log").checked; drawAll(); };
  byId("theme").onclick = () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  addEventListener("resize", () => { drawAll(); drawRows(); });
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

async function makeTable(content) {
  table.runs = content.runs;
  const nodes = [...document.querySelectorAll("script.completions")];
  byId("completions").hidden = !nodes.length;
  byId("note").textContent = content.note;
  byId("note").hidden = !content.note;
  byId("search").oninput = soon(filter);
  byId("clear").onclick = clearFilters;
  byId("csv").onclick = saveCsv;
  byId("table").onscroll = () => requestAnimationFrame(drawRows);
  byId("completions").onkeydown = keys;
  for (const [number, node] of nodes.entries()) {
    byId("count").textContent = `reading ${Math.round(number / nodes.length * 100)} %`;
    addPiece(await unpack(node));
    if (!number) { makeHead(); filter(); }
  }
  if (nodes.length) {
    const names = table.runs.length > 1 ? table.columns.size + 1 : table.columns.size;
    if (names > table.names.length) makeHead();
    filter();
  }
}

async function main() {
  if (typeof DecompressionStream === "undefined") throw new Error("this browser is too old to read the page: it has no DecompressionStream");
  const content = await unpack(document.querySelector("script.curves"));
  for (const run of content.runs) {
    const start = run.times[0];
    run.axes = { step: run.steps, time: run.times.map((time) => (time - start) / 3600), tokens: run.metrics.num_tokens || run.steps.map(() => null) };
  }
  view.units = content.units;
  reload(content);
  makeLegend(content.runs);
  makeRuns(content);
  makeControls(content);
  makeCharts(content);
  makeWarnings(content.runs);
  makePhases(content.runs);
  makeOrigin(content.runs);
  makeSettings(content);
  await makeTable(content);
  document.body.dataset.ready = "true";
}

main().catch((error) => {
  byId("problem").textContent = `The report cannot be shown: ${error.message}`;
  byId("problem").hidden = false;
  document.body.dataset.ready = "failed";
});
